"""The rule by which a tensor is cut into slices, and which rank wrote which, to which file. No torch.

Under `shard16384` a matrix has as many slices as rows. No list of them is kept: a `TensorCut` says in a line how they
lie, and `Tiles` finds those in a region, or those of a rank, by arithmetic. The rule is that of `parallel/sharding.py`,
without the layout behind it:

    parts   neighbouring ranks. Part p holds the blocks `blocks[p]` of each dimension in `splits`, and all of the
            others. Only the first of several equal parts is written
    shards  the rows of a part, counted over its blocks, go to so many shards in order, `ceil(rows / shards)` to each
    place   s x parts + p, of shard s of part p. Its rank is the tensor's first rank plus this number
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import prod

from fivefold.parallel.placement import Placement
from fivefold.parallel.sharding import Block, Region, ShardSpec, Split, local_regions

Box = tuple[Block, ...]  # [start, stop) in each dimension of a tensor
WEIGHT, OPTIMIZER = "weight", "optimizer"  # how the names of a rank's files begin; the first is a kind of tensors, too
MOST_PARTS = 2**20  # no manifest makes its reader list more


@dataclass(frozen=True)
class TensorCut:
    """How a tensor is cut: see the top of this file. By default it is whole, on one rank."""

    parts: int = 1
    shards: int = 1
    splits: tuple[Split, ...] = ()


def family_of(kind: str) -> str:
    """How the names of the files with a kind of tensors begin."""
    return WEIGHT if kind == WEIGHT else OPTIMIZER


def file_of(kind: str, rank: int) -> str:
    """The file in which a rank keeps its slices of a kind of tensors."""
    return f"{family_of(kind)}-{rank:05d}.safetensors"


def key_of(kind: str, name: str, where: Box) -> str:
    """The key of a slice in its file: it identifies the tensor and the range, so that a misplaced one is detected."""
    return f"{kind}:{name}[{','.join(f'{start}:{stop}' for start, stop in where)}]"


def placed(placement: Placement, name: str, rank: int | None = None, *, length: int = 1) -> tuple[TensorCut, int]:
    """The cut of a parameter over the copy that `rank` is in (None: this rank), and the first rank of that copy.
    `length`: numbers of a row that share one of the tensor's (`regions_by_block`)."""
    spec, index = placement.shards[name], placement.shard_index(name, rank)
    splits = tuple(_by_block(split, length) if split.dim == len(spec.shape) - 1 else split for split in spec.splits)
    place = index.fsdp_rank * spec.parts + index.part
    return TensorCut(spec.parts, index.fsdp_size, splits), (placement.rank if rank is None else rank) - place


def _by_block(split: Split, length: int) -> Split:
    blocks = (tuple((start // length, stop // length) for start, stop in part) for part in split.blocks)
    return replace(split, blocks=tuple(blocks))


@lru_cache(maxsize=1024)
def tiles(shape: tuple[int, ...], cut: TensorCut) -> "Tiles":
    """The slices of a tensor of `shape`. Raises `ValueError` unless each element is in one of them."""
    return Tiles(shape, cut)


class Tiles:
    """The slices of one shape under one cut. Tensors that are cut alike share it (`tiles`)."""

    def __init__(self, shape: tuple[int, ...], cut: TensorCut) -> None:
        _check(shape, cut)
        self._shape, self._cut = shape, cut
        self._spec = ShardSpec("", shape, cut.splits, cut.parts)
        first: dict[object, int] = {}
        for part, blocks in enumerate(self._spec.held):
            first.setdefault(blocks, part)
        self._owners = frozenset(first.values())
        self._blocks = [_Blocks(split, self._owners) for split in cut.splits]
        self._check_cover()

    def boxes(self, place: int) -> tuple[Box, ...]:
        """The slices of the rank at `place`; none beside the cut, or for what another rank writes."""
        shard, part = divmod(place, self._cut.parts)
        if part not in self._owners or not 0 <= shard < self._used(part):
            return ()
        return tuple(box(region) for region, _ in local_regions(self._spec, part, shard, self._cut.shards))

    def places(self) -> Iterator[range]:
        parts = self._cut.parts
        return (range(part, part + parts * self._used(part), parts) for part in sorted(self._owners))

    @property
    def first(self) -> int | None:
        """The first place that has a slice; None for a tensor without elements."""
        return min((places[0] for places in self.places() if places), default=None)

    def overlapping(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        """The slices that share elements with a region, and their places."""
        found = [blocks.overlapping(wanted) for blocks in self._blocks]
        for part in sorted(self._owners.intersection(*found)):
            for shard in self._shards(part, wanted):
                place = shard * self._cut.parts + part
                yield from ((place, own) for own in self.boxes(place) if meet(own, wanted))

    def _shards(self, part: int, wanted: Box) -> list[int]:
        """The shards of a part that hold some of the wanted rows."""
        if not self._shape:
            return [0]
        found, at, rows = set[int](), 0, self._chunk(part)
        for start, stop in self._spec.held[part][0]:
            low, high = max(start, wanted[0][0]), min(stop, wanted[0][1])
            if low < high:
                found.update(range((at + low - start) // rows, (at + high - start - 1) // rows + 1))
            at += stop - start
        return sorted(found)

    def _used(self, part: int) -> int:
        """The number of shards of a part that have rows."""
        return -(-self._spec.local_shape(part)[0] // (self._chunk(part) or 1)) if self._shape else 1

    def _chunk(self, part: int) -> int:
        """The rows of each shard of a part, but the last."""
        return -(-self._spec.local_shape(part)[0] // self._cut.shards)

    def _check_cover(self) -> None:
        """Parts hold whole blocks, which are the same or apart: two parts overlap if they share a block in each split
        dimension. Shards divide a part by construction."""
        cells = [cell for part in self._owners for cell in product(*(split.blocks[part] for split in self._cut.splits))]
        cells = [cell for cell in cells if all(start < stop for start, stop in cell)]
        if len(set(cells)) < len(cells):
            raise ValueError("parts that overlap")
        if sum(prod(self._spec.local_shape(part)) for part in self._owners) != prod(self._shape):
            raise ValueError(f"its parts do not add up to {list(self._shape)}")


class _Blocks:
    """The blocks along one dimension in order, and who holds each."""

    def __init__(self, split: Split, owners: Iterable[int]) -> None:
        held: dict[Block, list[int]] = {}
        for part in owners:
            for block in split.blocks[part]:
                if block[0] < block[1]:
                    held.setdefault(block, []).append(part)
        self._dim, ordered = split.dim, sorted(held)
        if any(one[1] > other[0] for one, other in pairwise(ordered)):
            raise ValueError(f"blocks of dimension {split.dim} that overlap")
        self._starts, self._stops = ([block[side] for block in ordered] for side in (0, 1))
        self._parts = [held[block] for block in ordered]

    def overlapping(self, wanted: Box) -> set[int]:
        """The parts with a block that overlaps a region."""
        start, stop = wanted[self._dim]
        here = self._parts[bisect_right(self._stops, start) : bisect_left(self._starts, stop)]
        return {part for parts in here for part in parts}


def _check(shape: Sequence[int], cut: TensorCut) -> None:
    """Check that the numbers of a cut are those of one."""
    dims = [split.dim for split in cut.splits]
    if not (0 < cut.parts <= MOST_PARTS and cut.shards > 0 and len({*dims}) == len(dims)):
        raise ValueError(f"a cut into {cut.parts} parts and {cut.shards} shards along dimensions {dims}")
    for split in cut.splits:
        if not 0 <= split.dim < len(shape) or len(split.blocks) != cut.parts:
            raise ValueError(f"a split of dimension {split.dim} into {len(split.blocks)} parts")
        if any(not 0 <= start <= stop <= shape[split.dim] for blocks in split.blocks for start, stop in blocks):
            raise ValueError(f"a block that leaves dimension {split.dim}")


def box(region: Region) -> Box:
    return tuple((edge.start, edge.stop) for edge in region)


def meet(one: Box, other: Box) -> bool:
    return all(max(start, at) < min(stop, end) for (start, stop), (at, end) in zip(one, other, strict=True))
