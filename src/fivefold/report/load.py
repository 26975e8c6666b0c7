"""How evenly a run's experts were used, as a heat map: a row of cells for each layer with experts, a cell for each.

Colours are of the logarithm of an expert's load over the mean of its layer: half and twice are as far from even.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

METRIC = "moe/load"
LAST = 0.1  # of the run is looked at
FAR = 2.0  # powers of two from even at which a colour is full
WIDTH, TALLEST, SMALLEST, GAP = 1000.0, 26.0, 9.0, 1.0  # pixels: of all cells; of one; between two
CHARACTER = 6.4  # pixels of a label
EVERY = 12.0  # pixels from one row's name to the next, at least

Loads = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Cell:
    """An expert, in pixels; `strength` of its colour is 0 to 1. `label`: "" where it would not fit."""

    x: float
    width: float
    fill: str  # "series-0" for less than even, "series-1" for more
    strength: float
    label: str
    title: str


@dataclass(frozen=True)
class Layer:
    """The experts of a layer. `name`: "" where there is no room for it."""

    y: float
    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Heat:
    """What is drawn, and its sum in words."""

    says: str
    height: float
    row: float  # height of a cell
    layers: tuple[Layer, ...]


def heat(rows: Sequence[Mapping[str, Any]]) -> Heat | None:
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
    layers = tuple(
        Layer(row * at, str(at) if at % every == 0 else "", _cells(at, even, counts))
        for at, (even, counts) in enumerate(zip(evens, loads, strict=True))
    )
    return Heat(_says(rows, evens), row * len(layers), row - GAP, layers)


def _cells(layer: int, evens: Sequence[float], counts: Sequence[float]) -> tuple[Cell, ...]:
    width = WIDTH / len(evens)
    found = []
    for expert, (even, count) in enumerate(zip(evens, counts, strict=True)):
        number = f"{even:.2f}" if even < 9.995 else f"{even:.0f}"
        label = number if width > CHARACTER * len(number) + 4 else ""
        title = f"layer {layer}, expert {expert}: {number} of the mean, {count:,.0f} rows"
        fill = "series-0" if even < 1 else "series-1"
        found.append(Cell(width * expert, width - GAP, fill, strength(even), label, title))
    return tuple(found)


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
