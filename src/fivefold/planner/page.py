"""The page of a plan: one HTML file that needs nothing else. What it shows is chosen here; `page.html.j2` lays it
out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fivefold.planner.chips import GIB
from fivefold.planner.estimate import Estimate
from fivefold.planner.report import PlanReport
from fivefold.report.figures import BAR, LANE, WIDTH, Box, Figure, timeline
from fivefold.report.render import render, write

FILLS = tuple(f"rank-{number}" for number in range(8))


def write_page(report: PlanReport, path: str) -> None:
    """Write `report` as one HTML file to `path`, whose folder is made where it is missing."""
    write(page(report), Path(path), instead="name another file: --html FILE")


def page(report: PlanReport) -> str:
    """The HTML of `report`."""
    first = report.estimates[0]
    limit = first.cluster.chip.memory_gib * GIB
    return render(
        "page.html.j2", "fivefold.planner", [], {}, report=report,
        time=_stacks(report.estimates, "time", "s", 1.0, None),
        memory=_stacks(report.estimates, "memory", "GiB", 1 / GIB, limit),
        pipeline=_pipeline(report.timeline), items=_table(report.estimates),
    )  # fmt: skip


def _stacks(estimates: Sequence[Estimate], part: str, unit: str, factor: float, limit: float | None) -> Figure:
    """A bar for each layout, cut into its items, in the order of the first one's largest. `limit`: where a device is
    full."""
    by_item = [{row.item: row.amount for row in each.rows if row.part == part} for each in estimates]
    names = sorted(
        {name for items in by_item for name in items}, key=lambda name: -max(i.get(name, 0) for i in by_item)
    )
    fills = {name: FILLS[number] if number < len(FILLS) else "many" for number, name in enumerate(names)}
    longest = max([*(sum(items.values()) for items in by_item), limit or 0])
    boxes = []
    for lane, (estimate, items) in enumerate(zip(estimates, by_item, strict=True)):
        at = 0.0
        for name in names:
            width = items.get(name, 0.0) / longest * WIDTH
            title = f"{estimate.layout}: {name} {items.get(name, 0.0) * factor:.4g} {unit}"
            if width > 0.2:
                boxes.append(Box(at, lane * LANE, width, BAR, fills[name], title, name))
            at += width
    if limit is not None:
        says = f"a device has {limit * factor:.4g} {unit}"
        boxes.append(Box(limit / longest * WIDTH - 2, 0, 2, LANE * len(estimates), "wrong", says))
    numbers = [(lane * LANE + BAR / 2, f"{lane + 1}") for lane in range(len(estimates))]
    words = [(fills[name], name) for name in names[: len(FILLS)]]
    words += [("many", "the rest")] if len(names) > len(FILLS) else []
    titles = {"time": "Time of a step", "memory": "Memory of the fullest device"}
    return Figure(titles[part], f"{longest * factor:.4g} {unit} wide", LANE * len(estimates), numbers, boxes, words)


def _pipeline(found: Mapping[str, Any] | None) -> Figure | None:
    return timeline("The first layout's pipeline", found, unit="s") if found else None


def _table(estimates: Sequence[Estimate]) -> list[tuple[str, str, list[str]]]:
    """(part, item, its amount under each layout), as texts."""
    found = []
    for part in ("time", "memory"):
        by_item = [{row.item: row.amount for row in each.rows if row.part == part} for each in estimates]
        for name in dict.fromkeys(name for items in by_item for name in items):
            amounts = [items.get(name, 0.0) for items in by_item]
            found.append((part, name, [f"{each:.3g} s" if part == "time" else f"{each / GIB:.2f}" for each in amounts]))
    return found
