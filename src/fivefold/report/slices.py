"""Slice map of a page: which rank holds which slice of every parameter, drawn as rectangles.

A region is `[[start, stop], ...]`, a pair for each dimension; a rank may hold several regions of a parameter.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from fivefold.core.errors import UserError
from fivefold.parallel.layout import Layout
from fivefold.report.figures import Box

LARGEST, SMALLEST, BAR = 200.0, 8.0, 12.0  # pixels of a side; height of a vector
COLOURS = 8  # colours repeat; labels tell ranks apart
STRIPES = 4  # more ranks are drawn as a grey hatch
PER_LAYER = 40  # drawings
# The first number in a dotted name is its layer: model.layers.3.mlp.up_proj, transformer.h.3.attn
_LAYER = re.compile(r"^(?P<stem>(?:[^.\d][^.]*\.)+)(?P<number>\d+)(?:\.(?P<inner>.+))?$")

Region = tuple[tuple[int, int], ...]
Holders = dict[Region, tuple[int, ...]]  # region -> the ranks that hold it
EXPLAINED = (
    "Each parameter as a rectangle: its rows downwards, its columns across, to one scale under each title. A side that "
    f"would be thinner than {SMALLEST:.0f} pixels has {SMALLEST:.0f}, and the thickness of a vector says nothing. "
    "A slice has the colour and the number of the rank that holds it; where several hold the same, it is striped. "
    "Hover over a slice for its indices."
)


class Layer(NamedTuple):
    """A layer of the model: `model.layers.3.mlp.up_proj` is in the one with stem `model.layers` and number 3."""

    stem: str
    number: int


def in_layer(name: str) -> tuple[Layer | None, str]:
    """Split `name` into its layer, None outside all layers, and its name there."""
    match = _LAYER.match(name)
    if match is None:
        return None, name
    return Layer(match["stem"].rstrip("."), int(match["number"])), match["inner"] or ""


@dataclass(frozen=True)
class ParameterDrawing:
    """A parameter as a rectangle of boxes: dimension 0 downwards; a vector is horizontal."""

    name: str
    shape: str
    width: float
    height: float
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class MapPart:
    """A layer, or the modules before or after the layers; `alike` names the layers with the same slices."""

    title: str
    drawings: tuple[ParameterDrawing, ...]
    alike: str = ""


@dataclass(frozen=True)
class SliceMap:
    """A whole model under one layout. `shares`: percent of all parameters that each rank holds; `places`: coordinates
    of each rank, as `tp 1, dp_shard 0`, empty if unknown."""

    parts: tuple[MapPart, ...]
    shares: tuple[float, ...]
    places: Sequence[str] = ()

    @property
    def fills(self) -> set[str]:
        return {box.fill for part in self.parts for drawing in part.drawings for box in drawing.boxes}


def slice_map(holds: Mapping[str, Mapping[str, Any]], layout: str = "") -> SliceMap | None:
    """Draw `holds`: parameter -> `{"shape": [...], "ranks": [[region, ...] of each rank]}`. None if it is empty.

    Only the first of several layers with the same slices is drawn.
    """
    if not holds:
        return None
    world = max(len(held["ranks"]) for held in holds.values())
    parameters = [
        _Parameter(name, tuple(held["shape"]), _holders(held["ranks"])) for name, held in holds.items() if held["shape"]
    ]
    return SliceMap(tuple(_parts(parameters, world)), _shares(holds, world), _places(layout, world))


def _places(text: str, world: int) -> list[str]:
    """`tp 1, dp_shard 0` of each of the first `world` ranks; empty if the text is no layout for that many."""
    try:
        layout = Layout.parse(text)
        fits = 1 < world <= layout.world
    except (UserError, ValueError):
        return []
    ranks = [layout.coordinates(rank) for rank in range(world if fits else 0)]
    return [", ".join(f"{axis} {place}" for axis, place in found.items()) for found in ranks]


def _holders(ranks: Sequence[Sequence[Sequence[Sequence[int]]]]) -> Holders:
    """Each non-empty region, with the ranks that hold it."""
    found: dict[Region, list[int]] = {}
    for rank, regions in enumerate(ranks):
        for region in regions:
            key = tuple((start, stop) for start, stop in region)
            if all(stop > start for start, stop in key):
                found.setdefault(key, []).append(rank)
    return {region: tuple(own) for region, own in found.items()}


def _shares(holds: Mapping[str, Mapping[str, Any]], world: int) -> tuple[float, ...]:
    whole = sum(math.prod(held["shape"]) for held in holds.values())
    own = [0] * world
    for held in holds.values():
        for rank, regions in enumerate(held["ranks"]):
            own[rank] += sum(math.prod(max(stop - start, 0) for start, stop in region) for region in regions)
    return tuple(100 * size / max(whole, 1) for size in own)


@dataclass(frozen=True)
class _Parameter:
    """A parameter, and the ranks that hold its regions."""

    name: str
    shape: tuple[int, ...]
    held: Holders

    @property
    def inner(self) -> str:
        """Its name in its layer, or the whole name outside layers."""
        return (in_layer(self.name)[1] or self.name).removesuffix(".weight")

    def looks(self, ranks: Sequence[int]) -> tuple[Any, ...]:
        """Key, equal for parameters with the same slices: holders as positions in `ranks`, which differ by stage."""
        places = frozenset((region, tuple(map(ranks.index, own))) for region, own in self.held.items())
        return self.inner, self.shape, places


def _parts(parameters: Sequence[_Parameter], world: int) -> list[MapPart]:
    """Every part of the model; only the first of several layers with the same slices."""
    runs = [(layer, list(run)) for layer, run in groupby(parameters, lambda parameter: in_layer(parameter.name)[0])]
    stems = {layer.stem for layer, _ in runs if layer}
    alike: dict[Any, list[tuple[int, tuple[int, ...]]]] = {}  # key of a layer -> number and ranks of each
    for layer, own in runs:
        if layer:
            alike.setdefault(_looks(layer, own), []).append((layer.number, _ranks(own)))
    found, seen = [], 0
    for layer, own in runs:
        seen += layer is not None
        if layer is None:
            title = "" if not stems else "after the layers" if seen else "before the layers"
            found.append(MapPart(title, _drawings(own, world)))
        elif likes := alike.pop(_looks(layer, own), None):
            title = f"layer {layer.number}" if len(stems) == 1 else f"{layer.stem}.{layer.number}"
            more = f"{len(own) - PER_LAYER} more parameters are not drawn" if len(own) > PER_LAYER else ""
            said = "; ".join(filter(None, (more, _alike(likes, world))))
            found.append(MapPart(title, _drawings(own[:PER_LAYER], world), said))
    return found


def _ranks(parameters: Sequence[_Parameter]) -> tuple[int, ...]:
    return tuple(sorted({rank for parameter in parameters for own in parameter.held.values() for rank in own}))


def _looks(layer: Layer, parameters: Sequence[_Parameter]) -> tuple[Any, ...]:
    """Key that is equal for layers with the same slices, though on other ranks (of another pipeline stage)."""
    ranks = _ranks(parameters)
    return (layer.stem, *(parameter.looks(ranks) for parameter in parameters))


def _alike(layers: Sequence[tuple[int, tuple[int, ...]]], world: int) -> str:
    """Describe as `layers 1–3 alike; layers 4–7 alike, on ranks 2,3`."""
    (_, first), *others = layers
    texts = []
    for ranks, run in groupby(others, key=lambda layer: layer[1]):
        numbers = [number for number, _ in run]
        place = "" if ranks == first else f", on {of_ranks(ranks, world)}"
        texts.append(f"layer{'s' * (len(numbers) > 1)} {ranks_text(numbers, 0)} alike{place}")
    return "; ".join(texts)


def _drawings(parameters: Sequence[_Parameter], world: int) -> tuple[ParameterDrawing, ...]:
    sides = (
        parameter.shape[dim]
        for parameter in parameters
        for dim in _drawn_dims(parameter.shape, parameter.held)
        if dim is not None
    )
    longest = max([1, *sides])
    return tuple(_draw(parameter, longest, world) for parameter in parameters)


def _draw(parameter: _Parameter, longest: int, world: int) -> ParameterDrawing:
    shape, held = parameter.shape, parameter.held
    rows, columns = _drawn_dims(shape, held)
    height = BAR if rows is None else _side(shape[rows], longest)
    width = _side(shape[columns], longest)
    boxes = []
    for region, ranks in held.items():
        top, bottom = (0.0, 1.0) if rows is None else (end / shape[rows] for end in region[rows])
        left, right = (end / shape[columns] for end in region[columns])
        x, y, w, h = left * width, top * height, (right - left) * width, (bottom - top) * height
        title = f"{of_ranks(ranks, world)}: [{', '.join(f'{start}:{stop}' for start, stop in region)}]"
        boxes.append(Box(x, y, w, h, _fill(ranks), title, ranks_text(ranks, world)))
    return ParameterDrawing(parameter.inner, " × ".join(map(str, shape)), width, height, tuple(boxes))


def _drawn_dims(shape: tuple[int, ...], held: Holders) -> tuple[int | None, int]:
    """Dimensions drawn downwards and across: of more than two, those that are cut, else the last."""
    if len(shape) == 1:
        return None, 0
    cut = [dim for dim, size in enumerate(shape) if any(region[dim] != (0, size) for region in held)]
    rest = [dim for dim in reversed(range(len(shape))) if dim not in cut]
    rows, columns = sorted((cut + rest)[:2])
    return rows, columns


def _side(size: int, longest: int) -> float:
    return round(max(SMALLEST, LARGEST * size / longest), 1)


def _fill(ranks: tuple[int, ...]) -> str:
    colours = sorted({rank % COLOURS for rank in ranks})
    if len(ranks) == 1:
        return f"rank-{colours[0]}"
    return f"ranks-{'-'.join(map(str, colours))}" if len(ranks) <= STRIPES else "ranks-many"


def ranks_text(ranks: Sequence[int], world: int) -> str:
    """Format rank numbers as `0–3,6`; `all 8` for all of several."""
    if len(ranks) == world > 1:
        return f"all {world}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ",".join(texts)


def of_ranks(ranks: Sequence[int], world: int) -> str:
    """Format as `rank 3` or `ranks 0–3,6`."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks, world)}"
