"""Placement of every parameter's parts on the ranks of a layout, and the role of a rank. No torch.

Initialisation, checkpoints, the optimizer, reports and proofs read this description and no other. It costs the same for
a world of 16,384 ranks as for one of two.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from fivefold.core.optimizers import StateDtype, kept_in, state_bytes
from fivefold.core.schedule import balanced
from fivefold.models.facts import ModelFacts
from fivefold.parallel.layout import Layout
from fivefold.parallel.outer.keys import OUTER_NUMBERS
from fivefold.parallel.ranks import RankCoords, RankGrid, ShardIndex
from fivefold.parallel.sharding import Region, ShardSpec, fsdp_rows, local_regions, numel


@dataclass(frozen=True)
class StagePlan:
    """Stages of every module with parameters of its own. Without a pipeline: all of them in the one stage of rank 0.

    `splits`: layers of each stage, first and past the last. `stages_of_module`: the stages that a module is part of.
    """

    layout: Layout
    layers: tuple[str, ...]
    splits: tuple[tuple[int, int], ...]
    stages_of_module: Mapping[str, tuple[int, ...]]

    @property
    def count(self) -> int:
        return len(self.splits)

    def rank_of(self, stage: int) -> int:
        return self.layout.schedule.rank_of(stage, self.layout.pp)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.count) if self.rank_of(stage) == rank)

    def layers_of_stage(self, stage: int) -> tuple[str, ...]:
        return self.layers[slice(*self.splits[stage])]

    def holders(self, name: str) -> tuple[int, ...]:
        """Pipeline ranks that hold a parameter; a tied embedding may have two."""
        return tuple(dict.fromkeys(self.rank_of(stage) for stage in self.users(name)))

    def users(self, name: str) -> tuple[int, ...]:
        """Stages in which a parameter gets a gradient."""
        if self.count == 1:
            return (0,)
        owner = max((module for module in self.stages_of_module if name.startswith(f"{module}.")), key=len)
        return self.stages_of_module[owner]


def stage_plan(facts: ModelFacts, layout: Layout) -> StagePlan:
    """Divide the model into the stages of `layout`, which is legal for it."""
    anatomy = facts.anatomy
    if layout.pp == 1:
        return StagePlan(layout, anatomy.layers, ((0, len(anatomy.layers)),), {})
    count = layout.stages
    splits = tuple(pairwise(accumulate(_split(facts, layout, count), initial=0)))
    stages_of_module: dict[str, tuple[int, ...]] = {}
    for stage, (first, last) in enumerate(splits):
        stages_of_module |= dict.fromkeys(anatomy.layers[first:last], (stage,))
    first_too = (count - 1,) if anatomy.tied else ()
    stages_of_module |= dict.fromkeys(facts.before, (0,)) | dict.fromkeys((*facts.after, anatomy.head), (count - 1,))
    stages_of_module[anatomy.embedding] = (0, *first_too)
    return StagePlan(layout, anatomy.layers, splits, stages_of_module)


def _split(facts: ModelFacts, layout: Layout, count: int) -> tuple[int, ...]:
    """Layers of each stage; `auto` balances the weights that a token is multiplied with, the head's included."""
    if layout.split is not None:
        return layout.split
    costs = tuple(float(cost.active) for cost in facts.layer_costs)
    return balanced(costs, count, last=float(facts.head_cost))


@dataclass(frozen=True)
class Placement:
    """Placement of a model, seen from `rank`.

    `shards`: how each parameter is cut. `stages`: the layers of each pipeline stage. `pp_ranks`: the pipeline ranks
    that hold a parameter or a router's buffer.
    """

    facts: ModelFacts
    layout: Layout
    rank: int
    grid: RankGrid
    shards: Mapping[str, ShardSpec]
    stages: StagePlan
    pp_ranks: Mapping[str, tuple[int, ...]]

    @property
    def world(self) -> int:
        return self.grid.world

    @cached_property
    def coords(self) -> RankCoords:
        return self.grid.coords(self.rank)

    @property
    def data_rank(self) -> int:
        """Number of the share of the rows that this rank reads, of `layout.data_ranks`."""
        return self.coords.dp_replicate * self.layout.dp_shard + self.coords.dp_shard

    @property
    def is_first_of_row(self) -> bool:
        """True on the one rank that counts rows for all ranks that share them."""
        return self.coords.pp == self.coords.cp == self.coords.tp == 0

    @property
    def is_first_copy(self) -> bool:
        """True on the ranks that represent all copies over `dp_replicate`."""
        return self.coords.dp_replicate == 0

    @property
    def is_first_of_stage(self) -> bool:
        """True on the one rank that represents its pipeline rank."""
        return self.rank % (self.world // self.layout.pp) == 0

    @property
    def owns_loss(self) -> bool:
        """True if this rank's loss is counted: every tp rank computes the same, and the first represents them."""
        return self.coords.tp == 0

    @property
    def buffers(self) -> Mapping[str, tuple[int, ...]]:
        """Buffers of routers, with shapes: trained without a gradient, whole on every rank."""
        return self.facts.router_buffers

    @property
    def stored_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors in a checkpoint, parameters and buffers of routers, in the model's order; beside a
        frozen model, of what is trained alone."""
        if self.facts.has_adapter:
            return {name: spec.shape for name, spec in self.shards.items() if self.facts.parameters[name].is_trained}
        return {name: spec.shape for name, spec in self.shards.items()} | dict(self.buffers)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        return tuple(layer for stage in self.own_stages for layer in self.stages.layers_of_stage(stage))

    @cached_property
    def stage_ends(self) -> tuple[frozenset[str], frozenset[str]]:
        """First layers of the stages of this rank, and last ones."""
        own = [self.stages.layers_of_stage(stage) for stage in self.own_stages]
        return frozenset(region[0] for region in own), frozenset(region[-1] for region in own)

    @cached_property
    def own_stages(self) -> tuple[int, ...]:
        return self.stages.stages_of(self.coords.pp)

    @property
    def has_ends(self) -> tuple[bool, bool]:
        """Presence of the first stage on this rank, and of the last one."""
        return 0 in self.own_stages, self.stages.count - 1 in self.own_stages

    def regions(self, name: str, rank: int | None = None) -> list[tuple[Region, Region]]:
        """Pairs (global, local region) of the part of `name` on `rank`; None: this one. A router's buffer is whole."""
        if not self.holds(name, rank):
            return []
        if name in self.buffers:
            whole = tuple(slice(0, size) for size in self.buffers[name])
            return [(whole, whole)]
        index = self.shard_index(name, rank)
        return local_regions(self.shards[name], index.part, index.fsdp_rank, index.fsdp_size)

    def is_owner(self, name: str, *, within_copy: bool = False) -> bool:
        """True on one of the ranks that hold the same values of `name`: it alone counts them in the gradient norm and
        saves them. `within_copy`: on one rank of each copy over `dp_replicate`."""
        if name in self.buffers:
            return self.holds(name) and self.is_first_of_stage
        is_first_end = self.pp_ranks[name][0] == self.coords.pp
        is_counted = within_copy or self.is_first_copy
        return is_first_end and is_counted and self.shards[name].is_owner(self.shard_index(name).part)

    def holds(self, name: str, rank: int | None = None) -> bool:
        """True if parameter or router's buffer `name` is on the pipeline rank of `rank`; None: this rank."""
        return self.grid.coords(self.rank if rank is None else rank).pp in self.pp_ranks[name]

    def shard_index(self, name: str, rank: int | None = None) -> ShardIndex:
        """Part of parameter `name` that a rank has; None: this rank."""
        return self.grid.shard_index(self.rank if rank is None else rank, self.shards[name].over)

    def gathered_shape(self, name: str) -> tuple[int, ...]:
        """Shape of parameter `name` on this rank when FSDP has gathered it."""
        return self.shards[name].local_shape(self.shard_index(name).part)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of this rank's stored part of parameter `name`."""
        shape, index = self.gathered_shape(name), self.shard_index(name)
        first, last = fsdp_rows(shape[0], index.fsdp_rank, index.fsdp_size)
        return (last - first, *shape[1:])

    def held_bytes(self, name: str, itemsize: float) -> int:
        """Bytes of this rank's part of a parameter, with `itemsize` bytes a number."""
        regions = [local_region for _, local_region in self.regions(name)]
        return int(sum(map(numel, regions)) * itemsize)

    def kept_in(self, name: str) -> StateDtype:
        spec = self.shards[name]
        return kept_in(self.layout.state_dtype, spec.shape, spec.dims)

    def state_bytes(self, name: str, master_bytes: int) -> int:
        """Bytes of this rank's part of one kind of the optimizer's state of a parameter."""
        return self._state_bytes(name, self.held_bytes(name, 1), master_bytes)

    def checkpoint_bytes(self, kept: Iterable[str], master_bytes: int) -> int:
        """Bytes of a checkpoint, of each replica that trains apart. `kept`: the parameter of each tensor of state."""
        weights = sum(map(prod, self.stored_shapes.values())) * master_bytes
        in_all = weights + sum(self._state_bytes(name, prod(self.shards[name].shape), master_bytes) for name in kept)
        copies = self.grid.layout.copies_apart
        return in_all if copies == 1 else OUTER_NUMBERS * weights + copies * in_all

    def _state_bytes(self, name: str, numbers: int, master_bytes: int) -> int:
        width = (self.shards[name].shape or (1,))[-1]
        return state_bytes(numbers, self.kept_in(name), width, master_bytes)

    @cached_property
    def block_matrices(self) -> tuple[str, ...]:
        """Trained parameters of the layers, of all ranks, that are one matrix each: those that Muon updates."""
        blocks = tuple(f"{name}." for name in self.facts.anatomy.layers)
        return tuple(
            name
            for name, spec in self.shards.items()
            if spec.is_matrix and name.startswith(blocks) and self.facts.parameters[name].is_trained
        )

    def rests_in(self, name: str, master_bytes: int) -> float:
        """Bytes per number of a stored parameter: of its packing, compute dtype if frozen, else `master_bytes`."""
        if packing := self.facts.parameters[name].packing:
            return packing.size / packing.block
        return self.layout.compute_bytes if self.rests_as_computed(name) else master_bytes

    def rests_as_computed(self, name: str) -> bool:
        """True if a parameter is stored in its compute dtype: one that is frozen for an adapter."""
        return self.facts.has_adapter and not self.facts.parameters[name].is_trained

    def by_rank(self, most: int = 64) -> dict[str, dict[str, Any]]:
        """Shape of every parameter, and its regions on each of the first `most` ranks: for a map."""
        ranks = range(min(self.world, most))
        regions = {name: [[region for region, _ in self.regions(name, rank)] for rank in ranks] for name in self.shards}
        return {
            name: {
                "shape": list(self.shards[name].shape),
                "ranks": [[[[s.start, s.stop] for s in region] for region in own] for own in by_rank],
            }
            for name, by_rank in regions.items()
        }
