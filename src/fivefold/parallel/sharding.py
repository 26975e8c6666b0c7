"""Which part of each parameter a rank holds: the one description that init, load, save and verify read.

Tensor parallelism cuts a parameter along one dimension into blocks chosen by its role (whole heads, vocabulary
rows, features), expert parallelism along the experts, and along their features as well with `expert_tp`; FSDP then cuts
the local result along dimension 0. A `ShardSpec` says the first, `local_regions` adds the second and answers in global
coordinates.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Literal

Block = tuple[int, int]  # [start, stop) along the sharded dimension, global coordinates
Blocks = tuple[Block, ...]  # of one rank, in local order
Region = tuple[slice, ...]
Over = Literal["tp", "ep"]  # the ranks that the blocks of a parameter go to


@dataclass(frozen=True)
class Place:
    """Where a rank of the world stands: its pipeline rank, its full copy of the model, its FSDP shard (dp_shard x cp),
    its tensor parallel rank."""

    pp: int
    replica: int
    fsdp: int
    tp: int


@dataclass(frozen=True)
class Cut:
    """Which part of a parameter a rank has: `part` of those that its blocks are dealt to, then FSDP's `row` of `rows`
    along dimension 0 of that."""

    part: int
    row: int
    rows: int


@dataclass(frozen=True)
class Split:
    """A cut along dimension `dim`: `blocks[p]` are what part p holds of it, in local order."""

    dim: int
    blocks: tuple[Blocks, ...]


@dataclass(frozen=True)
class ShardSpec:
    """How tensor (or expert) parallelism cuts one parameter.

    There are `parts` of it, dealt to the ranks of `over` in their order (`Mesh.cut`): the product of the blocks that
    each split gives a part, and all of every other dimension. Several parts may be the same (key/value heads fewer than
    tp); without splits, each is the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    splits: tuple[Split, ...]
    parts: int
    over: Over = "tp"

    @classmethod
    def along(cls, name: str, shape: Sequence[int], dim: int, blocks: Sequence[Blocks]) -> "ShardSpec":
        """A parameter that is cut along one dimension over tp."""
        return cls(name, tuple(shape), (Split(dim, tuple(blocks)),), len(blocks))

    def local_shape(self, part: int) -> tuple[int, ...]:
        """Shape of a part, before FSDP."""
        return tuple(sum(stop - start for start, stop in blocks) for blocks in self.held[part])

    def is_owner(self, part: int) -> bool:
        """True on the first of the parts that hold the same values: who counts it in the norm, who saves it."""
        return self.held.index(self.held[part]) == part

    @cached_property
    def held(self) -> tuple[tuple[Blocks, ...], ...]:
        """For each part and each dimension, the blocks of it."""
        cut = {split.dim: split.blocks for split in self.splits}
        by_dim = [cut.get(dim, (((0, size),),) * self.parts) for dim, size in enumerate(self.shape)]
        return tuple(tuple(blocks[part] for blocks in by_dim) for part in range(self.parts))

    @property
    def dims(self) -> int:
        """Dimensions of what it is to the model: those of one expert, where all of a layer's are kept as one."""
        return len(self.shape) - (self.over == "ep")

    @property
    def is_matrix(self) -> bool:
        """Whether it is one matrix (and not as many as there are experts)."""
        return self.over == "tp" and self.dims == 2

    @property
    def replicas(self) -> int:
        """How many parts hold the same values."""
        return self.parts // len(set(self.held))


def whole(name: str, shape: Sequence[int], tp: int) -> ShardSpec:
    """A parameter that every tp rank holds in full."""
    return ShardSpec(name, tuple(shape), (), tp)


def split_even(size: int, parts: int) -> tuple[Block, ...]:
    """`size` items over `parts` ranks as evenly as possible, the longer pieces first (prime sizes are fine)."""
    short, longer = divmod(size, parts)
    edges = [rank * short + min(rank, longer) for rank in range(parts + 1)]
    return tuple(pairwise(edges))


def fsdp_rows(rows: int, rank: int, size: int) -> Block:
    """Rows of a local tensor that FSDP rank `rank` of `size` holds: `torch.chunk`'s rule, the one FSDP2 uses."""
    chunk = -(-rows // size)
    start = min(rank * chunk, rows)
    return start, min(start + chunk, rows)


def local_regions(spec: ShardSpec, part: int, fsdp_rank: int, fsdp_size: int) -> list[tuple[Region, Region]]:
    """Pairs (global region, region of this rank's local tensor) that together make up the local tensor.

    Empty when FSDP leaves this rank no rows.
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
    """Where each block lies in the whole dimension, and in the local one."""
    offset = 0
    for start, stop in blocks:
        yield slice(start, stop), slice(offset, offset + stop - start)
        offset += stop - start


def _clipped(located: Iterable[tuple[slice, slice]], first: int, last: int) -> Iterator[tuple[slice, slice]]:
    """What of these lies in the local rows [first, last), in which they are counted from there."""
    for of_whole, of_local in located:
        low, high = max(of_local.start, first), min(of_local.stop, last)
        if low < high:
            shift = of_whole.start - of_local.start
            yield slice(low + shift, high + shift), slice(low - first, high - first)
