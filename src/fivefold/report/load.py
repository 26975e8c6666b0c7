"""How evenly a run's experts were used, as a heat map: a row for each layer with experts, a box for each expert.

Colours are of the logarithm of an expert's load over the mean of its layer: half and twice are as far from even.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.report.boxes import WIDTH, Box, Figure

METRIC = "moe/load"
LAST = 0.1  # of the run is looked at
FAR = 2.0  # powers of two from even at which a colour is full
TALLEST, SMALLEST, GAP = 26.0, 9.0, 1.0  # pixels: of a box; between two
EVERY = 12.0  # pixels from one row's name to the next, at least
WORDS = (
    ("series-0", "a quarter of the mean, or less"), ("band", "the mean"), ("series-1", "four times the mean, or more"),
)  # fmt: skip

Loads = Sequence[Sequence[float]]


def heat(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Of `metrics.jsonl`: the last part of it. None for a run without experts."""
    rows = [row for row in rows if row.get(METRIC)]
    rows = rows[-max(1, round(LAST * len(rows))) :]
    if not rows:
        return None
    by_layer = zip(*(row[METRIC] for row in rows), strict=True)
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
    """Those of a layer, over a ground of the mean's colour."""
    width, y, height = WIDTH / len(evens), layer * row, row - GAP
    found = [Box(0, y, WIDTH, height, "band")]
    for expert, (even, count) in enumerate(zip(evens, counts, strict=True)):
        number = f"{even:.2f}" if even < 9.995 else f"{even:.0f}"
        title = f"layer {layer}, expert {expert}: {number} of the mean, {count:,.0f} rows"
        fill = "series-0" if even < 1 else "series-1"
        found.append(Box(width * expert, y, width - GAP, height, fill, title, number, strength(even)))
    return found


def strength(even: float) -> float:
    """How far a load is from even: 0 for 1, 1 for `FAR` powers of two away."""
    return min(1.0, abs(math.log2(even)) / FAR) if even > 0 else 1.0


def _says(rows: Sequence[Mapping[str, Any]], evens: Loads) -> str:
    first, last = rows[0]["step"], rows[-1]["step"]
    steps = f"steps {first} to {last}" if len(rows) > 1 else f"step {last}"
    idle = sum(even == 0 for layer in evens for even in layer)
    busiest = max(max(layer) for layer in evens)
    of = f"{idle} of {sum(map(len, evens))} experts without a token" if idle else "no expert without a token"
    return f"{steps}: the busiest expert has {busiest:.2f} times the mean of its layer; {of}"
