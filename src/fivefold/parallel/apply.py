"""`parallelize(model, layout)`: the one path that parallelizes every model, whatever the layout.

The plan lists the edits of modules (`features.py`), and the builder of each `Edit` applies it, in that order: on
the meta device first, then to allocated parameters. Then every rank fills its own shards from a `TensorSource`. The
model keeps its `transformers` class and its parameter names.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from fivefold import torch_internals
from fivefold.models import hf_internals
from fivefold.models.anatomy import Anatomy
from fivefold.models.build import use_our_attention
from fivefold.models.discover import facts_of
from fivefold.models.recipe import buffer_values
from fivefold.models.sources import ModelTensors, RandomInit, TensorSource
from fivefold.parallel import features, passes, probe
from fivefold.parallel.adapters.runtime import Adapter, with_adapter
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.dropout.spec import with_neftune
from fivefold.parallel.dtypes import COMPUTE_DTYPES, master_dtype
from fivefold.parallel.fsdp.gathers import gather_parameters
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.mesh import build_mesh
from fivefold.parallel.recompute.budget import within_budget
from fivefold.parallel.state import METHODS, Builders, ParallelState, fill


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

    Raises `UserError` when the layout does not fit the world or the model, or for a torch that is not supported.
    """
    torch_internals.check()
    layout = layout.resolve(dist.get_world_size())
    device = torch.device(device or ("cuda" if dist.get_backend() == "nccl" else "cpu"))
    use_our_attention(model)
    on_meta = next(model.parameters()).is_meta
    source = source or (RandomInit(model, seed) if on_meta else ModelTensors(model))
    buffers = buffer_values(model) if on_meta else dict(model.named_buffers())
    facts, source = with_adapter(model, facts_of(model), adapter, source, seed)
    facts = with_neftune(facts, neftune_noise_alpha)
    plan = within_budget(lower(facts, layout, dist.get_rank(), compiled=compile_blocks), step)
    mesh = build_mesh(plan.placement.grid, device.type)
    if not plan.partition.is_proved:
        prove(model, layout, device, partial(parallelize, prove=_trust))
    model.to("meta").to(master_dtype(layout.precision))
    _tie(model, facts.anatomy)
    reduce_dtype = torch.float64 if layout.precision == "fp64" else COMPUTE_DTYPES[reduce]
    state = ParallelState(model, plan, mesh, device, COMPUTE_DTYPES[layout.precision], reduce_dtype, seed)
    state.add(Adapter(adapter))
    apply, todo = builders(state), features.edits(plan)
    for edit in todo:
        if not edit.needs_memory:
            apply[type(edit)](model.get_submodule(edit.path), edit)
    gathers = gather_parameters(state)
    _tie(model, facts.anatomy)
    for part in state.parts:
        part.end_allocation(state, gathers)
    model.run_stage = MethodType(partial(passes.run_stage, loss_chunks=loss_chunks), model)
    model.stage_logits = MethodType(passes.stage_logits, model)
    for method in METHODS:
        register_fsdp_forward_method(model, method)
    for edit in todo:
        if edit.needs_memory:
            apply[type(edit)](model.get_submodule(edit.path), edit)
    for part in state.parts:
        part.end_edits(state)
    model.fivefold = state
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    fill(model, source)
    return model


def builders(state: ParallelState) -> Builders:
    """Builders of every edit, from the `runtime.py` beside each `spec.py` that lists edits."""
    specs = dict.fromkeys(of_feature.__module__ for of_feature in features.EDITS)
    runtimes = [import_module(f"{spec.removesuffix('.spec')}.runtime") for spec in specs if spec.endswith(".spec")]
    return {kind: build for runtime in runtimes for kind, build in runtime.builders(state).items()}


def _trust(*_: Any) -> None:
    """`prove` for the small model of `probe.check`, which needs no proof itself."""


def _tie(model: nn.Module, anatomy: Anatomy) -> None:
    """Tie the head to the embedding again, and biases of two names: moving gives each module a parameter of its own."""
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
