"""Who holds what: how a model lies over the current world, as `parallelize` leaves it at `model.fivefold`.

Every reader of a layout's facts (fill, checkpoint, optimizer, verify, report) asks this record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fivefold.core.layout import Layout
from fivefold.models.anatomy import Anatomy
from fivefold.models.partition import Partition
from fivefold.models.sources import TensorSource
from fivefold.parallel import balance as balancing
from fivefold.parallel import context, data, expert, loss, pipeline, tensor
from fivefold.parallel.collectives import Collective, StepShape, total
from fivefold.parallel.compiled import Compiled
from fivefold.parallel.dtensor import local
from fivefold.parallel.guard import Guard
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.sharding import Cut, Region, ShardSpec, fsdp_rows, local_regions


@dataclass(frozen=True)
class Spread:
    """The folds of one parallelized model, seen from this rank."""

    layout: Layout
    mesh: Mesh
    anatomy: Anatomy
    partition: Partition | None  # None without tensor parallelism
    shards: dict[str, ShardSpec]
    units: tuple[data.Unit, ...]
    tensor: tensor.TensorParallel | None
    context: context.ContextParallel | None
    experts: expert.ExpertParallel | None  # None for a dense model
    pipeline: pipeline.Pipeline | None  # None without pipeline parallelism
    vocabulary: int  # rows of the vocabulary on this rank
    reduce_dtype: torch.dtype
    holders: Mapping[str, tuple[int, ...]]  # parameter -> the pipeline ranks that hold it
    buffers: Mapping[str, tuple[int, ...]]  # of routers, with shapes: trained without a gradient, whole on every rank
    balance: balancing.Balance | None  # of routers
    compiled: Compiled | None = None  # None where blocks run as they are
    guard: Guard = field(default_factory=Guard)

    def regions(self, name: str, rank: int | None = None) -> list[tuple[Region, Region]]:
        """(global region, local region) pairs of the part of parameter `name` that `rank` holds; None: this rank."""
        if not self.holds(name, rank):
            return []
        cut = self.cut(name, rank)
        return local_regions(self.shards[name], cut.part, cut.row, cut.rows)

    def is_owner(self, name: str) -> bool:
        """True where this rank's values of `name` are counted once: in the gradient norm, in a checkpoint."""
        is_first_end = self.holders[name][0] == self.mesh.pp_rank
        return is_first_end and self.mesh.is_first_copy and self.shards[name].is_owner(self.cut(name).part)

    def holds(self, name: str, rank: int | None = None) -> bool:
        """Whether parameter `name` is on the pipeline rank of `rank`; None: this rank."""
        return self.mesh.place(dist.get_rank() if rank is None else rank).pp in self.holders[name]

    def gathered_shape(self, name: str) -> tuple[int, ...]:
        """Shape of parameter `name` on this rank when FSDP has gathered it."""
        return self.shards[name].local_shape(self.cut(name).part)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of this rank's part of parameter `name` at rest."""
        shape, cut = self.gathered_shape(name), self.cut(name)
        first, last = fsdp_rows(shape[0], cut.row, cut.rows)
        return (last - first, *shape[1:])

    def cut(self, name: str, rank: int | None = None) -> Cut:
        """Which part of parameter `name` a rank has; None: this rank."""
        place = self.mesh.place(dist.get_rank() if rank is None else rank)
        return self.mesh.cut(place, self.shards[name].over)

    def by_rank(self, most: int = 64) -> dict[str, dict[str, Any]]:
        """Of every parameter its shape, and which regions of it each of the first `most` ranks holds: for a map."""
        ranks = range(min(self.layout.world, most))
        regions = {name: [[region for region, _ in self.regions(name, rank)] for rank in ranks] for name in self.shards}
        return {
            name: {
                "shape": list(self.shards[name].shape),
                "ranks": [[[[s.start, s.stop] for s in region] for region in own] for own in by_rank],
            }
            for name, by_rank in regions.items()
        }

    def declare(self, shape: StepShape) -> tuple[Collective, ...]:
        """Collectives of one optimizer step on this rank, as the folds declare them (the step adds its own)."""
        local_shapes = {name: self.gathered_shape(name) for name in self.shards}
        piped, first, last, layers = self.pipeline, True, True, self.anatomy.layers
        of_units = (
            pipeline.unshard_counts(piped, shape.micro_batches) if piped else data.unshard_counts(self.units, shape)
        )
        parts = data.declare(self.units, local_shapes, self.mesh, shape, of_units)
        partition = self.partition
        if piped:
            (first, last), layers = piped.staged.has_ends, piped.staged.layers
            partition = partition and partition.of_layers(layers)
            parts += pipeline.declare(piped, shape, self._held_bytes(piped.tied, shape))
        if self.tensor and partition:
            partial = self._partial_gradient_bytes(shape)
            parts += tensor.declare(self.tensor, partition, shape, partial, has_embedding=first, has_head=last)
            parts += loss.declare(shape) if last else []
        if self.context:
            parts += context.declare(self.context, shape, layers)
        if self.experts:
            parts += expert.declare(self.experts, shape, layers)
        if self.balance:
            parts += balancing.declare(self.balance, shape, layers)
        return total(parts)

    def _partial_gradient_bytes(self, shape: StepShape) -> dict[str, int]:
        volume = {"tp": 0, "tp_kv": 0}
        for name, axis in cast(tensor.TensorParallel, self.tensor).sums.items():
            volume[axis] += self._held_bytes(name, shape)
        return volume

    def _held_bytes(self, name: str | None, shape: StepShape) -> int:
        """Bytes of this rank's part of a parameter's gradient."""
        regions = [local_region for _, local_region in (self.regions(name) if name else ())]
        return sum(torch.Size([s.stop - s.start for s in region]).numel() for region in regions) * shape.master_bytes


def spread_of(model: nn.Module) -> Spread:
    """The record of a parallelized model."""
    return cast(Spread, model.fivefold)


def fill(model: nn.Module, source: TensorSource) -> None:
    """Overwrite every parameter with this rank's part of `source`, and what routers keep, reading nothing else."""
    spread = spread_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard = local(parameter)
            for global_region, local_region in spread.regions(name):
                shard[local_region].copy_(source.read(name, global_region))
        for name, buffer in model.named_buffers():
            if name in spread.buffers:
                buffer.copy_(source.read(name, tuple(slice(0, size) for size in buffer.shape)))
