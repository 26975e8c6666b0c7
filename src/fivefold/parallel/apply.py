"""`parallelize(model, layout)`: the one path by which every model is spread, whatever the layout.

In order: cut for tensor and context parallelism, recompute and compile per block, FSDP, then memory is allocated and
every rank fills its own part from a `TensorSource`. The model stays the `transformers` class with its own parameter
names.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from fivefold import torch_internals
from fivefold.core import legality
from fivefold.core.errors import UserError
from fivefold.core.layout import Layout
from fivefold.core.recompute import Recompute
from fivefold.models import hf_internals
from fivefold.models.anatomy import Anatomy, is_within
from fivefold.models.build import check_rows, use_our_attention
from fivefold.models.experts import router_buffers
from fivefold.models.in_memory import ModelTensors
from fivefold.models.partition import Partition, derive
from fivefold.models.positions import count_behind_padding
from fivefold.models.recipe import buffer_values
from fivefold.models.sources import RandomInit, TensorSource
from fivefold.models.trace import Trace, Untraceable, hand_on_cu_seqlens, trace
from fivefold.ops.linear import Linears, Role, WeightGradStore
from fivefold.parallel import balance as balancing
from fivefold.parallel import context, data, expert, forward, pipeline, probe, router, tensor
from fivefold.parallel.compiled import Compiled
from fivefold.parallel.limits import limits_of
from fivefold.parallel.mesh import Mesh, build_mesh
from fivefold.parallel.sharding import ShardSpec
from fivefold.parallel.spread import Spread, fill
from fivefold.parallel.stages import StageModules, StagePlan, assign, install


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
    prove: Callable[..., None] = probe.check,
) -> Any:
    """Spread a Hugging Face causal language model over the current world; returns the same model, changed in place.

    Values come from `source`; without one, from the model itself, or, for a model on the meta device, from random
    initialisation by the model's own recipe with `seed`. The process group is there already. Adds
    `model.loss_sum(LossInputs)`, the summed cross entropy, which `passes.py` runs, and the record `model.fivefold`
    (`Spread`). For users: `fivefold.own_loop.parallelize`.

    `prove` (see `probe.check`) is asked where tensor parallelism of this class is held against the model by no test.

    Raises `UserError` when the layout does not fit the world or the model, or this torch lacks what is read of it.
    """
    torch_internals.check()
    layout = layout.resolve(dist.get_world_size())
    device = torch.device(device or ("cuda" if dist.get_backend() == "nccl" else "cpu"))
    use_our_attention(model)
    anatomy = Anatomy.of(model)
    on_meta = next(model.parameters()).is_meta
    source = source or (RandomInit(model, seed) if on_meta else ModelTensors(model))
    buffers = buffer_values(model) if on_meta else dict(model.named_buffers())
    traced = _traced(model, anatomy)
    if traced.counted:
        check = partial(check_rows, traced.counted.name, traced.counted.most, layout.cp)
        model.get_submodule(anatomy.base).register_forward_pre_hook(check, with_kwargs=True)
    partition = derive(model, anatomy, traced) if layout.tp > 1 else None
    limits = limits_of(model, anatomy, traced, partition, expert_tp=layout.etp > 1)
    legality.refuse(legality.violations(layout, limits))
    specs = tensor.shard_specs(model, partition, layout.tp) | expert.shard_specs(model, traced.experts, layout)
    copies = tensor.kv_copies(model, partition, layout.tp)
    stages = assign(model, anatomy, traced, layout)
    holders = {name: stages.holders(name) for name in specs}
    tied = f"{anatomy.embedding}.weight" if anatomy.tied else None
    mesh = build_mesh(
        layout,
        device.type,
        kv_copies=copies,
        experts=bool(traced.experts),
        embedding_ranks=holders[tied] if tied else (),
    )
    if partition and not partition.is_proved:
        prove(model, layout, device, partial(parallelize, prove=_trust))
    model.to("meta")
    _tie(model, anatomy)
    splits_backward = layout.pp > 1 and layout.schedule.splits_backward
    linears = Linears(store=WeightGradStore() if splits_backward else None)
    _place_linears(model, anatomy, traced, partition, linears)
    fold = _tensor_parallel(model, anatomy, partition, specs, mesh, linears)
    rows = context.apply_context_parallel(model, anatomy, traced, mesh)
    experts = expert.apply_expert_parallel(
        model,
        traced.experts,
        specs,
        fold,
        group=mesh.ep_group,
        cut=mesh.part("ep"),
        parts=layout.etp,
        linears=linears,
    )
    router.compute_in_fp32(model, traced.experts, data.COMPUTE_DTYPES[layout.precision])
    balance = balancing.watch_routers(model, experts, fold, rows, device)
    router_state = {name: tuple(model.get_buffer(name).shape) for name in router_buffers(model)}
    hand_on_cu_seqlens(model, traced.forgetful)
    if traced.padding is not None:
        count_behind_padding(model.get_submodule(anatomy.base), traced.padding)
    staged = _staged(model, stages, mesh, anatomy, traced, fold, rows) if layout.pp > 1 else None
    own_layers = staged.layers if staged else anatomy.layers
    compiled = Compiled() if compile_blocks else None
    _wrap_blocks(model, own_layers, recompute=Recompute(layout.recompute), compiled=compiled)
    reduce_dtype = torch.float64 if layout.precision == "fp64" else data.COMPUTE_DTYPES[reduce]
    model_units = data.units(model, anatomy, traced.experts)
    model.to(data.master_dtype(layout.precision))
    data.apply_data_parallel(model, model_units, mesh, reduce_dtype=reduce_dtype)
    vocabulary = specs[f"{anatomy.embedding}.weight"].local_shape(mesh.tp_rank)[0]
    piped = (
        pipeline.Pipeline(
            layout, staged, model_units, mesh.pp_group, mesh.embedding_group, tied, balance, linears.store
        )
        if staged
        else None
    )
    spread = Spread(
        layout, mesh, anatomy, partition, specs, model_units, fold, rows, experts, piped, vocabulary, reduce_dtype,
        holders, router_state, balance, compiled,
    )  # fmt: skip
    model.fivefold = spread
    _materialise(model, spread, device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    fill(model, source)
    model.loss_sum = MethodType(partial(forward.loss_sum, loss_chunks=loss_chunks), model)
    register_fsdp_forward_method(model, "loss_sum")
    if staged:
        model.run_stage = MethodType(partial(forward.run_stage, loss_chunks=loss_chunks), model)
        model.stage_logits = MethodType(forward.stage_logits, model)
        for method in ("run_stage", "stage_logits"):
            register_fsdp_forward_method(model, method)
        pipeline.prefetch_within_stages(model, staged)
    return model


def _trust(*_: Any) -> None:
    """Of a model that is the proof itself."""


def _traced(model: Any, anatomy: Anatomy) -> Trace:
    """What feeds what in the model.

    Raises `UserError` for a model in which tokens meet outside of attention: packed documents would see each other.
    """
    try:
        return trace(model, anatomy)
    except Untraceable as error:
        raise UserError(
            f"{type(model).__name__} cannot be trained here: {error}",
            fix=error.fix
            or "use a model whose layers mix tokens through the attention functions of transformers alone",
        ) from error


def _tensor_parallel(
    model: nn.Module, anatomy: Anatomy, partition: Partition | None, specs: dict[str, ShardSpec], mesh: Mesh,
    linears: Linears,
) -> tensor.TensorParallel | None:  # fmt: skip
    if partition is None:
        return None
    return tensor.apply_tensor_parallel(
        model, anatomy, partition, specs, mesh.tp_group, sequence_parallel=mesh.layout.sequence_parallel,
        linears=linears,
    )  # fmt: skip


def _place_linears(
    model: nn.Module, anatomy: Anatomy, traced: Trace, partition: Partition | None, linears: Linears
) -> None:
    """Let every linear of the layers, and the head, multiply as its role asks; rows are placed where they are cut."""
    roles: dict[str, Role] = {anatomy.head: "head", **{each.router: "router" for each in traced.experts}}
    for region in partition.regions if partition else ():
        roles |= {region.row: "row", **{name: "column" for name in region.columns}}
    for name, module in model.named_modules():
        is_linear = hf_internals.linear_dims(module) is not None and (name in roles or is_within(name, anatomy.layers))
        if is_linear and (role := roles.get(name, "dense")) != "row":
            tensor.place(module, role, linears)


def _staged(
    model: Any, stages: StagePlan, mesh: Mesh, anatomy: Anatomy, traced: Trace, fold: tensor.TensorParallel | None,
    rows: context.ContextParallel | None,
) -> StageModules:  # fmt: skip
    """The model with the stages of this rank."""

    def own_tokens(length: int) -> int:
        return length // rows.size if rows and rows.is_on else length

    def tokens(length: int) -> int:
        return length // fold.size if fold and fold.sequence_parallel else length

    return install(
        model, stages, mesh.pp_rank, anatomy, traced, dtype=data.COMPUTE_DTYPES[mesh.layout.precision],
        own_tokens=own_tokens, tokens=tokens, hidden_size=model.config.get_text_config().hidden_size,
    )  # fmt: skip


def _wrap_blocks(model: nn.Module, layers: Sequence[str], *, recompute: Recompute, compiled: Compiled | None) -> None:
    """Recompute and compile each block inside FSDP's hooks; names do not change."""
    for name in layers:
        block = model.get_submodule(name)
        forward = compiled.block(name, block.forward) if compiled else block.forward
        if recompute.wraps(name):
            forward = partial(checkpoint, forward, use_reentrant=False)
        block.forward = forward


def _materialise(model: nn.Module, spread: Spread, device: torch.device) -> None:
    """Allocate the sharded parameters and the buffers."""
    model.to_empty(device=device)
    _tie(model, spread.anatomy)


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
    """The module that holds a parameter, or None where it is not here, and what it is called there."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return (module if module._parameters.get(leaf) is not None else None), leaf
