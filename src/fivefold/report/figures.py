"""Labelled boxes: a page's drawings of parameters, of a pipeline's step and of experts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.core.json_lines import LOAD

CHARACTER, LINE = 6.4, 11.0  # pixels of a label
WIDTH = 1000.0  # pixels of a figure as wide as the page


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels. `fill`: a colour of the page, or stripes of several ranks: `ranks-0-1`, `ranks-many`."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""  # shown under the pointer
    text: str = ""
    opacity: float = 1.0

    @property
    def label(self) -> str:
        """Its text, "" if it does not fit."""
        return self.text if len(self.text) * CHARACTER <= self.width and self.height >= LINE else ""

    @property
    def is_busy(self) -> bool:
        """True if a label needs a background of its own."""
        return self.fill.startswith(("ranks-", "wrong")) or (self.fill.startswith("series-") and self.opacity > 0.75)


@dataclass(frozen=True)
class Figure:
    """Boxes as wide as the page. `names`: labels at the left as (y, name). `words`: the legend as (fill, word).
    `ticks`: of an axis below the boxes, as (x, label)."""

    title: str
    says: str
    height: float
    names: Sequence[tuple[float, str]]
    boxes: Sequence[Box]
    words: Sequence[tuple[str, str]]
    ticks: Sequence[tuple[float, str]] = ()


# ---- how evenly experts were used ------------------------------------------------------------------------------------

LAST = 0.1  # part of the run that is shown
FAR = 2.0  # powers of two from even load to full colour
TALLEST, SMALLEST, GAP = 26.0, 9.0, 1.0  # pixels: sides of a box; space between two
EVERY = 12.0  # minimum pixels from one row's name to the next
WORDS = (
    ("series-0", "a quarter of the mean, or less"), ("band", "the mean"), ("series-1", "four times the mean, or more"),
)  # fmt: skip


def heat(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw a row for each layer with experts and a box for each expert, over the last part of `metrics.jsonl`; None for
    a run without experts. Colours show the logarithm of an expert's load over the mean of its layer: half and twice are
    equally far from even."""
    rows = [row for row in rows if row.get(LOAD)]
    rows = rows[-max(1, round(LAST * len(rows))) :]
    if not rows:
        return None
    by_layer = zip(*(row[LOAD] for row in rows), strict=True)
    loads = [[sum(counts) for counts in zip(*layer, strict=True)] for layer in by_layer]
    evens = [[count / (sum(layer) / len(layer) or 1) for count in layer] for layer in loads]
    row = min(TALLEST, max(SMALLEST, WIDTH / max(map(len, loads))))
    every = math.ceil(EVERY / row)
    boxes = [
        box
        for layer, (even, counts) in enumerate(zip(evens, loads, strict=True))
        for box in _boxes(layer, even, counts, row)
    ]
    names = [(row * (layer + 0.5), f"layer {layer}") for layer in range(0, len(loads), every)]
    return Figure("Load of the experts", _says(rows, evens), row * len(loads), names, boxes, WORDS)


def _boxes(layer: int, evens: Sequence[float], counts: Sequence[float], row: float) -> list[Box]:
    """Boxes of a layer, on a background in the mean's colour."""
    width, y, height = WIDTH / len(evens), layer * row, row - GAP
    found = [Box(0, y, WIDTH, height, "band")]
    for expert, (even, count) in enumerate(zip(evens, counts, strict=True)):
        number = f"{even:.2f}" if even < 9.995 else f"{even:.0f}"
        title = f"layer {layer}, expert {expert}: {number} of the mean, {count:,.0f} rows"
        fill = "series-0" if even < 1 else "series-1"
        opacity = min(1.0, abs(math.log2(even)) / FAR) if even > 0 else 1.0
        found.append(Box(width * expert, y, width - GAP, height, fill, title, number, opacity))
    return found


def _says(rows: Sequence[Mapping[str, Any]], evens: Sequence[Sequence[float]]) -> str:
    first, last = rows[0]["step"], rows[-1]["step"]
    steps = f"steps {first} to {last}" if len(rows) > 1 else f"step {last}"
    idle = sum(even == 0 for layer in evens for even in layer)
    busiest = max(max(layer) for layer in evens)
    of = f"{idle} of {sum(map(len, evens))} experts without a token" if idle else "no expert without a token"
    return f"{steps}: the busiest expert has {busiest:.2f} times the mean of its layer; {of}"


# ---- the step of a pipeline ------------------------------------------------------------------------------------------

LANE, BAR = 26.0, 22.0  # pixels
PALER = 0.55  # opacity of a rank's later stages
FILLS = {"F": "rank-0", "B": "rank-1", "I": "rank-1", "W": "rank-2"}
PHASES = {"F": "forward", "B": "backward", "I": "backward, of the input", "W": "backward, of the weights"}


def timeline(title: str, found: Mapping[str, Any], *, unit: str, ideal: float | None = None) -> Figure:
    """Draw a lane for each rank and a bar for each slot, over time.

    `found`: `ranks`, `bubble` and `slots`, each with rank, stage, kind, micro_batch, start and end in `unit`. Measured
    slots also have `waited`: the wait before the start for another rank's data. `ideal`: the closed form of the bubble,
    if there is one.
    """
    slots, ranks = found["slots"], range(found["ranks"])
    first = min(slot["start"] for slot in slots)
    scale = WIDTH / (max(slot["end"] for slot in slots) - first)
    lowest = {rank: min(slot["stage"] for slot in slots if slot["rank"] == rank) for rank in ranks}
    bars = []
    for slot in slots:
        rank, number, seconds = slot["rank"], str(slot["micro_batch"]), slot["end"] - slot["start"]
        what = f"rank {rank}, stage {slot['stage']}, micro batch {number}: {PHASES[slot['kind']]}"
        waited = f", after waiting {slot['waited']:.4g}" if slot.get("waited") else ""
        hint = f"{what}, {seconds:.4g} {unit} from {slot['start'] - first:.4g}{waited}"
        at = (slot["start"] - first) * scale, rank * LANE, seconds * scale, BAR
        opacity = PALER if slot["stage"] != lowest[rank] else 1.0
        bars.append(Box(*at, FILLS[slot["kind"]], hint, number, opacity))
    kinds = [kind for kind in PHASES if any(slot["kind"] == kind for slot in slots)]
    says = f"bubble {100 * found['bubble']:.1f} % of the time"
    if ideal is not None:
        says += f"; {100 * ideal:.1f} % by the closed form"
    names = [(rank * LANE + BAR / 2, f"rank {rank}") for rank in ranks]
    words = list(dict.fromkeys((FILLS[kind], PHASES[kind]) for kind in kinds))
    return Figure(title, says, LANE * len(ranks), names, bars, words)
