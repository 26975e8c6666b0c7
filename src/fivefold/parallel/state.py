"""State of a live parallelized model: its plan, and the groups and objects of this rank that realise it.

`parallelize` puts it at `model.fivefold`. The plan says what a layout is; this is what runs.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from fivefold.models.sources import TensorSource
from fivefold.parallel.balance import runtime as balancing
from fivefold.parallel.context import runtime as context
from fivefold.parallel.dropout.runtime import Dropout
from fivefold.parallel.dtensor import local
from fivefold.parallel.experts import runtime as expert
from fivefold.parallel.fp8.scales import Fp8Scales
from fivefold.parallel.fsdp.copies import Copies
from fivefold.parallel.graphs.runtime import Compiled
from fivefold.parallel.guard import Guard
from fivefold.parallel.loss.runtime import EAGER, Kernels
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.offload.runtime import Offload
from fivefold.parallel.outer.runtime import OuterSteps
from fivefold.parallel.pipeline import runtime as pipeline
from fivefold.parallel.placement import Placement
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.sharding import Region
from fivefold.parallel.tensor import runtime as tensor

_AT_ONCE = 2**26  # bytes read, or drawn, at a time


@dataclass(frozen=True)
class ParallelState:
    """One parallelized model on this rank. Every model has each of these; a dimension of one rank does nothing."""

    plan: ParallelPlan
    mesh: Mesh
    tensor: tensor.TensorParallel
    context: context.ContextParallel
    experts: expert.ExpertParallel
    pipeline: pipeline.Pipeline
    partial_gradients: Mapping[str, Sequence[nn.Parameter]]  # by axis, see `tensor.held_in_part`
    reduce_dtype: torch.dtype
    balance: balancing.Balance  # of routers
    dropout: Dropout
    offload: Offload  # to host memory
    scales: Fp8Scales  # of matmuls
    compiled: Compiled | None = None  # None if blocks are not compiled
    loss_kernels: Kernels = EAGER
    guard: Guard = field(default_factory=Guard)
    outer: OuterSteps = field(kw_only=True)  # of replicas that train apart
    copies: Copies | None = None  # None if FSDP makes them, or if parameters are stored in the compute dtype

    @property
    def placement(self) -> Placement:
        """The place of each part of every parameter."""
        return self.plan.placement

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Give every rank whole rows in this context: generation takes single tokens, and its cache holds all."""
        with _temporarily(self.tensor, sequence_parallel=False), _temporarily(self.context, is_on=False):
            yield

    @contextmanager
    def chunked_head(self) -> Iterator[None]:
        """Keep logits split by vocabulary, on the ranks of their tokens, in this context."""
        with _temporarily(self.tensor, head_in_chunks=True), _temporarily(self.context, head_in_chunks=True):
            yield


@contextmanager
def _temporarily(fold: Any, **values: bool) -> Iterator[None]:
    """Set these attributes of `fold` in this context, and restore them afterwards."""
    before = {name: getattr(fold, name) for name in values}
    vars(fold).update(values)
    try:
        yield
    finally:
        vars(fold).update(before)


def state_of(model: nn.Module) -> ParallelState:
    """The state of a parallelized model."""
    return cast(ParallelState, model.fivefold)


def fill(model: nn.Module, source: TensorSource, names: Collection[str] | None = None) -> None:
    """Overwrite every parameter (of `names`; None: all), and buffers of routers, with this rank's part of `source`,
    reading nothing else."""
    state = state_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if names is not None and name not in names:
                continue
            shard = local(parameter)
            for global_region, local_region in state.placement.regions(name):
                if state.plan.facts.parameters[name].packing:
                    products: Any = model.get_submodule(name.rpartition(".")[0]).own_products
                    rows, columns = local_region
                    for piece, own in _pieces(global_region, shard[rows]):
                        products.put(own, columns, source.read(name, piece).to(own.device))
                    continue
                for piece, own in _pieces(global_region, shard[local_region]):
                    own.copy_(source.read(name, piece))
        for name, buffer in model.named_buffers():
            if name in state.placement.buffers and (names is None or name in names):
                buffer.copy_(source.read(name, tuple(slice(0, size) for size in buffer.shape)))


def _pieces(region: Region, own: Tensor) -> Iterator[tuple[Region, Tensor]]:
    """Yield a region of a parameter and this rank's part of it, in rows of at most `_AT_ONCE` bytes: what is read
    exists besides the shard, and an embedding may be larger than a layer. 1 GiB of 4 KiB rows: 16 times 16,384 rows."""
    if own.nbytes <= _AT_ONCE:
        yield region, own
        return
    start, rows = region[0].start or 0, max(1, _AT_ONCE * len(own) // own.nbytes)
    for first in range(0, len(own), rows):
        piece = own[first : first + rows]
        yield (slice(start + first, start + first + len(piece)), *region[1:]), piece
