"""Drawings of a plan: bars of time and memory, the pipeline, throughput over devices and row lengths."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from fivefold.core.units import GIB, human
from fivefold.planner.estimate import Estimate
from fivefold.planner.sweeps import Sweeps
from fivefold.report.figures import BAR, LANE, WIDTH, Box, Figure, timeline
from fivefold.report.findings import Cell, Column, On, Plot, Row, Section, Table
from fivefold.report.plot import LEFT, Axes, Linear, label, nice, svg
from fivefold.report.plot import WIDTH as PAGE

# A colour for each item, and none for two on a page: those of time, and those of memory. The others are hatched.
TIME = ("matmuls", "attention", "element-wise", "tp", "data")
MEMORY = ("saved activations", "optimizer state", "parameters", "gradients", "loss")
COLOURS = {
    item: f"{kind}-{number}"
    for kind, items in (("rank", TIME), ("series", MEMORY))
    for number, item in enumerate(items)
}
REST = "many"  # colour of all other items
AXIS = 34.0  # pixels of an axis below the bars


def stacks(estimates: Sequence[Estimate], part: str, unit: str, factor: float, limit: float | None) -> Figure:
    """Draw a bar for each layout, cut into its items, ordered by their largest amount in any layout. `limit`: where a
    device is full."""
    by_item = [{row.item: row.amount for row in estimate.rows if row.part == part} for estimate in estimates]
    names = sorted(
        dict.fromkeys(name for items in by_item for name in items),
        key=lambda name: -max(i.get(name, 0) for i in by_item),
    )
    names.sort(key=lambda name: name not in COLOURS)
    fills = {name: COLOURS.get(name, REST) for name in names}
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
    words = [(fills[name], name) for name in names if name in COLOURS]
    if rest := [name for name in names if name not in COLOURS]:
        words.append((REST, f"the rest: {', '.join(rest)}"))
    if limit is not None:
        words.append(("wrong", f"a device is full: {limit * factor:.4g} {unit}"))
    titles = {"time": "Time of a step", "memory": "Memory of the fullest device"}
    ticks = nice(0, longest * factor, 6)
    marks = [(tick / factor / longest * WIDTH, f"{label(tick, ticks)} {unit}") for tick in ticks]
    return Figure(
        titles[part], f"{longest * factor:.4g} {unit} wide", LANE * len(estimates) + AXIS, numbers, boxes, words, marks
    )


# ---- other clusters and rows -----------------------------------------------------------------------------------------


def throughput(beside: Sweeps) -> Iterator[Section]:
    """Draw the sweeps that have more than one point, each with a table of its points."""
    if len(found := beside.devices) > 1:
        says = (
            "The same batch on fewer and on more devices, each with its best layout; none where none fits. Dashed: as "
            "many tokens a device as on the fewest."
        )
        points = [(f"{e.layout.world:,}", e) for e in found]
        least = found[0].tokens_per_second_per_device
        rates = [one.tokens_per_second_per_device * one.layout.world for one in found]
        picture = _curves(points, "devices", "tokens/s of all", rates, [least * one.layout.world for one in found])
        yield Section([Plot(picture, says), _points("devices", points)], "Throughput over devices", On.PAGE)
    if len(found := beside.lengths) > 1:
        says = "Shorter and longer rows on this cluster, about as many tokens a step, each with its best layout."
        points = [(f"{one.workload.seq_length:,}", one) for one in found]
        rates = [one.tokens_per_second_per_device for one in found]
        picture = _curves(points, "tokens of a row", "tokens/s a device", rates)
        yield Section([Plot(picture, says), _points("tokens", points)], "Throughput over sequence length", On.PAGE)


def _points(name: str, points: Sequence[tuple[str, Estimate]]) -> Table:
    heads = ("GiB of a device", "s a step", "tokens/s a device", "MFU, %")
    columns = [Column(name, "n"), Column("best layout", "name"), *(Column(head, "n") for head in heads)]
    rows = []
    for point, best in points:
        numbers = (
            f"{best.reserved / GIB:.1f}", f"{best.step_seconds:.3g}", f"{best.tokens_per_second_per_device:,.0f}",
            f"{100 * best.mfu:.1f}",
        )  # fmt: skip
        rows.append(Row([Cell(text) for text in (point, str(best.layout), *numbers)]))
    return Table(columns, rows, look="")


def _curves(
    points: Sequence[tuple[str, Estimate]], name: str, title: str, rates: Sequence[float], ideal: Sequence[float] = ()
) -> Markup:
    """Plot throughput on an axis of doublings and, next to it, MFU; both by the names of the points."""
    xs, half = range(len(points)), (PAGE - 4 * LEFT) / 2
    places, doublings = Linear(-0.4, len(points) - 0.6), [math.log2(rate) for rate in (*rates, *ideal)]
    low, high = math.floor(min(doublings)), math.ceil(max(doublings) + 0.01)
    left = Axes(LEFT + 20, 20, half, 220, places, Linear(low - 0.2, high + 0.2))
    left.label_y({tick: human(2.0**tick) for tick in range(low, high + 1, -(-(high - low) // 6))})
    left.line(xs[: len(ideal)], doublings[len(rates) :], "var(--ink)", dash="6 3")
    left.curve(xs, doublings[: len(rates)], 0)
    mfu = [100 * estimate.mfu for _, estimate in points]
    ticks = nice(0, max(mfu), 5)
    right = Axes(3 * LEFT + 20 + half, 20, half, 220, places, Linear(0, max(mfu) * 1.1))
    right.label_y({tick: label(tick, ticks) for tick in ticks})
    right.curve(xs, mfu, 0)
    for axes, says in ((left, f"{title}, each line twice the one below"), (right, "MFU, %")):
        axes.title(says)
        axes.label_x({x: point for x, (point, _) in zip(xs, points, strict=True)}, name)
    return Markup(svg((left, right), 275, ()))


def pipeline(found: Mapping[str, Any] | None) -> Figure | None:
    """Draw the first layout's pipeline with a few of a step's micro batches; its bubble is larger than that of all."""
    if not found:
        return None
    figure = timeline("The first layout's pipeline", found, unit="s")
    drawn, there = found["drawn"], found["micro_batches"]
    return figure if drawn == there else replace(figure, says=f"with {drawn} of the {there} micro batches of a step")


# ---- item by item ----------------------------------------------------------------------------------------------------


def items(estimates: Sequence[Estimate]) -> Table:
    """Each item of time and memory, and its amount under each layout."""
    rows = []
    for part in ("time", "memory"):
        by_item = [{row.item: row.amount for row in estimate.rows if row.part == part} for estimate in estimates]
        for name in dict.fromkeys(name for items in by_item for name in items):
            amounts = [items.get(name, 0.0) for items in by_item]
            texts = [_seconds(amount) if part == "time" else f"{amount / GIB:.2f}" for amount in amounts]
            rows.append(Row([Cell(text) for text in (part, name, *texts)]))
    numbers = [Column(f"{number}", "n") for number in range(1, len(estimates) + 1)]
    return Table([Column(""), Column("item", "name"), *numbers], rows, look="matrix")


def _seconds(amount: float) -> str:
    """Format seconds. Less than a microsecond is a remainder of the sums: 0."""
    return f"{amount:.3g} s" if amount >= 1e-6 else "0 s"
