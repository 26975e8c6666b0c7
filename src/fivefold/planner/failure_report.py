"""Report of failures beside a plan: interval, restart time and goodput of each layout. No torch."""

from collections.abc import Iterator, Mapping

from fivefold.core.units import human_bytes
from fivefold.parallel.layout import Layout
from fivefold.planner.failures import HANG_SECONDS, Failures
from fivefold.report.findings import Cell, Column, Notes, Row, Section, Table

WIDTH = 30  # characters of a layout in one line


def failure_sections(costs: Mapping[Layout, Failures]) -> Iterator[Section]:
    """A table of the layouts, and the items of the first."""
    if not costs:
        return
    layout, first = next(iter(costs.items()))
    title = f"One failure in {duration(first.between)} of the whole cluster"
    yield Section([_table(costs), Notes(list(_told(layout, first)))], title)


def _table(costs: Mapping[Layout, Failures]) -> Table:
    columns = [
        Column("layout", "name", folds="+", most=WIDTH),
        Column("checkpoint\n.every", "n", "checkpoint.every"),
        Column("that is", "n"),
        Column("lost a\nfailure", "n", "lost a failure"),
        Column("restart", "n"),
        Column("goodput\n%", "n", "goodput %"),
    ]
    rows = [
        Row([
            Cell(str(layout)), Cell(f"{cost.every:,}"), Cell(duration(cost.every * cost.step)),
            Cell(duration(cost.lost_seconds)), Cell(duration(cost.restart_seconds)), Cell(f"{100 * cost.goodput:.1f}"),
        ])
        for layout, cost in costs.items()
    ]  # fmt: skip
    return Table(columns, rows, is_narrow=True)


def _told(layout: Layout, cost: Failures) -> Iterator[str]:
    """Sentences about the first layout: what its numbers are made of."""
    size, written = human_bytes(cost.checkpoint_bytes), duration(cost.write)
    yield f"a checkpoint of {layout}: {size}, training stands still for {_items(cost.stall)}"
    yield f"it is written and read back in {written}, with storage at {cost.storage / 1e9:,.0f} GB/s in all"
    yield f"a restart: {_items(cost.restart)}"
    hangs = f"{100 * cost.goodput_of_hangs:.1f} % if each failure only hangs ({HANG_SECONDS} s until it is named)"
    yield f"goodput (Young 1974, Daly 2006): steps that count, of all time; {hangs}"


def _items(items: Mapping[str, float]) -> str:
    return f"{duration(sum(items.values()))} (" + ", ".join(f"{name} {duration(s)}" for name, s in items.items()) + ")"


def duration(seconds: float) -> str:
    """`0.4 s`, `12 min`, `3.1 h`, `5.2 days`: the largest unit of which there is one or more."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"
