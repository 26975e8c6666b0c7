"""The part of each parameter that a rank holds: the one description that init, load, save and verify read.

A parameter is cut twice. First, tensor parallelism cuts it along one dimension into blocks by its role (whole heads,
vocabulary rows, features); expert parallelism cuts along the experts, and with `expert_tp` along their features too. A
`ShardSpec` describes this first cut. Second, FSDP cuts the local result along dimension 0. `local_regions` applies both
and answers in global coordinates.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

from fivefold.parallel.ranks import Blocks, Over

Block = tuple[int, int]  # [start, stop) along the sharded dimension, global coordinates
Region = tuple[slice, ...]


@dataclass(frozen=True)
class Split:
    """A cut along dimension `dim`: part p holds the blocks `blocks[p]`, in local order.

    Example: 6 rows over tp2, where rank 0 has rows 0, 1 and 4 and rank 1 the others:
    `Split(0, (((0, 2), (4, 5)), ((2, 4), (5, 6))))`.
    """

    dim: int
    blocks: tuple[Blocks, ...]


@dataclass(frozen=True)
class ShardSpec:
    """Cut of one parameter by tensor (or expert) parallelism.

    The parameter has `parts` parts. Part p goes to rank p of the axis `over` (`RankGrid.shard_index`). A part is the
    product of its blocks along each split dimension, and all of every other dimension. Several parts may be equal: with
    2 key/value heads and tp4, parts 0 and 1 are head 0, parts 2 and 3 head 1. Without splits every part is the whole
    parameter.
    """

    name: str
    shape: tuple[int, ...]
    splits: tuple[Split, ...]
    parts: int
    over: Over = "tp"

    @classmethod
    def along(cls, name: str, shape: Sequence[int], dim: int, blocks: Sequence[Blocks]) -> "ShardSpec":
        return cls(name, tuple(shape), (Split(dim, tuple(blocks)),), len(blocks))

    def local_shape(self, part: int) -> tuple[int, ...]:
        """Shape of a part, before FSDP."""
        return tuple(sum(stop - start for start, stop in blocks) for blocks in self.held[part])

    def is_owner(self, part: int) -> bool:
        """True for the first of several equal parts: its rank alone counts the values in the norm and saves them."""
        return self.held.index(self.held[part]) == part

    @cached_property
    def held(self) -> tuple[tuple[Blocks, ...], ...]:
        """`held[part][dim]`: the blocks of a part along a dimension."""
        cut = {split.dim: split.blocks for split in self.splits}
        by_dim = [cut.get(dim, (((0, size),),) * self.parts) for dim, size in enumerate(self.shape)]
        return tuple(tuple(blocks[part] for blocks in by_dim) for part in range(self.parts))

    def cuts(self, block: int) -> bool:
        """True if parts separate the numbers of a block, which are neighbours in a row."""
        return any(edge % block for part in self.held for bounds in part[-1] for edge in bounds)

    @property
    def dims(self) -> int:
        """Dimensions of the matrix or vector that the model means: experts [E, O, I] are matrices, so 2."""
        return len(self.shape) - (self.over == "ep")

    @property
    def is_matrix(self) -> bool:
        """True if the parameter is one matrix. (Experts [E, O, I] are E matrices.)"""
        return self.over == "tp" and self.dims == 2

    @property
    def replicas(self) -> int:
        """Number of parts that hold the same values."""
        return self.parts // len(set(self.held))


def split_even(size: int, parts: int) -> tuple[Block, ...]:
    """Split `size` items over `parts` ranks as evenly as possible, the longer pieces first (prime sizes are fine)."""
    short, longer = divmod(size, parts)
    edges = [rank * short + min(rank, longer) for rank in range(parts + 1)]
    return tuple(pairwise(edges))


def fsdp_rows(rows: int, rank: int, size: int) -> Block:
    """Rows of a local tensor that FSDP rank `rank` of `size` holds: `torch.chunk`'s rule, the one FSDP2 uses."""
    chunk = -(-rows // size)
    start = min(rank * chunk, rows)
    return start, min(start + chunk, rows)


def numel(region: Region) -> int:
    return prod(edge.stop - edge.start for edge in region)


def local_regions(spec: ShardSpec, part: int, fsdp_rank: int, fsdp_size: int) -> list[tuple[Region, Region]]:
    """Pairs (global region, region of this rank's local tensor) that together make up the local tensor.

    Example: a [6, 4] weight split over tp2 along dimension 0 into rows 0 to 3 and 3 to 6, part 1, FSDP rank 0 of 2.
    Rank 0 keeps 2 of the 3 local rows: the one pair is ((rows 3 to 5, columns 0 to 4), (rows 0 to 2, columns 0 to 4)).
    The list is empty when FSDP leaves this rank no rows.
    """
    if not spec.shape:  # a scalar: FSDP keeps it on rank 0 as one row
        return [((), ())]
    rows = spec.local_shape(part)[0]
    first, last = fsdp_rows(rows, fsdp_rank, fsdp_size)
    if first == last:
        return []
    by_dim = [list(_located(blocks)) for blocks in spec.held[part]]
    by_dim[0] = list(_clipped(by_dim[0], first, last))
    return [tuple(zip(*located, strict=True)) for located in product(*by_dim)]


def _located(blocks: Iterable[Block]) -> Iterator[tuple[slice, slice]]:
    """Locate each block in the whole dimension, and in the local one."""
    offset = 0
    for start, stop in blocks:
        yield slice(start, stop), slice(offset, offset + stop - start)
        offset += stop - start


def _clipped(located: Iterable[tuple[slice, slice]], first: int, last: int) -> Iterator[tuple[slice, slice]]:
    """The parts of the blocks inside local rows [first, last). Local rows are then counted from `first`."""
    for of_whole, of_local in located:
        low, high = max(of_local.start, first), min(of_local.stop, last)
        if low < high:
            shift = of_whole.start - of_local.start
            yield slice(low + shift, high + shift), slice(low - first, high - first)


# ---- tensors with one number per block of a row ----------------------------------------------------------------------


def numbers_each(shape: Sequence[int], of: Sequence[int], *, is_scale: bool) -> int:
    """Number of neighbours in a row of the shape `of` that share a number of a tensor of `shape`: 1 for equal shapes,
    more for scales, and 0 for all others. Example: scales [8, 4] of [8, 64] are one for each 16."""
    if tuple(shape) == tuple(of):
        return 1
    return of[-1] // shape[-1] if is_scale and shape[-1] else 0


def by_block(shape: Sequence[int], length: int) -> tuple[int, ...]:
    """Shape of a tensor that has one number for each `length` of a row."""
    return (*shape[:-1], shape[-1] // length) if length > 1 else tuple(shape)


def regions_by_block(pairs: Iterable[tuple[Region, Region]], length: int) -> list[tuple[Region, Region]]:
    """Convert the pairs of `local_regions` to such a tensor."""
    return [(_by_block(whole, length), _by_block(here, length)) for whole, here in pairs]


def _by_block(region: Region, length: int) -> Region:
    return (*region[:-1], slice(region[-1].start // length, region[-1].stop // length)) if length > 1 else region
