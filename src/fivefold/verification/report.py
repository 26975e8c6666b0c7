"""The report of a proof, for people and for programs: a table per layout, JSON, and an offline page (`page.py`)."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from fivefold.core.terminal import shown
from fivefold.report.table import Report
from fivefold.verification.results import CONTROL, LayoutResult, Row, number

if TYPE_CHECKING:
    from rich.console import Console

_TOP = re.compile(r" top (\d+|all)$")
_COLOURS = {"PROVED": "bold green", "WRONG": "bold red", "NOT RUN": "bold red"}
HUGE = 1e308  # an infinite error: JSON has no infinities


@dataclass(frozen=True)
class LayoutRow(Row):
    """A row of a proof with its layout."""

    layout: str = ""


@dataclass(frozen=True, kw_only=True)
class VerifyReport(Report[LayoutRow]):
    """The report of a proof. `.rows`: those of all layouts in sequence; `.found`: the results by layout."""

    found: tuple[LayoutResult, ...] = ()
    subject: str = ""
    losses: Mapping[str, list[float]] = field(default_factory=dict)  # precision -> the reference's, step by step

    def to_json(self) -> str:
        """`{"ok", "layouts": [{"layout", "ok", "rows": [{"what", "error", "tolerance", "ok", "where"}]}]}`.

        Each layout also has `not_run`, why it did not run, else null; `not_told`, comparisons for which its precision
        is too coarse; `not_shown`, modules whose values on a rank could not be located."""
        layouts = [
            {
                "layout": each.layout,
                "ok": each.ok,
                "not_run": each.refused or None,
                "not_told": each.not_told,
                "not_shown": each.not_shown,
                "seconds": round(each.seconds, 3),
                "rows": [asdict(row) | {"error": min(row.error, HUGE)} for row in each.rows],
            }
            for each in self.found
        ]
        return json.dumps({"ok": self.ok, "subject": self.subject, "layouts": layouts}, indent=1, ensure_ascii=False)

    def show(self, console: "Console") -> None:
        """Print a table per layout, with one line for each kind of comparison, and the verdict."""
        for each in self.found:
            _show(each, console)
        console.print(shown(self.closing), highlight=False, markup=False)


def report_of(found: Sequence[LayoutResult], subject: str, losses: Mapping[str, list[float]]) -> VerifyReport:
    """Make the report of the results `found`."""
    rows = tuple(LayoutRow(**asdict(row), layout=each.layout) for each in found for row in each.rows)
    names = ", ".join(each.layout for each in found)
    wrong = [f"\n{each.layout}: {each.why}" for each in found if not each.ok]
    return VerifyReport(
        title="fivefold verify", rows=rows, ok=bool(found) and not wrong,
        closing="".join(wrong) or f"\n{names}: each computes what one process computes", found=tuple(found),
        subject=subject, losses=losses,
    )  # fmt: skip


@dataclass(frozen=True)
class Group:
    """The rows of one kind: how many there are, how many are wrong, and the most important one."""

    what: str
    count: int
    wrong: int
    row: Row


def groups(rows: Iterable[Row]) -> list[Group]:
    """Group rows by `what`, in order of first appearance; rows for different top k are one kind."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(_TOP.sub(" top k", row.what), []).append(row)
    return [Group(what, len(own), sum(not row.ok for row in own), _worst(own)) for what, own in by_kind.items()]


def _worst(rows: Sequence[Row]) -> Row:
    """The first row that is not ok; else the one closest to its tolerance."""
    return next((row for row in rows if not row.ok), max(rows, key=lambda row: row.error / (row.tolerance or 1.0)))


def _show(found: LayoutResult, console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    says = shown(found.refused) or f"{len(found.rows):,} comparisons  {found.seconds:.1f} s"
    verdict = (found.verdict, _COLOURS[found.verdict])
    console.print(Text.assemble((shown(f"\n{found.layout}"), "bold"), "  ", verdict, f"  {says}"))
    if found.verdict == "NOT RUN":
        return
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column, side in (("what", "left"), ("compared", "right"), ("error", "right"), ("allowed", "right")):
        table.add_column(column, justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("where", overflow="fold")
    for group in groups(found.rows):
        row = group.row
        style = "" if row.ok else "bold red"
        others = f"  (and {group.wrong - 1} more)" if group.wrong > 1 else ""
        place = row.where if not row.ok or row.what == CONTROL else ""
        table.add_row(
            Text(f"  {group.what}", style), str(group.count), Text(number(row.error), style), number(row.tolerance),
            Text(shown(f"{place}{others}"), style),
        )  # fmt: skip
    console.print(table)
    if found.not_told:
        console.print(Text(f"  too coarse to tell: {', '.join(found.not_told)}", style="dim"))
    if found.not_shown:
        console.print(Text(shown(f"  not looked at: {', '.join(found.not_shown)}"), style="dim"))
