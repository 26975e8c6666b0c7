"""Which part of each parameter a rank holds: the one description that init, load, save and verify read.

Tensor parallelism cuts a parameter along one dimension into blocks chosen by its role (whole heads, vocabulary
rows, features); FSDP then cuts the local result along dimension 0. A `ShardSpec` says the first, `local_regions`
adds the second and answers in global coordinates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Block = tuple[int, int]  # [start, stop) along the sharded dimension, global coordinates
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
class ShardSpec:
    """How tensor (or expert) parallelism cuts one parameter.

    `blocks[r]` are the blocks along `dim` that rank r of `over` holds, in local order; several ranks may hold the same
    blocks (key/value heads fewer than tp). `dim` None: every rank holds the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    blocks: tuple[tuple[Block, ...], ...]
    over: Over = "tp"

    def local_shape(self, tp_rank: int) -> tuple[int, ...]:
        """Shape of the slice that tp rank `tp_rank` holds, before FSDP."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] = sum(stop - start for start, stop in self.blocks[tp_rank])
        return tuple(shape)

    def is_owner(self, tp_rank: int) -> bool:
        """True on the first of the ranks that hold the same values: who counts it in the norm, who saves it."""
        return self.blocks.index(self.blocks[tp_rank]) == tp_rank

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
        """How many tp ranks hold the same values."""
        return len(self.blocks) // len(set(self.blocks))


def whole(name: str, shape: Sequence[int], tp: int) -> ShardSpec:
    """A parameter that every tp rank holds in full."""
    return ShardSpec(name, tuple(shape), None, ((),) * tp)


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


def local_regions(spec: ShardSpec, tp_rank: int, fsdp_rank: int, fsdp_size: int) -> list[tuple[Region, Region]]:
    """Pairs (global region, region of this rank's local tensor) that together make up the local tensor.

    Empty when FSDP leaves this rank no rows.
    """
    local_shape = spec.local_shape(tp_rank)
    if not local_shape:  # a scalar: FSDP keeps it on rank 0 as one row
        return [((), ())]
    first, last = fsdp_rows(local_shape[0], fsdp_rank, fsdp_size)
    if first == last:
        return []
    pairs = []
    for start, stop, offset in _located(spec, tp_rank):
        global_region = [slice(0, size) for size in spec.shape]
        local_region = [slice(0, size) for size in (last - first, *local_shape[1:])]
        if spec.dim == 0:
            low, high = max(offset, first), min(offset + stop - start, last)
            if low >= high:
                continue
            global_region[0] = slice(start + low - offset, start + high - offset)
            local_region[0] = slice(low - first, high - first)
        else:
            global_region[0] = slice(first, last)
            if spec.dim is not None:
                global_region[spec.dim] = slice(start, stop)
                local_region[spec.dim] = slice(offset, offset + stop - start)
        pairs.append((tuple(global_region), tuple(local_region)))
    return pairs


def _located(spec: ShardSpec, tp_rank: int) -> list[tuple[int, int, int]]:
    """Blocks of a tp rank as (start, stop, offset in the local tensor)."""
    if spec.dim is None:
        return [(0, spec.shape[0], 0)]
    located, offset = [], 0
    for start, stop in spec.blocks[tp_rank]:
        located.append((start, stop, offset))
        offset += stop - start
    return located
