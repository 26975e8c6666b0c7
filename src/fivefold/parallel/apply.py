"""`parallelize(model, layout)`: the one path that parallelizes every model, whatever the layout.

The plan lists the edits of modules (`features.py`), and the builder of each `Edit` applies it, in that order: on
the meta device first, then to allocated parameters. Then every rank fills its own shards from a `TensorSource`. The
model keeps its `transformers` class and its parameter names.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from fivefold import torch_internals
from fivefold.models import hf_internals, offdiagonal
from fivefold.models.anatomy import Anatomy
from fivefold.models.build import use_our_attention
from fivefold.models.discover import facts_of
from fivefold.models.experts import RowKernels
from fivefold.models.recipe import buffer_values
from fivefold.models.sources import ModelTensors, RandomInit, TensorSource
from fivefold.ops.linear import Linears, WeightGradStore
from fivefold.parallel import passes, probe
from fivefold.parallel.adapters import runtime as adapters
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.balance import runtime as balancing
from fivefold.parallel.context import runtime as context
from fivefold.parallel.dropout import runtime as dropping
from fivefold.parallel.dropout.spec import with_neftune
from fivefold.parallel.edits import Builders
from fivefold.parallel.experts import runtime as expert
from fivefold.parallel.features import edits
from fivefold.parallel.fp8 import runtime as fp8
from fivefold.parallel.fp8.scales import Fp8Scales
from fivefold.parallel.fsdp import runtime as data
from fivefold.parallel.fsdp.copies import Copies
from fivefold.parallel.fsdp.gathers import Gather, gather_parameters
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.graphs import runtime as graphs
from fivefold.parallel.layout import Layout
from fivefold.parallel.linears import runtime as linears
from fivefold.parallel.loss.runtime import EAGER, CompiledKernels
from fivefold.parallel.lower import lower
from fivefold.parallel.mesh import Mesh, build_mesh
from fivefold.parallel.offload import runtime as offloading
from fivefold.parallel.outer.runtime import OuterSteps
from fivefold.parallel.pipeline import runtime as pipeline
from fivefold.parallel.pipeline import stages
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute import runtime as recompute
from fivefold.parallel.recompute.budget import within_budget
from fivefold.parallel.rows import runtime as rows
from fivefold.parallel.state import ParallelState, fill
from fivefold.parallel.tensor import runtime as tensor

METHODS = "run_stage", "stage_logits"  # that run a model, besides its forward


def parallelize(
    model: Any,
    layout: Layout,
    *,
    device: torch.device | str | None = None,
    source: TensorSource | None = None,
    seed: int = 1234,
    reduce: str = "fp32",
    loss_chunks: int | None = None,
    compile_blocks: bool = False,
    step: tuple[int, int] | None = None,
    adapter: Lora | None = None,
    neftune_noise_alpha: float | None = None,
    prove: Callable[..., None] = probe.check,
) -> Any:
    """Parallelize a Hugging Face causal language model over the current world, in place; returns the same model.

    The process group must exist already. Values come from `source`. Without a `source` they are the model's own; a
    model on the meta device is initialised by its own recipe with `seed`. `parallelize` adds three attributes:
    `model.run_stage` and `model.stage_logits`, which `passes.py` runs, and `model.fivefold`, the `ParallelState`. For
    users: `fivefold.own_loop.parallelize`. `seed` is that of dropout too. `step`: tokens of a padded row and micro
    batches of a step, for a recompute budget. `adapter`: trained on a frozen model; `source` may be without it.
    `neftune_noise_alpha`: of the noise on embeddings in training.

    `prove` (see `probe.check`) is called for a class that `models/partition.py` does not list, if tp is more than 1.

    Raises `UserError` when the layout does not fit the world or the model, or when this torch lacks a private interface
    that `torch_internals.py` reads.
    """
    torch_internals.check()
    layout = layout.resolve(dist.get_world_size())
    device = torch.device(device or ("cuda" if dist.get_backend() == "nccl" else "cpu"))
    use_our_attention(model)
    on_meta = next(model.parameters()).is_meta
    source = source or (RandomInit(model, seed) if on_meta else ModelTensors(model))
    buffers = buffer_values(model) if on_meta else dict(model.named_buffers())
    facts, source = adapters.with_adapter(model, facts_of(model), adapter, source, seed)
    facts = with_neftune(facts, neftune_noise_alpha)
    plan = within_budget(lower(facts, layout, dist.get_rank(), compiled=compile_blocks), step)
    mesh = build_mesh(plan.placement.grid, device.type)
    if not plan.partition.is_proved:
        prove(model, layout, device, partial(parallelize, prove=_trust))
    model.to("meta").to(data.master_dtype(layout.precision))
    _tie(model, facts.anatomy)
    parts = LiveParts(model, plan, mesh, device, reduce, adapter, seed)
    builders, todo = parts.builders(), edits(plan)
    for edit in todo:
        if not edit.needs_memory:
            builders[type(edit)](edit)
    gathers = parts.allocate()
    model.run_stage = MethodType(partial(passes.run_stage, loss_chunks=loss_chunks), model)
    model.stage_logits = MethodType(passes.stage_logits, model)
    for method in METHODS:
        register_fsdp_forward_method(model, method)
    for edit in todo:
        if edit.needs_memory:
            builders[type(edit)](edit)
    model.fivefold = parts.state(gathers)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    fill(model, source)
    return model


class LiveParts:
    """The live parts of a parallelized model, which its features need besides the plan. Creating them changes no
    module."""

    def __init__(
        self, model: nn.Module, plan: ParallelPlan, mesh: Mesh, device: torch.device, reduce: str, adapter: Lora | None,
        seed: int,
    ) -> None:  # fmt: skip
        layout = plan.layout
        self._model, self._plan, self._mesh, self._device, self._adapter = model, plan, mesh, device, adapter
        self._dtype = data.COMPUTE_DTYPES[layout.precision]
        self._reduce_dtype = torch.float64 if layout.precision == "fp64" else data.COMPUTE_DTYPES[reduce]
        self.compiled = graphs.Compiled() if plan.compiled else None
        compiled: Callable[..., Any] = self.compiled.block if self.compiled else lambda name, forward: forward
        self.tensor = tensor.tensor_parallel(plan, mesh.groups.get("tp"))
        self.context = context.context_parallel(plan, mesh, compiled("attention over cp", offdiagonal.combine))
        self.scales = Fp8Scales(plan, device, self._dtype)
        store = WeightGradStore() if layout.schedule.splits_backward else None
        products = fp8.products(model, mesh, self.scales.history)
        self.linears = Linears(store, products, plan.matmuls.multiplies, are_outside=bool(self.scales.history.names))
        self.balance = balancing.balance_of(plan, self.tensor, self.context, device)
        self.dropout = dropping.Dropout(
            seed, plan.facts.dropouts, self.tensor, self.context, device, data.master_dtype(layout.precision)
        )
        kernels = RowKernels().compiled(self.compiled.block) if self.compiled else RowKernels()
        self.experts = expert.expert_parallel(
            plan, self.tensor, mesh.groups.get("ep"), self.balance.drops, self.linears, kernels
        )
        staged = stages.StageModules(plan, model, self._dtype, self.tensor, self.context)
        pp = mesh.groups.get("pp"), mesh.groups.get("pp_ends")
        self.pipeline = pipeline.Pipeline(plan, staged, *pp, self.balance, self.dropout, store)
        self.offload = offloading.offload_of(layout, device)
        self.copies: Copies | None = None

    def builders(self) -> Builders:
        """Builders of every edit, of all features."""
        model = self._model
        return {
            **adapters.builders(model, self._dtype, self._adapter),
            **dropping.builders(model, self.dropout),
            **tensor.builders(model, self.tensor),
            **linears.builders(model, self.linears, self.tensor.leave),
            **context.builders(model, self.context),
            **balancing.builders(model, self.balance),
            **expert.builders(model, self.experts),
            **rows.builders(model, self._plan.layout.cp),
            **stages.builders(self.pipeline.staged),
            **recompute.builders(model, is_compiled=self.compiled is not None),
            **(graphs.builders(model, self.compiled) if self.compiled else {}),
            **offloading.builders(model, self.offload),
            **data.builders(
                model, self._plan.feature(FsdpPlan), self._mesh, self._reduce_dtype, self._stand_ins, METHODS
            ),
        }

    def _stand_ins(self) -> Copies:
        if self.copies is None:
            self.copies = Copies(self._model, self._plan.feature(FsdpPlan).stood_in_for, self._dtype)
        return self.copies

    def allocate(self) -> Mapping[str, Gather]:
        """Allocate parameters and buffers where they are stored. Returns the gathers outside of FSDP's own, by name."""
        layout, memory = self._plan.layout, self.offload.memory
        rests = memory if layout.offload_parameters else None
        formats = self.scales.formats(self._model)
        gathers = gather_parameters(self._model, self._device, self._dtype, rests, formats)
        self.scales.use(gathers, formats)
        _tie(self._model, self._plan.anatomy)
        at_home = {name: gather.shard for name, gather in gathers.items() if layout.offload_parameters}
        self.offload.states.rest({self._model.get_parameter(name): shard for name, shard in at_home.items()})
        return gathers

    def state(self, gathers: Mapping[str, Gather]) -> ParallelState:
        """State of the model. Its parameter objects are final from here on."""
        return ParallelState(
            self._plan,
            self._mesh,
            self.tensor,
            self.context,
            self.experts,
            self.pipeline,
            tensor.held_in_part(self._model, self._plan),
            self._reduce_dtype,
            self.balance,
            self.dropout,
            self.offload,
            self.scales,
            self.compiled,
            CompiledKernels(self.compiled.block) if self.compiled else EAGER,
            outer=OuterSteps(self._plan, self._mesh.groups.get("dp_replicate")),
            copies=self.copies,
        )


def _trust(*_: Any) -> None:
    """`prove` for the small model of `probe.check`, which needs no proof itself."""


def _tie(model: nn.Module, anatomy: Anatomy) -> None:
    """Tie the head to the embedding again, and biases that have two names: moving between devices gives each module a
    parameter of its own."""
    head, embedding = (model.get_submodule(path) for path in (anatomy.head, anatomy.embedding))
    if anatomy.tied and "weight" in head._parameters:
        head.weight = embedding.weight
    for name, source in hf_internals.tied_parameters(model).items():
        (module, leaf), (other, theirs) = _place(model, name), _place(model, source)
        if leaf == "bias" and module is not None and other is not None:
            module._parameters[leaf] = other._parameters[theirs]


def _place(model: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """The module that holds a parameter, or None if it is not here, and the parameter's name there."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return (module if module._parameters.get(leaf) is not None else None), leaf
