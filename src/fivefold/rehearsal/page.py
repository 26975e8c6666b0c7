"""The page of a rehearsal: one self-contained HTML file. `rehearsal.html.j2` lays it out."""

from collections.abc import Iterator
from pathlib import Path

from fivefold.core.units import GIB
from fivefold.rehearsal.report import Rehearsal, gib, largest
from fivefold.rehearsal.request import Phase
from fivefold.report.figures import LANE, WIDTH, Box, Figure
from fivefold.report.render import render, write

BAR, LEFT, COLOURS = 20.0, 74.0, 6  # pixels of a bar, and of the names before it; colours of items


def write_page(rehearsal: Rehearsal, path: str) -> None:
    """Write `rehearsal` as one HTML file to `path`, and make its folder if it is missing."""
    write(page(rehearsal), Path(path), instead="name another file: --html FILE")


def page(rehearsal: Rehearsal) -> str:
    """The HTML of `rehearsal`."""
    chip = rehearsal.cluster.chip
    facts = {
        "model": rehearsal.model,
        "layout": rehearsal.layout,
        "cluster": f"{rehearsal.cluster.text}: {rehearsal.cluster.world:,} devices of {gib(chip.memory_bytes)} GiB",
        "ranks rehearsed": ", ".join(str(each.rank) for each in rehearsal.seen),
        "steps": str(rehearsal.steps),
    }
    return render(
        "rehearsal.html.j2", "fivefold.rehearsal", [], {}, rehearsal=rehearsal, facts=facts,
        tables=list(rehearsal.tables()), drawing=memory(rehearsal),
    )  # fmt: skip


def memory(rehearsal: Rehearsal) -> Figure | None:
    """Draw a bar for every phase, as wide as the device's memory: its largest items, the rest of what is allocated, and
    what is reserved beyond that. None if memory was not seen."""
    rows = [(seen.rank, phase) for seen in rehearsal.seen for phase in seen.phases if phase.allocated is not None]
    if not rows:
        return None
    scale = (WIDTH - LEFT) / max(rehearsal.cluster.chip.memory_bytes, *(phase.reserved or 0 for _, phase in rows))
    words = _words(rehearsal)
    boxes = [box for at, (_, phase) in enumerate(rows) for box in _bar(phase, at * LANE, scale, words)]
    names = [(at * LANE + BAR / 2 + 4, f"{rank}: {phase.name}") for at, (rank, phase) in enumerate(rows)]
    explained = [*((f"series-{colour}", what) for what, colour in words.items()), ("many", "everything else")]
    explained.append(("band", "free; to its left, reserved and not allocated"))
    says = f"A bar is {gib(rehearsal.cluster.chip.memory_bytes)} GiB wide. Hover over a part for its size."
    return Figure("Memory of each phase at its peak", says, LANE * len(rows), names, boxes, explained)


def _words(rehearsal: Rehearsal) -> dict[str, int]:
    """Items with a colour of their own: the largest of all ranks' peaks, and their colours."""
    found: dict[str, int] = {}
    for seen in rehearsal.seen:
        for item in largest(seen)[1]:
            found[item.what] = max(found.get(item.what, 0), item.bytes)
    largest_first = sorted(found, key=lambda what: -found[what])[:COLOURS]
    return {what: colour for colour, what in enumerate(largest_first)}


def _bar(phase: Phase, y: float, scale: float, words: dict[str, int]) -> Iterator[Box]:
    yield Box(LEFT - 56, y, WIDTH - LEFT, BAR, "band", "free")
    x, allocated = LEFT - 56, phase.allocated or 0
    reserved = scale * (phase.reserved or 0)
    yield Box(x, y, reserved, BAR, "grid", f"{phase.name}: {gib(phase.reserved)} GiB reserved")
    yield Box(x, y, scale * allocated, BAR, "many", f"{phase.name}: {gib(allocated)} GiB allocated")
    for item in phase.items:
        if item.what in words:
            width = scale * item.bytes
            title = f"{item.what}, {item.where}: {item.count} tensors, {gib(item.bytes)} GiB"
            yield Box(x, y, width, BAR, f"series-{words[item.what]}", title, f"{item.bytes / GIB:.1f}", 0.7)
            x += width
