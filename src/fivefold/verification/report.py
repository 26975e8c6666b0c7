"""What a proof found, for people and for programs: a table per layout, JSON, and an offline page (`page.py`)."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fivefold.core.terminal import shown
from fivefold.report.table import Report
from fivefold.verification.results import LayoutResult, Row, worst

if TYPE_CHECKING:
    from rich.console import Console


_TOP = re.compile(r" top (\d+|all)$")
HUGE = 1e308  # an infinite error, in JSON


@dataclass(frozen=True)
class LayoutRow(Row):
    """A row of a proof, with the layout it belongs to."""

    layout: str = ""


@dataclass(frozen=True, kw_only=True)
class VerifyReport(Report[LayoutRow]):
    """`.rows` of all layouts one after the other; `.found` layout by layout."""

    found: tuple[LayoutResult, ...] = ()
    subject: str = ""
    losses: Mapping[str, list[float]] = field(default_factory=dict)  # precision -> the reference's, step by step

    def to_json(self) -> str:
        """`{"ok", "layouts": [{"layout", "ok", "rows": [{"what", "error", "tolerance", "ok", "where"}]}]}`.

        Beside the rows: `not_run`, why a layout did not run, else null; `not_told`, what its precision is too coarse
        for."""
        layouts = [
            {
                "layout": each.layout,
                "ok": each.ok,
                "not_run": each.refused or None,
                "not_told": each.not_told,
                "seconds": round(each.seconds, 3),
                "rows": [_plain(asdict(row)) for row in each.rows],
            }
            for each in self.found
        ]
        return json.dumps({"ok": self.ok, "subject": self.subject, "layouts": layouts}, indent=1, ensure_ascii=False)

    def show(self, console: "Console") -> None:
        """A table per layout, one line for each kind of comparison, and the verdict."""
        for each in self.found:
            _show(each, console)
        console.print(shown(self.closing), highlight=False, markup=False)


def report_of(found: Sequence[LayoutResult], subject: str, losses: Mapping[str, list[float]]) -> VerifyReport:
    """The report of what was found."""
    rows = tuple(LayoutRow(**asdict(row), layout=each.layout) for each in found for row in each.rows)
    ok = bool(found) and all(each.ok for each in found)
    return VerifyReport(
        title="fivefold verify",
        rows=rows,
        ok=ok,
        closing=_closing(found),
        found=tuple(found),
        subject=subject,
        losses=losses,
    )


@dataclass(frozen=True)
class Group:
    """The rows of one kind together: how many, and the one that matters most."""

    what: str
    count: int
    wrong: int
    row: Row


def groups(rows: Iterable[Row]) -> list[Group]:
    """Rows by `what`, in the order in which each first comes; those of the top k tokens are one kind."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(_TOP.sub(" top k", row.what), []).append(row)
    return [Group(what, len(own), sum(not row.ok for row in own), worst(own)) for what, own in by_kind.items()]


def first_wrong(found: LayoutResult) -> Row | None:
    """The first comparison that fails, in the order in which a step computes."""
    return next((row for row in found.rows if not row.ok), None)


def _show(found: LayoutResult, console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    if found.refused:
        why = f"  {shown(found.refused)}"
        console.print(Text.assemble((shown(f"\n{found.layout}"), "bold"), "  ", ("NOT RUN", "bold red"), why))
        return
    verdict = ("PROVED", "bold green") if found.ok else ("WRONG", "bold red")
    counted = f"  {len(found.rows):,} comparisons  {found.seconds:.1f} s"
    console.print(Text.assemble((shown(f"\n{found.layout}"), "bold"), "  ", verdict, counted))
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column, side in (("what", "left"), ("compared", "right"), ("error", "right"), ("allowed", "right")):
        table.add_column(column, justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("where", overflow="fold")
    for group in groups(found.rows):
        row = group.row
        style = "" if row.ok else "bold red"
        others = f"  (and {group.wrong - 1} more)" if group.wrong > 1 else ""
        place = row.where if not row.ok or row.what.startswith("control") else ""
        table.add_row(
            Text(f"  {group.what}", style), str(group.count), Text(number(row.error), style), number(row.tolerance),
            Text(shown(f"{place}{others}"), style),
        )  # fmt: skip
    console.print(table)
    if found.not_told:
        console.print(Text(f"  too coarse to tell: {', '.join(found.not_told)}", style="dim"))


def _closing(found: Sequence[LayoutResult]) -> str:
    wrong = [each for each in found if not each.ok]
    if not wrong:
        names = ", ".join(each.layout for each in found)
        return f"\n{names}: each computes what one process computes"
    lines = []
    for each in wrong:
        lines.append(f"\n{each.layout}: {first_sentence(each)}")
    return "".join(lines)


def first_sentence(found: LayoutResult) -> str:
    """Why a layout is not proved, for people."""
    row = first_wrong(found)
    if row is None or found.refused:
        return f"not run: {found.refused or 'it left no result'}"
    return sentence(row)


def sentence(row: Row) -> str:
    """A comparison that fails, for people."""
    where = f" of {row.where}" if row.where else ""
    return f"first differs at {row.what}{where}: {number(row.error)} off, {number(row.tolerance)} allowed"


def number(value: float) -> str:
    """An error or a tolerance, short."""
    return "0" if value == 0 else f"{value:.1e}"


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinities."""
    return row | {"error": min(row["error"], HUGE)}
