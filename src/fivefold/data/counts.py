"""Counts of documents, tokens and rows, for the screen."""

from dataclasses import astuple, dataclass

from fivefold.core.units import many

_SOURCES_SHOWN = 12
_REMARKS = {
    "untrained": "example|without a trained token left out",
    "shortened": "example|longer than a row lost the end",
    "too_long": "pair|longer than a row left out",
}


@dataclass(frozen=True)
class RowCounts:
    """Counts of one side, training or validation. `tokens` and `targets` are the model's inputs from all its rows; for
    examples, only trained targets."""

    spans: int  # documents, or their contiguous parts after the validation split
    split: int  # spans longer than a row, cut over several
    without_target: int  # pieces of a single token, left out: they predict nothing
    rows: int
    tokens: int
    targets: int
    padding: int  # tokens of padding up to seq_length
    examples: int = 0  # spans that are examples
    shortened: int = 0  # examples longer than a row, which lost their end
    untrained: int = 0  # examples without a trained token (in the row), left out
    pairs: int = 0  # pairs of answers in the rows
    rated: bool = False  # each is a rated answer, with one to another prompt
    too_long: int = 0  # pairs longer than a row, left out

    @property
    def fill_pct(self) -> float:
        return 100 * self.tokens / max(1, self.tokens + self.padding)

    def __add__(self, other: "RowCounts") -> "RowCounts":
        return RowCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class SourceCounts:
    """One source of `data.train`. `tokens` are those in training rows; `share`, 0 to 1, is its part of all read."""

    path: str
    documents: int
    tokens: int
    weight: float
    share: float

    def line(self) -> str:
        if not self.tokens:
            return f"{self.path}: {many(self.documents, 'document')}, nothing to train on"
        held = f"{self.path}: {many(self.documents, 'document')}, {many(self.tokens, 'token')} to train on"
        is_alone = self.share == 1
        return held if is_alone else f"{held}, weight {self.weight:g} = {100 * self.share:.1f}% of the tokens read"


@dataclass(frozen=True)
class DataCounts:
    """Everything that was read and left out, and the rows of both sides.

    `fraction` is the requested held-out part, 0 for none or a list. `bos` describes the tokens in front of the
    documents. `streamed`: the units of a run that tokenises while training; then all other counts are of its first
    window. `columns`, `ids`, `answers_alone`, `odd`: see `StoreMeta`. `tokenizer`: its unexpected properties. `held`:
    names of the sources of a validation list.
    """

    files: int
    files_left_out: int  # in a source's folder, of a kind that no format reads
    documents: int
    tokens: int
    seq_length: int
    train: RowCounts
    sources: tuple[SourceCounts, ...]
    validation: RowCounts | None
    validation_asked: bool
    repeated: int  # validation blocks (16,384 tokens) that are in the training text too
    fraction: float = 0.0
    bos: str = ""
    columns: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    answers_alone: tuple[str, ...] = ()
    tokenizer: tuple[str, ...] = ()
    streamed: str = ""
    held: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()

    @property
    def held_out(self) -> float:
        """The held-out part of the tokens, 0 to 1."""
        sides = (self.train, self.validation)
        train, held = (side.tokens + side.without_target if side else 0 for side in sides)  # with those left out
        return held / max(1, train + held)

    def lines(self) -> list[str]:
        """Four or five short lines, and one more for each source beyond the first."""
        bos = f", {self.bos}" if self.bos else ""
        trained = [f"trained     {_trained(self.train)}"] if self.train.examples else []
        streamed = [f"streamed    {self.streamed}"] if self.streamed else []
        lines = [
            *streamed,
            f"{many(self.documents, 'document')} in {many(self.files, 'file')}, {many(self.tokens, 'token')}{bos}",
            f"train       {_rows(self.train, self.seq_length)}",
            *trained,
            f"validation  {self._validation()}",
            *self._by_source(),
            *(f"tokenizer   {line}" for line in self.tokenizer),
            *(f"columns     {line}" for line in dict.fromkeys(self.columns)),
            *(f"token ids   {line}" for line in dict.fromkeys(self.ids)),
            *(f"characters  {line}" for line in dict.fromkeys(self.odd)),
        ]
        if remarks := self._remarks():
            lines.append("note        " + "; ".join(remarks))
        return lines

    def _validation(self) -> str:
        rows = _rows(self.validation, self.seq_length) if self.validation else "none"
        rows += f", of {', '.join(self.held)}" if self.held else ""
        if not self.fraction:
            return rows
        return f"{rows}; {_percent(self.held_out)} of the tokens, {_percent(self.fraction)} asked"

    def _by_source(self) -> list[str]:
        more = len(self.sources) - _SOURCES_SHOWN
        lines = [f"source      {source.line()}" for source in self.sources[:_SOURCES_SHOWN]]
        return lines + ([f"source      ... and {more} more"] if more > 0 else [])

    def _remarks(self) -> list[str]:
        alone = self.train.without_target + (self.validation.without_target if self.validation else 0)
        remarks = []
        if self.validation_asked and not (self.validation and self.validation.rows):
            remarks.append(
                "the text is too short to hold some of it out, or all alike: ask for more of it, or name another text"
            )
        if self.files_left_out:
            remarks.append(f"{many(self.files_left_out, 'file')} of an unknown kind left out")
        if alone:
            remarks.append(f"{many(alone, 'piece')} of a single token left out (no target)")
        for name, said in _REMARKS.items():
            noun, what = said.split("|")
            if number := sum(getattr(side, name) for side in (self.train, self.validation) if side):
                remarks.append(f"{many(number, noun)} {what}")
        if self.repeated:
            remarks.append(f"in the training text too: {many(self.repeated, 'block')} of validation")
        return remarks


def _rows(counts: RowCounts, seq_length: int) -> str:
    split = f", {many(counts.split, 'piece')} of text cut over rows" if counts.split else ""
    return f"{many(counts.rows, 'row')} of {seq_length:,}, {counts.fill_pct:.1f}% full{split}"


def _trained(counts: RowCounts) -> str:
    part = 100 * counts.targets / max(1, counts.tokens)
    where = many(counts.pairs, "pair") + " of answers" if counts.pairs else many(counts.examples, "example")
    if counts.rated:
        where = f"{many(counts.pairs, 'rated answer')}, each with one to another prompt"
    return f"{many(counts.targets, 'token')} of {counts.tokens:,} ({part:.1f}%), in {where}"


def _percent(part: float) -> str:
    return f"{100 * part:.3g}%"
