"""Which rank holds which slice of every parameter, as rectangles to draw: the slice map of a page.

A region is `[[start, stop], ...]`, a pair for each dimension; a rank may hold several regions of a parameter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fivefold.core.errors import UserError
from fivefold.core.layout import Layout
from fivefold.report.boxes import Box
from fivefold.report.names import InLayer, in_layer, ranks_text

LARGEST, SMALLEST, BAR = 150.0, 26.0, 20.0  # pixels of a side; of a vector's other side
COLOURS = 8  # then they come again; the labels tell
STRIPES = 4  # more ranks than these are one grey hatch
PER_LAYER = 40  # drawings

Region = tuple[tuple[int, int], ...]
Holders = dict[Region, tuple[int, ...]]  # region -> the ranks that hold it


@dataclass(frozen=True)
class Drawing:
    """A parameter as a rectangle of boxes: dimension 0 downwards (a vector lies)."""

    name: str
    shape: str
    width: float
    height: float
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Part:
    """The embedding, a layer, what comes after; `alike` says which layers lie as this one does."""

    title: str
    drawings: tuple[Drawing, ...]
    alike: str = ""


@dataclass(frozen=True)
class SliceMap:
    """All of a model under one layout. `shares`: percent of all parameters that each rank holds; `places`: where each
    stands, as `tp 1, dp_shard 0`, nothing where that is not known."""

    parts: tuple[Part, ...]
    shares: tuple[float, ...]
    places: Sequence[str] = ()

    @property
    def fills(self) -> set[str]:
        """Every fill that is used."""
        return {box.fill for part in self.parts for drawing in part.drawings for box in drawing.boxes}


def slice_map(holds: Mapping[str, Mapping[str, Any]], layout: str = "") -> SliceMap | None:
    """`holds`: parameter -> `{"shape": [...], "ranks": [[region, ...] of each rank]}`. None where there is nothing.

    Of the layers that lie alike, the first is drawn."""
    if not holds:
        return None
    world = max(len(each["ranks"]) for each in holds.values())
    drawn = {name: each for name, each in holds.items() if each["shape"]}
    atlas = _Atlas(
        world=world,
        shapes={name: tuple(each["shape"]) for name, each in drawn.items()},
        held={name: holders(each["ranks"]) for name, each in drawn.items()},
    )
    return SliceMap(tuple(atlas.parts()), _shares(holds, world), _places(layout, world))


def _places(text: str, world: int) -> list[str]:
    """`tp 1, dp_shard 0` of each of the first `world` ranks; nothing where the text is no layout of so many."""
    try:
        layout = Layout.parse(text)
        fits = 1 < world <= layout.world
    except (UserError, ValueError):
        return []
    ranks = [layout.coordinates(rank) for rank in range(world if fits else 0)]
    return [", ".join(f"{axis} {place}" for axis, place in found.items()) for found in ranks]


@dataclass(frozen=True)
class _Atlas:
    """Parameters with their shapes, and who holds what of them."""

    world: int
    shapes: Mapping[str, tuple[int, ...]]
    held: Mapping[str, Holders]

    def parts(self) -> list[Part]:
        """Every part of the model, of layers that lie alike the first."""
        parts, layers = _parts(list(self.shapes)), [where for where, _ in _parts(list(self.shapes)) if where]
        one_stack = len({layer.stem for layer in layers}) == 1
        alike: dict[Any, list[tuple[int, tuple[int, ...]]]] = {}  # what a layer looks like -> number and ranks of each
        for where, names in parts:
            if where:
                alike.setdefault(self._looks(where, names), []).append((where.number, self._ranks(names)))
        found, seen = [], 0
        for where, names in parts:
            seen += where is not None
            if where is None:
                title = "" if not layers else "after the layers" if seen else "before the layers"
                found.append(Part(title, self._drawings(names)))
            elif likes := alike.pop(self._looks(where, names), None):
                title = f"layer {where.number}" if one_stack else f"{where.stem}.{where.number}"
                more = [_more(len(names)), _alike(likes, self.world)]
                found.append(Part(title, self._drawings(names)[:PER_LAYER], "; ".join(filter(None, more))))
        return found

    def _ranks(self, names: Sequence[str]) -> tuple[int, ...]:
        """All that hold something of these."""
        return tuple(sorted({rank for name in names for own in self.held[name].values() for rank in own}))

    def _looks(self, where: InLayer, names: Sequence[str]) -> tuple[Any, ...]:
        """Equal for layers that lie alike, though on other ranks (of another pipeline stage)."""
        ranks = self._ranks(names)
        return (where.stem, *((_inner(name), self.shapes[name], _among(ranks, self.held[name])) for name in names))

    def _drawings(self, names: Sequence[str]) -> tuple[Drawing, ...]:
        longest = max(1, *(size for shape in self.shapes.values() for size in shape))
        return tuple(_draw(_inner(n), self.shapes[n], self.held[n], longest, self.world) for n in names)


def holders(ranks: Sequence[Sequence[Sequence[Sequence[int]]]]) -> Holders:
    """Each region that is not empty, with the ranks that hold it."""
    found: dict[Region, list[int]] = {}
    for rank, regions in enumerate(ranks):
        for region in regions:
            key = tuple((start, stop) for start, stop in region)
            if all(stop > start for start, stop in key):
                found.setdefault(key, []).append(rank)
    return {region: tuple(own) for region, own in found.items()}


def _among(ranks: Sequence[int], held: Holders) -> frozenset[tuple[Region, tuple[int, ...]]]:
    """`held`, with the places of its ranks among `ranks`."""
    return frozenset((region, tuple(ranks.index(rank) for rank in own)) for region, own in held.items())


def _parts(names: Sequence[str]) -> list[tuple[InLayer | None, list[str]]]:
    """Names that follow each other, by their layer."""

    def key(name: str) -> tuple[str, int] | None:
        layer = in_layer(name)
        return (layer.stem, layer.number) if layer else None

    return [(in_layer((own := list(run))[0]), own) for _, run in groupby(names, key)]


def _inner(name: str) -> str:
    layer = in_layer(name)
    return ((layer.inner if layer else "") or name).removesuffix(".weight")


def _more(drawings: int) -> str:
    return f"{drawings - PER_LAYER} more parameters are not drawn" if drawings > PER_LAYER else ""


def _alike(layers: Sequence[tuple[int, tuple[int, ...]]], world: int) -> str:
    """`layers 1–3 alike; layers 4–7 alike, on ranks 2,3`."""
    (_, first), *others = layers
    texts = []
    for ranks, run in groupby(others, key=lambda layer: layer[1]):
        numbers = [number for number, _ in run]
        place = "" if ranks == first else f", on rank{'s' * (len(ranks) > 1)} {ranks_text(ranks, world)}"
        texts.append(f"layer{'s' * (len(numbers) > 1)} {ranks_text(numbers, 0)} alike{place}")
    return "; ".join(texts)


def _shares(holds: Mapping[str, Mapping[str, Any]], world: int) -> tuple[float, ...]:
    whole, own = 0, [0] * world
    for each in holds.values():
        whole += _size([(0, size) for size in each["shape"]])
        for rank, regions in enumerate(each["ranks"]):
            own[rank] += sum(_size(region) for region in regions)
    return tuple(100 * size / max(whole, 1) for size in own)


def _size(region: Sequence[Sequence[int]]) -> int:
    size = 1
    for start, stop in region:
        size *= max(stop - start, 0)
    return size


def _draw(name: str, shape: tuple[int, ...], held: Holders, longest: int, world: int) -> Drawing:
    rows, columns = _drawn_dims(shape, held)
    height = BAR if rows is None else _side(shape[rows], longest)
    width = _side(shape[columns], longest)
    boxes = []
    for region, ranks in held.items():
        top, bottom = (0.0, 1.0) if rows is None else (end / shape[rows] for end in region[rows])
        left, right = (end / shape[columns] for end in region[columns])
        x, y, w, h = left * width, top * height, (right - left) * width, (bottom - top) * height
        boxes.append(Box(x, y, w, h, _fill(ranks), _title(ranks, region, world), ranks_text(ranks, world)))
    return Drawing(name, " × ".join(map(str, shape)), width, height, tuple(boxes))


def _drawn_dims(shape: tuple[int, ...], held: Holders) -> tuple[int | None, int]:
    """The dimensions drawn downwards and across: of more than two, those that are cut, else the last."""
    if len(shape) == 1:
        return None, 0
    cut = [dim for dim, size in enumerate(shape) if any(region[dim] != (0, size) for region in held)]
    rest = [dim for dim in reversed(range(len(shape))) if dim not in cut]
    rows, columns = sorted((cut + rest)[:2])
    return rows, columns


def _side(size: int, longest: int) -> float:
    """Pixels of a side: its root, so that a vocabulary does not hide the rest."""
    return round(max(SMALLEST, LARGEST * math.sqrt(size / longest)), 1)


def _fill(ranks: tuple[int, ...]) -> str:
    colours = sorted({rank % COLOURS for rank in ranks})
    if len(ranks) == 1:
        return f"rank-{colours[0]}"
    return f"ranks-{'-'.join(map(str, colours))}" if len(ranks) <= STRIPES else "ranks-many"


def _title(ranks: tuple[int, ...], region: Region, world: int) -> str:
    own = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text(ranks, world)}"
    return f"{own}: [{', '.join(f'{start}:{stop}' for start, stop in region)}]"
