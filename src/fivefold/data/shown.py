"""The first rows of a run as the model will see them: the output of `fivefold data`.

On a terminal trained tokens are green and context is dim; elsewhere trained text is enclosed in `[[` and `]]`.
"""

import json as json_format
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from fivefold.core.text import shown
from fivefold.core.units import many
from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.data.prepare import PreparedData

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

_MOST = 2000  # displayed characters of a document


@dataclass(frozen=True)
class TextPart:
    """Tokens in a row that are all trained, or all context, as text."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ShownDocument:
    """A document, or a piece of one, in a row. `cut`: longer than `_MOST` characters and truncated here. `answer`: its
    label within a pair."""

    parts: tuple[TextPart, ...]
    tokens: int
    trained: int
    cut: bool
    answer: str = ""


@dataclass(frozen=True)
class DataReport:
    """`lines`: the lines about data in the header of a run. `rows`: the first rows of training."""

    lines: tuple[str, ...]
    rows: tuple[tuple[ShownDocument, ...], ...]
    ok: bool = True

    def to_json(self) -> str:
        return json_format.dumps(asdict(self), indent=2, ensure_ascii=False)

    def show(self, console: "Console") -> None:
        from rich.text import Text

        def say(text: str | Text = "") -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        for line in self.lines:
            say(shown(line))
        for number, row in enumerate(self.rows, start=1):
            tokens, trained = (sum(getattr(column, name) for column in row) for name in ("tokens", "trained"))
            say()
            about = f"{many(len(row), 'document')}, {many(tokens, 'token')}, {trained:,} trained"
            say(Text(f"row {number}: {about}", style="bold"))
            for document in row:
                say(_text(document, is_plain=not console.is_terminal))


def examine(data: PreparedData, rows: int) -> DataReport:
    """The first `rows` rows in training order."""
    train, tokenizer = data.train, data.tokenizer.load()
    places = train.in_order(range(min(rows, len(train.sample))))
    shown_rows = (tuple(_documents(train.rows([place], row_multiple=1), tokenizer)) for place in places)
    return DataReport(tuple(data.counts.lines()), tuple(shown_rows))


def _pieces(batch: MicroBatch) -> Iterator[tuple[Any, Any, str]]:
    """Tokens and labels of each piece of one row, and its label within a pair; without padding."""
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        if start < batch.tokens:
            number = -1 if batch.answers is None else int(batch.answers[0, start:end].max())
            answer = "" if number < 0 else _called(number, batch)
            yield batch.input_ids[0, start:end], batch.labels[0, start:end], answer


def _called(number: int, batch: MicroBatch) -> str:
    if batch.desirable is None:
        return ("chosen", "rejected")[number % 2]
    return "answer to another prompt" if number % 2 else "desirable" if batch.desirable[number // 2] else "undesirable"


def _documents(batch: MicroBatch, tokenizer: "Tokenizer") -> Iterator[ShownDocument]:
    for ids, labels, answer in _pieces(batch):
        # A token is trained if it is the target of the one before; the target of a row's last token is not shown.
        flags = [False, *(labels[:-1] != IGNORE).tolist()]
        parts, length = [], 0
        for trained, group in groupby(zip(ids.tolist(), flags, strict=True), key=lambda pair: pair[1]):
            text = tokenizer.decode([token for token, _ in group], skip_special_tokens=False)
            parts.append(TextPart(text[: max(0, _MOST - length)], trained))
            length += len(text)
        kept = tuple(part for part in parts if part.text)
        yield ShownDocument(kept, len(ids), int((labels != IGNORE).sum()), length > _MOST, answer)


def _text(document: ShownDocument, *, is_plain: bool) -> Any:
    from rich.text import Text

    text = Text(f"{document.answer}: " if document.answer else "", style="bold")
    for part in document.parts:
        said = shown(part.text)
        text.append(f"[[{said}]]" if part.trained and is_plain else said, style="green" if part.trained else "dim")
    return text.append(" ..." if document.cut else "")
