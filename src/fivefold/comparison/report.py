"""Report of a comparison: the table that the field publishes, for people and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fivefold.comparison.configurations import Contest
from fivefold.comparison.logs import Log
from fivefold.comparison.measure import LAST, SLACK, Cell, Difference, Measured, Row, Spread, common_tokens, rows
from fivefold.core.terminal import folded, shown
from fivefold.core.text import listed
from fivefold.core.units import human, many
from fivefold.core.version import versions
from fivefold.report.table import Report

if TYPE_CHECKING:
    from rich.console import Console

NONE, BASE = "-", "base"
LEAST_NAME = 12  # minimum width of names, in columns of the terminal
PARTS_OF_NAMES = "+,=._-/ "  # a long name is wrapped before one of these


@dataclass(frozen=True, kw_only=True)
class CompareReport(Report[Row]):
    """Report of a comparison. `.rows`: one for each configuration and number of devices. `runs`: measurements of each
    run. `notes`: what a reader has to know about the numbers. `missing`: number of unfinished runs."""

    base: str = ""  # the configuration that differences refer to
    runs: tuple[Measured, ...] = ()
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

    def losses(self, run: Measured) -> dict[str, float | None]:
        """`loss` and `eval_loss` of a run, after as many tokens as the others of its repeat."""
        found = run.found(self.tokens)
        return {"loss": found["loss"], "eval_loss": found["eval_loss"]}

    def show(self, console: "Console") -> None:
        """Print the table, and the notes below it."""
        from rich.table import Table
        from rich.text import Text

        if not self.runs and self.missing:
            console.print(f"nothing is measured yet; {self.closing}", highlight=False, markup=False)
            return
        columns = self.columns_shown
        table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
        texts = [[cell(row) for _, cell in columns] for row in self.rows]
        widths = (
            max(map(len, [*header.split("\n"), *cells])) for (header, _), *cells in zip(columns, *texts, strict=True)
        )
        room = max(LEAST_NAME, console.width - sum(width + 1 for width in widths) - 1)
        table.add_column("", overflow="fold", min_width=LEAST_NAME)
        for header, _ in columns:
            table.add_column(header, justify="right", no_wrap=True, vertical="bottom")
        for number, (row, cells) in enumerate(zip(self.rows, texts, strict=True)):
            if not number or row.devices != self.rows[number - 1].devices:
                table.add_row(Text(on(row.devices), "bold"))
            name = folded(f"  {shown(row.configuration)}", room, before=PARTS_OF_NAMES, indent="    ")
            table.add_row(Text(name), *map(Text, cells))
        console.print(table)
        for note in self.notes:
            console.print(f"  {shown(note)}", highlight=False, markup=False)
        if self.closing:
            console.print(shown(self.closing), highlight=False, markup=False)

    @property
    def columns_shown(self) -> list[tuple[str, Any]]:
        """(header, text of a row) of each column that is not empty."""
        scaling, faster, losses = (self.has(name) for name in ("decrease_pct", "faster_pct", "loss_difference_pct"))
        every = [
            ("tokens/s\nper device", lambda row: speed(row.tokens_per_second_per_device, row.note), True),
            (f"decrease\nfrom {self.fewest}, %", lambda row: change(row.decrease_pct, sign=""), scaling),
            ("faster\n%", lambda row: BASE if self.is_base(row) else change(row.faster_pct), faster),
            ("loss", lambda row: loss(row.loss), self.has("loss")),
            ("eval\nloss", lambda row: loss(row.eval_loss), self.has("eval_loss")),
            ("loss\n%", lambda row: BASE if self.is_base(row) else change(row.loss_difference_pct), losses),
            ("peak\nGiB", lambda row: number(row.peak_memory_gib, ".2f"), self.has("peak_memory_gib")),
            ("MFU\n%", lambda row: number(row.mfu_pct, ".1f"), self.has("mfu_pct")),
        ]
        return [(header, text) for header, text, is_there in every if is_there]

    @property
    def fewest(self) -> str:
        """Number of devices at which scaling begins: `1`, or `fewest` if it is not the same for all."""
        firsts = {min(row.devices or 0 for row in self.rows if row.configuration == name and row.repeats)
                  for name in {row.configuration for row in self.rows if row.decrease_pct}}  # fmt: skip
        return str(*firsts) if len(firsts) == 1 else "fewest"

    def is_base(self, row: Row) -> bool:
        """True if the differences of the other rows on as many devices refer to this one."""
        return row.configuration == self.base and row.repeats > 0

    def has(self, name: str) -> bool:
        """True if any row has a value under `name`."""
        return any(getattr(row, name) is not None for row in self.rows)


def on(devices: int | None) -> str:
    """`on 2 devices`."""
    return "on devices not said" if devices is None else f"on {many(devices, 'device')}"


def speed(spread: Spread | None, note: str = "") -> str:
    """`3,041 ±1.2%`."""
    if spread is None:
        return "failed" if note.startswith("failed") else "not run" if note else NONE
    beside = "" if spread.half_range_pct is None else f" ±{spread.half_range_pct:.2g}%"
    return f"{spread.median:,.0f}{beside}"


def change(difference: Difference | None, *, sign: str = "+") -> str:
    """`+3.1`; `(+0.2)` if it is smaller than its spread; `+3.1?` for one repeat."""
    if difference is None:
        return NONE
    text = number(difference.percent, f"{sign}.{2 if abs(difference.percent) < 1 else 1}f")
    return f"{text}?" if difference.measured is None else text if difference.measured else f"({text})"


def loss(spread: Spread | None) -> str:
    """`4.1234`, the median."""
    return number(spread.median if spread else None, ".4f")


def number(value: float | None, form: str) -> str:
    """Format a number; `-` if it was not measured."""
    text = NONE if value is None else f"{value:{form}}"
    return text.lstrip("+-") if not text.strip("+-0.") and text != NONE else text  # no -0.00


def report_of(
    runs: Sequence[Measured], *, warmup: int, contest: Contest | None = None, others: Sequence[Log] = (),
    failed: Mapping[tuple[str, int], str] | None = None, missing: int = 0,
    about: Mapping[str, Any] | None = None, unlike: Mapping[str, str] | None = None,
) -> CompareReport:  # fmt: skip
    """Report the measurements. `about`: further JSON values; `device` also appears in the notes."""
    failed, about = failed or {}, about or {}
    notes: dict[Cell, str] = {
        **{cell: f"not run: {why}" for cell, why in (contest.refused.items() if contest else ())},
        **{cell: f"failed: {why}" for cell, why in failed.items()},
    }
    cells: list[Cell] = [*(contest.cells if contest else ()), *((each.name, each.devices) for each in others)]
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
    found: Sequence[Row], base: str, runs: Sequence[Measured], tokens: Mapping[int, float], warmup: int,
    others: Sequence[Log], unlike: Mapping[str, str], device: str,
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
        each for row in found for each in (row.decrease_pct, row.faster_pct, row.loss_difference_pct) if each
    ]
    if any(row.faster_pct or row.loss_difference_pct for row in found):
        lines.append(f"base: {base} on as many devices")
    if any(each.measured is False for each in differences):
        lines.append("(x): not larger than the range of its repeats: no difference measured")
    if any(each.measured is None for each in differences):
        lines.append("x?: one repeat; the range of repeats is not known")
    lines += [f"{name}: losses not compared, {key} is not that of {base}" for name, key in unlike.items()]
    lines += [f"{row.configuration} {on(row.devices)} {row.note}" for row in found if row.note]
    lines += [f"devices: {device}"] if device else []
    return lines + [f"{log.name}: {log.says}" for log in others]
