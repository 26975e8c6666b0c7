"""The ranks of a layout as arithmetic: the coordinates of a rank, the members of its groups, its shards and tokens.

No torch and no tensors of the world: a grid of 16,384 ranks costs as much as one of two. The world is its ranks in
order, with the axes of `MESH_AXES`, the last one innermost. Along an axis, neighbours of a group are a fixed `stride`
apart, so that size and stride say everything. In `pp2.shard2.tp2`, of 8 ranks:

    axis       size  stride  the group of rank 5
    pp         2     4       1, 5
    dp_shard   2     2       5, 7
    tp         2     1       4, 5
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from fivefold.parallel.layout import MESH_AXES, Layout

Blocks = tuple[tuple[int, int], ...]  # [start, stop) of tokens of a row, in the order that a rank holds them
Tokens = tuple[Blocks, ...]  # of every rank of a ring
Over = Literal["tp", "ep"]  # the ranks that get the blocks of a parameter
APART = ("tp_kv", "pp_ends")  # axes with a group of their own even if it spans the world


@dataclass(frozen=True)
class RankCoords:
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


@dataclass(frozen=True)
class ShardIndex:
    """The shard of a parameter on a rank: `part` of its `ShardSpec`, and of that, along dimension 0, its FSDP shard."""

    part: int
    fsdp_rank: int
    fsdp_size: int


@dataclass(frozen=True)
class Axis:
    """The groups of an axis: `size` ranks each, `stride` apart."""

    size: int
    stride: int

    def index(self, rank: int) -> int:
        return rank // self.stride % self.size

    def members(self, rank: int) -> tuple[int, ...]:
        """Ranks of the group of `rank`, itself included, in order."""
        first = rank - self.index(rank) * self.stride
        return tuple(range(first, first + self.size * self.stride, self.stride))

    def groups(self, world: int) -> Iterator[tuple[int, ...]]:
        return (self.members(rank) for rank in range(world) if self.index(rank) == 0)


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a layout, and what a model adds to them.

    `kv_copies`: neighbouring tp ranks that share the same key/value heads. `has_experts`: the model has some.
    `embedding_ranks`: the pipeline ranks that hold a tied embedding. `ulysses`: neighbours within cp that exchange
    heads; the other ranks of cp are rings.
    """

    layout: Layout
    kv_copies: int = 1
    has_experts: bool = False
    embedding_ranks: tuple[int, ...] = ()
    ulysses: int = 1

    @property
    def world(self) -> int:
        return self.layout.world

    # ---- one rank ----------------------------------------------------------------------------------------------------

    def coords(self, rank: int) -> RankCoords:
        at = {}
        for axis in reversed(MESH_AXES):
            rank, at[axis] = divmod(rank, getattr(self.layout, axis))
        return RankCoords(**at)

    # ---- parts of a parameter ----------------------------------------------------------------------------------------

    def shard_index(self, rank: int, over: Over) -> ShardIndex:
        """Part that a rank has of a parameter whose blocks go to the ranks of `over`.

        The ranks of `ep` are consecutive in the order (dp_shard, cp, tp), and FSDP shards over the rest. With
        `expert_tp`, tp is the innermost index. Under `shard4.tp2.ep4`, rank 5 has experts' part 1 (5 % 4), and FSDP
        shard 1 of 2 of that.
        """
        layout = self.layout
        inner = rank % (self.fsdp_size * layout.tp)  # within one copy of one stage
        if over == "tp":
            return ShardIndex(inner % layout.tp, inner // layout.tp, self.fsdp_size)
        fsdp_rank, part = divmod(inner, layout.ep * layout.etp)
        return ShardIndex(part, fsdp_rank, layout.expert_shards)

    @property
    def fsdp_size(self) -> int:
        """Number of ranks that FSDP shards over: dp_shard x cp."""
        return self.layout.dp_shard * self.layout.cp

    def fsdp_shards(self, over: Over) -> int:
        """Number of ranks over which FSDP shards a parameter of `over`."""
        return self.axes[self.fsdp_axis(over)].size

    def fsdp_axis(self, over: Over) -> str:
        """Axis over which FSDP shards a parameter of `over`."""
        return "ep_shard" if over == "ep" and self.experts_apart else "dp_shard"

    def node_axis(self, over: Over) -> str:
        """Axis of the ranks of a node among those over which FSDP shards a parameter of `over`."""
        return "ep_node" if over == "ep" and self.experts_apart else "node"

    def across_axis(self, over: Over) -> str:
        """Axis of the ranks with the same place in each node (`layout.hierarchical`)."""
        return "ep_nodes" if over == "ep" and self.experts_apart else "nodes"

    @property
    def experts_apart(self) -> bool:
        """True if FSDP shards experts over other ranks than the other parameters."""
        return self.has_experts and (self.layout.ep > 1 or self.layout.etp != self.layout.tp)

    # ---- groups ------------------------------------------------------------------------------------------------------

    def size(self, axis: str) -> int:
        """Number of ranks of an axis, or of the world; 1 for an axis without groups."""
        named = {"world": self.world, "pp_ends": max(1, len(self.embedding_ranks))}
        return named[axis] if axis in named else self.axes[axis].size if axis in self.axes else 1

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """Axes that have groups: those of several ranks, `dp_shard` (with cp), and `ep_shard` if experts are apart.

        `pp_ends` is not among them: see `members`.
        """
        layout = self.layout
        tp, cp, shard = layout.tp, layout.cp, layout.dp_shard
        replica = shard * cp * tp  # ranks of one copy of one stage
        found = {
            "pp": Axis(layout.pp, layout.dp_replicate * replica),
            "dp_replicate": Axis(layout.dp_replicate, replica),
            "cp": Axis(cp, tp),
            "tp": Axis(tp, 1),
            "tp_kv": Axis(self.kv_copies, 1),
        }
        if 1 < self.ulysses < cp:
            found |= {"cp_ring": Axis(cp // self.ulysses, tp * self.ulysses), "cp_ulysses": Axis(self.ulysses, tp)}
        if self.experts_apart:
            found["ep"] = Axis(layout.ep, layout.etp)
        if layout.node_ranks:
            found |= self._node_axes("", shard * cp, tp)
        if layout.node_ranks and self.experts_apart:
            found |= self._node_axes("ep_", layout.expert_shards, layout.ep * layout.etp)
        found = {name: axis for name, axis in found.items() if axis.size > 1}
        found["dp_shard"] = Axis(shard * cp, tp)
        if self.experts_apart:
            found["ep_shard"] = Axis(layout.expert_shards, layout.ep * layout.etp)
        return found

    def _node_axes(self, prefix: str, shards: int, stride: int) -> dict[str, Axis]:
        """Axes of two levels of FSDP's ranks. Where a node has one of them, all are on one level."""
        inside = self.layout.node_ranks * self.layout.tp // stride
        found = {f"{prefix}node": Axis(inside, stride)}
        if self.layout.hierarchical and inside > 1:
            found[f"{prefix}nodes"] = Axis(shards // inside, stride * inside)
        return found

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Axes that have groups, in the order in which these are made."""
        return (*self.axes, *(("pp_ends",) if len(self.embedding_ranks) > 1 else ()))

    def members(self, axis: str, rank: int) -> tuple[int, ...]:
        """Ranks of the group of `rank` along an axis; none if it is in no group of it.

        The group of `pp_ends` holds the ranks of a tied embedding: in `pp4.tp2`, with stages 0 and 3, rank 1 and 7.
        """
        if axis != "pp_ends":
            return self.axes[axis].members(rank)
        of_stage = self.world // self.layout.pp
        stage, rest = divmod(rank, of_stage)
        return tuple(pp * of_stage + rest for pp in self.embedding_ranks) if stage in self.embedding_ranks else ()

    def first_of_row(self, data_rank: int) -> int:
        """First of the ranks that read the rows of a data rank. Example: in `dp_shard2.tp2.pp2`, 0 and 2."""
        return data_rank * self.layout.tp * self.layout.cp

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        if axis != "pp_ends":
            return self.axes[axis].groups(self.world)
        of_stage = self.world // self.layout.pp
        return (self.members(axis, self.embedding_ranks[0] * of_stage + rest) for rest in range(of_stage))

    def spans_world(self, axis: str) -> bool:
        """True if the one group of an axis is the whole world: then it is the world's own group."""
        return self.world > 1 and axis not in APART and self.axes[axis].size == self.world

    # ---- tokens of a row ---------------------------------------------------------------------------------------------

    def tokens(self, rank: int, length: int, *, sequence_parallel: bool) -> Blocks:
        """Tokens of a row of `length` whose hidden states a rank has."""
        coords, layout = self.coords(rank), self.layout
        return row_blocks(length, layout.cp, coords.cp, *((layout.tp, coords.tp) if sequence_parallel else ()))


def row_blocks(length: int, cp: int, cp_rank: int, tp: int = 1, tp_rank: int = 0) -> Blocks:
    """Tokens of a row of `length` that a rank has, in its order. Runtime and proof both read this description.

    Rank r of cp has chunks r and 2 cp - 1 - r of the 2 cp equal chunks of a row, which makes causal attention equal
    work for all: for 16 tokens over two ranks, the first has (0, 4) and (12, 16). With sequence parallelism the ranks
    of `tp` have equal parts of their cp rank's tokens, in order.
    """
    share, chunk, mirrored = length // (cp * tp), length // (2 * cp), 2 * cp - 1 - cp_rank
    chunks = [(cp_rank * chunk, (cp_rank + 1) * chunk), (mirrored * chunk, (mirrored + 1) * chunk)]
    own = joined(chunks) if cp > 1 else ((0, length),)
    return narrowed(own, tp_rank * share, (tp_rank + 1) * share)


@lru_cache(maxsize=64)
def tokens_by_rank(length: int, cp: int, tp: int = 1) -> Tokens:
    """`row_blocks` of each rank of cp, and within it of tp."""
    return tuple(row_blocks(length, cp, cp_rank, tp, tp_rank) for cp_rank in range(cp) for tp_rank in range(tp))


def joined(blocks: Iterable[tuple[int, int]]) -> Blocks:
    """Join neighbouring blocks, and drop empty ones."""
    found: list[tuple[int, int]] = []
    for start, stop in blocks:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def narrowed(blocks: Blocks, first: int, last: int) -> Blocks:
    """Cut places [first, last) out of the tokens that the blocks hold one after the other."""
    found, at = [], 0
    for start, stop in blocks:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
        at += stop - start
    return tuple(found)
