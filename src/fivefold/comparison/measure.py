"""Statistics of repeated runs: medians, their spread, and differences to a base, repeat by repeat.

Pure arithmetic over finished runs. Runs of the same repeat follow each other and share a seed. So slow drifts of a
machine, and the effect of a seed on the loss, are the same on both sides of a difference.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from fivefold.comparison.logs import LoggedStep

LAST = 0.1  # of the tokens, at the end: the training loss is the mean over them
CLOSE = 0.01  # of the tokens: an evaluation this close before the end counts as one at the end
SLACK = 1.001  # of the tokens: steps of different sizes need not end on the same one


@dataclass(frozen=True)
class Spread:
    """Median and range of `count` repeats."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Summarise values; None if nothing was measured."""
        known = [value for value in values if value is not None]
        return cls(median(known), min(known), max(known), len(known)) if known else None

    @property
    def half_range_pct(self) -> float | None:
        """Half the range of the repeats, in % of the median; None for one repeat."""
        return 100 * (self.high - self.low) / 2 / abs(self.median) if self.count > 1 and self.median else None


@dataclass(frozen=True)
class PercentDifference:
    """Difference in % of the base, each repeat to the base's same repeat: the median, `low` to `high`.

    `measured`: true if it is larger than the range of the repeats; None for one repeat. Example: repeats of +3, +4 and
    +5 % make a difference of 4 % over a spread of 2: it is measured. -1, +1 and +2 % make none.
    """

    percent: float
    low: float
    high: float
    count: int
    measured: bool | None

    @classmethod
    def of(cls, own: Mapping[int, float | None], base: Mapping[int, float | None]) -> "PercentDifference | None":
        """Compare values by repeat. Only repeats that both have count; None if there are none."""
        each = [
            100 * (mine / theirs - 1)
            for repeat, mine in own.items()
            if mine is not None and (theirs := base.get(repeat))
        ]
        if not each:
            return None
        whole, low, high = median(each), min(each), max(each)
        return cls(whole, low, high, len(each), abs(whole) > high - low if len(each) > 1 else None)


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: its steps, and the timed ones among them. `repeat` 0: a log of another trainer."""

    configuration: str
    devices: int | None
    repeat: int
    folder: str
    steps: Sequence[LoggedStep]
    timed: Sequence[LoggedStep]

    @property
    def speed(self) -> float | None:
        """Tokens per second and device of the median step."""
        return _median(step.speed for step in self.timed)

    @property
    def mfu_pct(self) -> float | None:
        return _median(step.mfu_pct for step in self.timed)

    @property
    def peak_gib(self) -> float | None:
        return max((step.peak_gib for step in self.steps if step.peak_gib is not None), default=None)

    @property
    def tokens(self) -> float | None:
        return max((step.tokens for step in self.steps if step.tokens is not None), default=None)

    def loss(self, tokens: float) -> float | None:
        """Mean training loss of the last tenth of the first `tokens`."""
        known = [
            step.loss for step in self.steps
            if step.loss is not None and step.tokens and (1 - LAST) * tokens < step.tokens <= SLACK * tokens
        ]  # fmt: skip
        return fmean(known) if known else None

    def eval_loss(self, tokens: float) -> float | None:
        """Loss of the evaluation after `tokens`; None if there is none close enough."""
        known = [
            step.eval_loss for step in self.steps
            if step.eval_loss is not None and step.tokens and (1 - CLOSE) * tokens <= step.tokens <= SLACK * tokens
        ]  # fmt: skip
        return known[-1] if known else None

    def found(self, tokens: Mapping[int, float]) -> dict[str, float | None]:
        """Quantities to compare, with the losses after the `common_tokens` of its repeat."""
        end = tokens.get(self.repeat, 0.0)
        return {"speed": self.speed, "loss": self.loss(end), "eval_loss": self.eval_loss(end)}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def common_tokens(runs: Iterable[MeasuredRun]) -> dict[int, float]:
    """By repeat, the tokens after which losses are compared: as many as every run of it, and every log, has seen.

    Another seed makes other rows, with a little more or less padding: repeats end after about as many tokens.
    """
    seen = [(run.repeat, run.tokens) for run in runs if run.tokens]
    return {repeat: min(tokens for number, tokens in seen if not repeat or number in (0, repeat)) for repeat, _ in seen}


@dataclass(frozen=True)
class ConfigurationRow:
    """A configuration on a number of devices. `decrease_pct`: of its tokens per second and device, against the same
    configuration on its fewest devices, positive if slower. All other differences are to the first configuration on as
    many devices. Those of losses fall back to its fewest devices: any layout has the same loss. `note`: why there is
    nothing, or less than asked."""

    configuration: str
    devices: int | None
    repeats: int
    tokens_per_second_per_device: Spread | None
    decrease_pct: PercentDifference | None
    faster_pct: PercentDifference | None
    loss: Spread | None
    loss_difference_pct: PercentDifference | None
    eval_loss: Spread | None
    eval_loss_difference_pct: PercentDifference | None
    peak_memory_gib: float | None
    mfu_pct: float | None
    note: str = ""


Contender = tuple[str, int | None]  # a configuration, and its number of devices
Tokens = Mapping[int, float]  # of `common_tokens`


def rows(
    runs: Sequence[MeasuredRun], cells: Sequence[Contender], notes: Mapping[Contender, str], *, base: str,
    other_text: Collection[str] = (),
) -> list[ConfigurationRow]:  # fmt: skip
    """Build a row for each of `cells`, in their order. `base`: the configuration that differences refer to;
    `other_text`: those with other tokens than the base, whose losses per token are not compared."""
    tokens = common_tokens(runs)
    by_cell = {cell: [run for run in runs if (run.configuration, run.devices) == cell] for cell in cells}
    found = [_row(cell, by_cell, base, tokens, notes.get(cell, "")) for cell in cells]
    return [
        replace(row, loss_difference_pct=None, eval_loss_difference_pct=None)
        if row.configuration in other_text
        else row
        for row in found
    ]


def _row(
    cell: Contender, by_cell: Mapping[Contender, Sequence[MeasuredRun]], base: str, tokens: Tokens, note: str
) -> ConfigurationRow:
    name, devices = cell
    own, beside = by_cell[cell], by_cell.get((base, devices), ())
    of_base = beside or next((some for (name, _), some in by_cell.items() if name == base and some), ())
    fewest = min((count for cell, count in by_cell if cell == name and count and by_cell[cell, count]), default=None)
    first = by_cell.get((name, fewest), ())
    fewer = _difference(own, first, "speed", tokens) if fewest and devices != fewest else None
    is_base = name == base
    return ConfigurationRow(
        configuration=name, devices=devices, repeats=len(own),
        tokens_per_second_per_device=Spread.of(run.speed for run in own),
        decrease_pct=fewer and PercentDifference(-fewer.percent, -fewer.high, -fewer.low, fewer.count, fewer.measured),
        faster_pct=None if is_base else _difference(own, beside, "speed", tokens),
        loss=Spread.of(run.found(tokens)["loss"] for run in own),
        loss_difference_pct=None if is_base else _difference(own, of_base, "loss", tokens),
        eval_loss=Spread.of(run.found(tokens)["eval_loss"] for run in own),
        eval_loss_difference_pct=None if is_base else _difference(own, of_base, "eval_loss", tokens),
        peak_memory_gib=max((run.peak_gib for run in own if run.peak_gib is not None), default=None),
        mfu_pct=_median(run.mfu_pct for run in own), note=note,
    )  # fmt: skip


def _difference(
    own: Sequence[MeasuredRun], base: Sequence[MeasuredRun], what: str, tokens: Tokens
) -> PercentDifference | None:
    """Difference repeat by repeat; a log, which has no repeats, against the base's median."""
    mine, theirs = ({run.repeat: run.found(tokens)[what] for run in some} for some in (own, base))
    if 0 in mine:
        theirs = {0: _median(theirs.values())}
    return PercentDifference.of(mine, theirs)
