"""Documents that another engine tokenised: their ids are checked, completed with BOS and EOS, and stored as they are.

A whole document gets the run's BOS and EOS if it lacks them, as a text does. A row that was cut from a stream of
documents, a document of a packed row, and one that says which of its tokens are trained, stay as they are.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import UserError
from fivefold.core.units import many
from fivefold.data.examples import Document, TokenIds
from fivefold.data.tokenizer import TokenizerInfo, missing_bos

_NUMBERS = ("documents", "whole", "packed", "cut", "labelled", "without_bos", "without_eos")
_PEEKED = 16  # rows whose lengths tell a stream from documents


@dataclass
class TokenIdsReport:
    """Completes documents of ids by one tokenizer, and counts what it did for the report of a run's data."""

    tokenizer: TokenizerInfo
    documents: int = 0
    whole: int = 0  # documents that get BOS and EOS if they lack them
    packed: int = 0  # documents of packed rows
    cut: int = 0  # rows of a stream
    labelled: int = 0  # rows that say which tokens are trained
    without_bos: int = 0
    without_eos: int = 0
    others: dict[str, None] = field(default_factory=dict)  # names of tokenizers that are not this one
    last: Counter[int] = field(default_factory=Counter)  # the last token of documents that do not end in EOS

    def complete(self, document: TokenIds, dtype: np.dtype[np.unsignedinteger]) -> list[NDArray[np.unsignedinteger]]:
        """The tokens of a document, with BOS and EOS if it lacks them, part after part.

        Raises `UserError` for an id that the tokenizer does not have, naming the document and the place in it.
        """
        self._check(document)
        self.documents += 1
        if document.tokenizer and not self._is_named(document.tokenizer):
            self.others[document.tokenizer] = None
        bos, eos = self.tokenizer.bos_token_ids, self.tokenizer.eos_token_id
        if not document.is_whole:
            self.packed += document.is_packed
            self.cut += document.trained is None and not document.is_packed
            self.labelled += document.trained is not None
            return [document.ids.astype(dtype)]
        self.whole += 1
        front = missing_bos(document.ids[: len(bos)].tolist(), bos)
        has_end = document.ids[-1:].tolist() == [eos]
        if not has_end:
            self.without_eos += 1
            self.last.update(document.ids[-1:].tolist())
        self.without_bos += bool(front)
        parts = (np.array(front, dtype), document.ids.astype(dtype), np.array([eos] * (not has_end), dtype))
        return [part for part in parts if len(part)]

    def _is_named(self, name: str) -> bool:
        """True if a name, of the hub or of a folder, is that of the run's tokenizer."""
        folder, path = self.tokenizer.folder, Path(name.removesuffix("/tokenizer.json"))
        return f"models--{name.replace('/', '--')}" in folder.parts or path.absolute() == folder.absolute()

    def _check(self, document: TokenIds) -> None:
        size, ids = self.tokenizer.vocab_size, document.ids
        wrong = (ids < 0) | (ids >= size)
        if wrong.any():
            at = int(wrong.argmax())
            raise UserError(
                f"{document.where}: token {at + 1:,} is {int(ids[at])}, and the tokenizer in {self.tokenizer.folder} "
                f"has the ids 0 to {size - 1:,}",
                fix="set tokenizer.name_or_path to the tokenizer that made these tokens",
            )

    def counts(self) -> dict[str, Any]:
        """The counts as JSON-like values."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {**numbers, "others": list(self.others), "last": [list(pair) for pair in self.last.items()]}

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add the `counts` of another part of the same source."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + counts[name])
        self.others |= dict.fromkeys(counts["others"])
        self.last.update(dict(counts["last"]))

    def line(self, name: str) -> str:
        """The report; empty if there were no documents of ids."""
        if not self.documents:
            return ""
        whole, eos = self.whole, self.tokenizer.eos_token_id
        said = []
        if self.packed:
            said.append(f"{many(self.packed, 'document')} of packed rows, each by itself: no EOS added")
        if self.cut:
            said.append(f"{many(self.cut, 'row')} of one length, as cut from a stream: no EOS added")
        if self.labelled:
            said.append(f"{many(self.labelled, 'row')} with labels: no EOS added")
        if whole and not self.without_eos:
            said.append(f"{many(whole, 'document')}, all of which end in EOS ({eos})")
        elif whole:
            alike = self.without_eos > 1 and len(self.last) == 1
            ends = f", which end in {next(iter(self.last))}" if alike else ""
            said.append(f"{many(whole, 'document')}, EOS ({eos}) added to {self.without_eos:,}{ends}")
        if self.without_bos:
            said.append(f"BOS added to {self.without_bos:,}")
        said += [
            f"made with the tokenizer {other}, and the run's is in {self.tokenizer.folder}" for other in self.others
        ]
        return f"{name}: {'; '.join(said)}"


def rows_are(documents: Iterable[Document]) -> Literal["documents", "stream", "packed"]:
    """Kind of rows, by the first documents of a file: packed if one of these is; parts of a stream if they are of one
    length, of which only the last may be shorter."""
    first = list(islice(documents, _PEEKED))
    if any(isinstance(document, TokenIds) and document.is_packed for document in first):
        return "packed"
    lengths = [len(document) for document in first]
    if lengths and lengths[-1] < lengths[0]:
        lengths.pop()
    return "stream" if len(lengths) > 1 and len(set(lengths)) == 1 else "documents"
