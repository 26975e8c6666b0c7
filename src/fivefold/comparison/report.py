"""Report of a comparison: the table that the field publishes, for people and as JSON."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from fivefold.comparison.configurations import Contest
from fivefold.comparison.logs import LoggedStep, TrainerLog
from fivefold.comparison.measure import (
    LAST,
    SLACK,
    ConfigurationRow,
    Contender,
    MeasuredRun,
    PercentDifference,
    Spread,
    common_tokens,
    rows,
)
from fivefold.core.system import versions
from fivefold.core.text import listed
from fivefold.core.units import human, many
from fivefold.report import curves
from fivefold.report.findings import Cell, Column, Findings, Notes, On, Plot, Report, Row, Section, Table

NONE, BASE = "-", "base"
PARTS_OF_NAMES = "+,=._-/ "  # a long name is wrapped before one of these
RANGES = (
    "Medians over the repeats; below them the lowest and the highest. A percentage is formed within each repeat, whose "
    "runs followed each other with the same seed."
)


@dataclass(frozen=True, kw_only=True)
class CompareReport(Report[ConfigurationRow]):
    """Report of a comparison. `.rows`: one for each configuration and number of devices. `runs`: measurements of each
    run. `notes`: what a reader has to know about the numbers. `missing`: number of unfinished runs."""

    base: str = ""  # the configuration that differences refer to
    runs: tuple[MeasuredRun, ...] = ()
    tokens: Mapping[int, float] = field(default_factory=dict)  # by repeat: losses are compared after these
    notes: tuple[str, ...] = ()
    missing: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Format as `{"ok", "complete", "base", "tokens", "rows": [...], "runs": [...], "notes", ...}`; a difference is
        `{"percent", "low", "high", "count", "measured"}`, a spread `{"median", "low", "high", "count"}`."""
        runs = [
            {
                "configuration": run.configuration, "devices": run.devices, "repeat": run.repeat, "folder": run.folder,
                "steps": len(run.steps), "timed_steps": len(run.timed), "tokens": run.tokens,
                "tokens_per_second_per_device": run.speed, **self.losses(run), "peak_memory_gib": run.peak_gib,
                "mfu_pct": run.mfu_pct,
            }
            for run in self.runs
        ]  # fmt: skip
        values = {
            "title": self.title, "ok": self.ok, "complete": not self.missing, "base": self.base,
            "tokens": min(self.tokens.values(), default=None),
            "rows": [asdict(row) for row in self.rows], "runs": runs, "notes": self.notes, **self.settings,
            "versions": versions(),
        }  # fmt: skip
        return json.dumps(values, indent=1, ensure_ascii=False)

    def losses(self, run: MeasuredRun) -> dict[str, float | None]:
        """`loss` and `eval_loss` of a run, after as many tokens as the others of its repeat."""
        found = run.found(self.tokens)
        return {"loss": found["loss"], "eval_loss": found["eval_loss"]}

    def findings(self) -> Findings:
        """The table and its notes; on the page also ranges, the curves over each other, and every run."""
        if not self.runs and self.missing:
            waiting = Section([Notes(["; ".join(filter(None, ("nothing is measured yet", self.closing)))])])
            return Findings(command="fivefold compare", headline=self.headline, sections=[waiting])
        drawn = panels(self.runs)
        longest = max((len(run.steps) for run in self.runs), default=0)
        missing = self.closing or f"{many(self.missing, 'run')} not done"
        sections = [
            Section([Notes([missing], "bad")] * bool(self.missing), on=On.PAGE),
            Section([self.table, Notes([RANGES], "soft"), Notes(self.notes, is_list=True)], on=On.PAGE),
            Section(
                [self.table, Notes(self.notes, indent="  "), Notes(list(filter(None, [self.closing])))],
                self.headline,
                on=On.TERMINAL,
            ),
        ]
        if drawn:
            picture = curves.draw(drawn, [], averaged=longest > curves.POINTS)
            sections.append(Section([Plot(picture, "The mean over the repeats.")], "Curves", On.PAGE))
        sections.append(Section([self._every_run()], "Every run", On.PAGE))
        return Findings(command="fivefold compare", headline=self.headline, sections=sections)

    @property
    def headline(self) -> str:
        """The result, for two configurations; else the names or number of those compared."""
        names = list(dict.fromkeys(row.configuration for row in self.rows))
        last = next((row for row in reversed(self.rows) if row.configuration != self.base and row.faster_pct), None)
        if len(names) != 2 or last is None or last.faster_pct is None:
            return f"{len(names)} configurations" if len(names) > 1 else "".join(names)
        where, first = on(last.devices).capitalize(), next(row for row in self.rows if self._is_beside(row, last))
        if last.faster_pct.measured is None:
            return f"{where}, one run of each, so no difference is known: {_both(first, last)}"
        speeds = _relation(last.faster_pct, "faster", "slower", f" than {self.base}")
        losses = last.eval_loss_difference_pct or last.loss_difference_pct
        name = "eval loss" if last.eval_loss_difference_pct else "training loss"
        if losses is None:
            said = "losses are not compared"
        elif losses.measured:
            said = f"its {name} is {_relation(losses, 'higher', 'lower')}"
        else:
            said = f"no difference in {name} was measured"
        if not last.faster_pct.measured:
            return f"{where}, no difference in speed was measured between {self.base} and {last.configuration}; {said}"
        return f"{where}, {last.configuration} is {speeds}; {said}"

    def _is_beside(self, row: ConfigurationRow, other: ConfigurationRow) -> bool:
        return row.configuration == self.base and row.devices == other.devices

    @property
    def table(self) -> Table:
        """A row for each configuration, under its number of devices."""
        columns = self._columns()
        rows: list[Row | str] = []
        for number, row in enumerate(self.rows):
            if not number or row.devices != self.rows[number - 1].devices:
                rows.append(on(row.devices))
            tone = "wrong" if row.note.startswith("failed") else ""
            rows.append(Row([self._cell(row, name) for name in columns], tone))
        return Table(list(columns.values()), rows, is_narrow=True, look="")

    def _columns(self) -> dict[str, Column]:
        """Field of a row -> its column, if any row has a value."""
        start = "fewest devices" if self.fewest == "fewest" else many(int(self.fewest), "device")
        every = {
            "configuration": Column("", on_page="configuration", folds=PARTS_OF_NAMES),
            "tokens_per_second_per_device": Column("tokens/s\nper device", "n"),
            "decrease_pct": Column(f"decrease\nfrom {self.fewest}, %", "n", f"% decrease from\n{start}"),
            "faster_pct": Column("faster\n%", "n", f"% faster than\n{self.base}"),
            "loss": Column("loss", "n", "training\nloss"),
            "eval_loss": Column("eval\nloss", "n"),
            "loss_difference_pct": Column("loss\n%", "n", f"loss, % from\n{self.base}"),
            "eval_loss_difference_pct": Column("", "n", f"eval loss, % from\n{self.base}", on=On.PAGE),
            "peak_memory_gib": Column("peak\nGiB", "n"),
            "mfu_pct": Column("MFU\n%", "n"),
            "repeats": Column("", "n", "repeats", on=On.PAGE),
        }
        return {name: every[name] for name in every if self.has(name) or name == "tokens_per_second_per_device"}

    def _cell(self, row: ConfigurationRow, name: str) -> Cell:
        value = getattr(row, name)
        match name:
            case "tokens_per_second_per_device":
                return Cell(speed(value, row.note), detail=between(value, ",.0f"))
            case "decrease_pct":
                return Cell(change(value, sign=""), detail=between(value, ".1f"))
            case "faster_pct" | "loss_difference_pct" | "eval_loss_difference_pct":
                return Cell(BASE) if self.is_base(row) else Cell(change(value), detail=between(value, "+.2f"))
            case "loss" | "eval_loss":
                return Cell(loss(value), detail=between(value, ".4f"))
            case "peak_memory_gib" | "mfu_pct":
                return Cell(number(value, ".2f" if name == "peak_memory_gib" else ".1f"))
        return Cell(str(value))

    def _every_run(self) -> Table:
        heads = ("devices", "repeat", "steps", "timed", "tokens", "tokens/s per device", "training loss", "eval loss",
                 "peak GiB")  # fmt: skip
        rows = []
        for run in self.runs:
            losses = self.losses(run)
            texts = (
                run.configuration, NONE if run.devices is None else str(run.devices), str(run.repeat or NONE),
                str(len(run.steps)), str(len(run.timed)), number(run.tokens, ",.0f"), number(run.speed, ",.0f"),
                number(losses["loss"], ".4f"), number(losses["eval_loss"], ".4f"), number(run.peak_gib, ".2f"),
                str(run.folder),
            )  # fmt: skip
            rows.append(Row([Cell(text) for text in texts]))
        columns = [Column("configuration"), *(Column(head, "n") for head in heads), Column("folder", "name")]
        return Table(columns, rows, look="")

    @property
    def fewest(self) -> str:
        """Number of devices at which scaling begins: `1`, or `fewest` if it is not the same for all."""
        firsts = {min(row.devices or 0 for row in self.rows if row.configuration == name and row.repeats)
                  for name in {row.configuration for row in self.rows if row.decrease_pct}}  # fmt: skip
        return str(*firsts) if len(firsts) == 1 else "fewest"

    def is_base(self, row: ConfigurationRow) -> bool:
        """True if the differences of the other rows on as many devices refer to this one."""
        return row.configuration == self.base and row.repeats > 0

    def has(self, name: str) -> bool:
        return any(getattr(row, name) is not None for row in self.rows)


def _relation(difference: PercentDifference, more: str, less: str, than: str = "") -> str:
    """Format as `3.1 % faster than a`."""
    return f"{abs(difference.percent):.1f} % {more if difference.percent > 0 else less}{than}"


def _both(first: ConfigurationRow, last: ConfigurationRow) -> str:
    """Speeds and losses of two rows, side by side."""
    name = "eval loss" if first.eval_loss and last.eval_loss else "training loss"
    losses = [row.eval_loss if name == "eval loss" else row.loss for row in (first, last)]
    texts = [
        f"{row.configuration} {speed(row.tokens_per_second_per_device)} tokens/s a device"
        + (f" at {name} {loss(spread)}" if spread else "")
        for row, spread in zip((first, last), losses, strict=True)
    ]
    return ", ".join(texts)


def on(devices: int | None) -> str:
    """`on 2 devices`."""
    return "on devices not said" if devices is None else f"on {many(devices, 'device')}"


def speed(spread: Spread | None, note: str = "") -> str:
    """`3,041 ±1.2%`."""
    if spread is None:
        return "failed" if note.startswith("failed") else "not run" if note else NONE
    beside = "" if spread.half_range_pct is None else f" ±{spread.half_range_pct:.2g}%"
    return f"{spread.median:,.0f}{beside}"


def change(difference: PercentDifference | None, *, sign: str = "+") -> str:
    """`+3.1`; `(+0.2)` if it is smaller than its spread; `+3.1?` for one repeat."""
    if difference is None:
        return NONE
    text = number(difference.percent, f"{sign}.{2 if abs(difference.percent) < 1 else 1}f")
    return f"{text}?" if difference.measured is None else text if difference.measured else f"({text})"


def between(value: Spread | PercentDifference | None, form: str) -> str:
    """`1.2 to 1.5`: from repeat to repeat; "" for one repeat."""
    return f"{number(value.low, form)} to {number(value.high, form)}" if value and value.count > 1 else ""


def loss(spread: Spread | None) -> str:
    """`4.1234`, the median."""
    return number(spread.median if spread else None, ".4f")


def number(value: float | None, form: str) -> str:
    """Format a number; `-` if it was not measured."""
    text = NONE if value is None else f"{value:{form}}"
    return text.lstrip("+-") if not text.strip("+-0.") and text != NONE else text  # no -0.00


def report_of(
    runs: Sequence[MeasuredRun], *, warmup: int, contest: Contest | None = None, others: Sequence[TrainerLog] = (),
    failed: Mapping[tuple[str, int], str] | None = None, missing: int = 0,
    about: Mapping[str, Any] | None = None, unlike: Mapping[str, str] | None = None,
) -> CompareReport:  # fmt: skip
    """Report the measurements. `about`: further JSON values; `device` also appears in the notes."""
    failed, about = failed or {}, about or {}
    notes: dict[Contender, str] = {
        **{cell: f"not run: {why}" for cell, why in (contest.refused.items() if contest else ())},
        **{cell: f"failed: {why}" for cell, why in failed.items()},
    }
    cells: list[Contender] = [*(contest.cells if contest else ()), *((other.name, other.devices) for other in others)]
    cells.sort(key=lambda cell: cell[1] or 2**31)  # unknown: last
    base = contest.configurations[0].name if contest else others[0].name
    found = tuple(rows(runs, cells, notes, base=base, other_text=unlike or {}))
    tokens = common_tokens(runs)
    stopped = f"{many(missing, 'run')} of {len(contest.runs) if contest else 0} not done: the same command goes on"
    return CompareReport(
        title="fivefold compare", rows=found, base=base, ok=not failed and not missing, runs=tuple(runs), tokens=tokens,
        notes=tuple(_notes(found, base, runs, tokens, warmup, others, unlike or {}, str(about.get("device", "")))),
        missing=missing,
        closing=stopped if missing and not failed else "", settings={"warmup_steps": warmup, **about},
    )  # fmt: skip


def _notes(
    found: Sequence[ConfigurationRow], base: str, runs: Sequence[MeasuredRun], tokens: Mapping[int, float], warmup: int,
    others: Sequence[TrainerLog], unlike: Mapping[str, str], device: str,
) -> list[str]:  # fmt: skip
    """Explain what the numbers are, and how not to read them."""
    lines = [f"speed: median step after the first {warmup} of a start; ±: half the range of repeats"]
    if tokens:
        evaluated = "; eval loss: of held-out rows then" if any(row.eval_loss for row in found) else ""
        lines.append(f"loss: mean of the last {100 * LAST:.0f} % of {human(min(tokens.values()))} tokens{evaluated}")
        longer = [run.configuration for run in runs if run.tokens and run.tokens > SLACK * tokens[run.repeat]]
        if longer:
            lines.append(f"{listed(dict.fromkeys(longer), 3)} saw more tokens: losses are those after as many for all")
    differences = [
        percent for row in found for percent in (row.decrease_pct, row.faster_pct, row.loss_difference_pct) if percent
    ]
    if any(row.faster_pct or row.loss_difference_pct for row in found):
        lines.append(f"base: {base} on as many devices")
    if any(difference.measured is False for difference in differences):
        lines.append("(x): not larger than the range of its repeats: no difference measured")
    if any(difference.measured is None for difference in differences):
        lines.append("x?: one repeat; the range of repeats is not known")
    lines += [f"{name}: losses not compared, {key} is not that of {base}" for name, key in unlike.items()]
    lines += [f"{row.configuration} {on(row.devices)} {row.note}" for row in found if row.note]
    lines += [f"devices: {device}"] if device else []
    return lines + [f"{log.name}: {log.says}" for log in others]


# ---- curves ----------------------------------------------------------------------------------------------------------

Value = Callable[[LoggedStep], float | None]
_DRAWN: Mapping[str, Value] = {
    "training loss": lambda step: step.loss,
    "eval loss": lambda step: step.eval_loss,
    "tokens per second per device": lambda step: step.speed,
}


def panels(runs: Sequence[MeasuredRun]) -> dict[str, curves.Curves]:
    """Curves of all configurations in one plot, for each number of devices; means over repeats."""
    found: dict[str, curves.Curves] = {}
    for devices in dict.fromkeys(run.devices for run in runs):
        for title, value in _DRAWN.items():
            of_all = {}
            for name in dict.fromkeys(run.configuration for run in runs if run.devices == devices):
                repeats = [run.steps for run in runs if (run.configuration, run.devices) == (name, devices)]
                if curve := [*_curve(repeats, value)]:
                    of_all[name] = curves.thinned(curve)
            if of_all:
                found[f"{title}, {on(devices)}"] = of_all
    return found


def _curve(repeats: Sequence[Sequence[LoggedStep]], value: Value) -> Iterator[curves.Point]:
    """Points at the steps that every repeat has."""
    by_step = [{step.step: step for step in steps if value(step) is not None} for steps in repeats]
    for at in sorted(set(by_step[0]).intersection(*by_step[1:])):
        tokens = [steps[at].tokens for steps in by_step]
        known = [count for count in tokens if count is not None]
        values = [each for steps in by_step if (each := value(steps[at])) is not None]
        yield curves.Point(at, fmean(values), fmean(known) if len(known) == len(tokens) else None)
