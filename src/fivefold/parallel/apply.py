"""`parallelize(model, layout)`: the one path by which every model is parallelized, whatever the layout.

In order: tensor, context and expert parallelism; pipeline stages; recompute and compile, block by block; FSDP. Then the
parameters are allocated, and every rank fills its own shards from a `TensorSource`. The model keeps its `transformers`
class and its parameter names.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from fivefold import torch_internals
from fivefold.core.errors import UserError
from fivefold.core.fp8 import RECIPES, SPLIT_OVER, Dim, Recipe
from fivefold.core.layout import Layout
from fivefold.core.lora import Lora
from fivefold.core.recompute import Recompute, budget_bytes
from fivefold.models import hf_internals
from fivefold.models.adapter import WithAdapters, attach
from fivefold.models.adapter_facts import adapted, targets_of
from fivefold.models.anatomy import Anatomy, is_within
from fivefold.models.attention import KEEPS
from fivefold.models.build import use_our_attention
from fivefold.models.discover import facts_of
from fivefold.models.experts import RowKernels
from fivefold.models.forwards import check_rows, count_behind_padding, hand_on_cu_seqlens
from fivefold.models.recipe import buffer_values
from fivefold.models.sources import ModelTensors, RandomInit, TensorSource
from fivefold.ops.delayed import Delayed
from fivefold.ops.fp8 import Agree, Float8, Float8Grouped
from fivefold.ops.keep import computing_again, contexts, graph_contexts, handing_on, keeping
from fivefold.ops.linear import Linears, Products, Role, WeightGradStore
from fivefold.parallel import passes, probe
from fivefold.parallel.balance import runtime as balancing
from fivefold.parallel.chunks.runtime import chunk_mlps
from fivefold.parallel.context import runtime as context
from fivefold.parallel.experts import runtime as expert
from fivefold.parallel.fp8.amax import AmaxHistory
from fivefold.parallel.fp8.scales import Fp8Scales
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.fsdp import runtime as data
from fivefold.parallel.fsdp.copies import Copies
from fivefold.parallel.fsdp.gathers import gather_parameters
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.graphs.runtime import Compiled
from fivefold.parallel.graphs.spec import GraphPlan
from fivefold.parallel.loss.runtime import EAGER, CompiledKernels
from fivefold.parallel.lower import lower
from fivefold.parallel.mesh import Mesh, build_mesh
from fivefold.parallel.offload.host_memory import HOST
from fivefold.parallel.offload.runtime import Offload, offload_of
from fivefold.parallel.pipeline import runtime as pipeline
from fivefold.parallel.pipeline.stages import install
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.budget import within_budget
from fivefold.parallel.recompute.spec import RecomputePlan
from fivefold.parallel.state import ParallelState, fill
from fivefold.parallel.tensor import runtime as tensor
from fivefold.parallel.tensor.mappings import max_all


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
    offload_to: str = HOST,
    adapter: Lora | None = None,
    prove: Callable[..., None] = probe.check,
) -> Any:
    """Lay a Hugging Face causal language model out over the current world; returns the same model, changed in place.

    The process group must exist already. Values come from `source`. Without a `source` they are the model's own; a
    model on the meta device is initialised by its own recipe with `seed`. `parallelize` adds three attributes:
    `model.run_stage` and `model.stage_logits`, which `passes.py` runs, and `model.fivefold`, the `ParallelState`. For
    users: `fivefold.own_loop.parallelize`. `step`: tokens of a padded row and micro batches of a step, for which a
    budget of recompute is spent. `offload_to`: where what the layout offloads lies, see `HostMemory`. `adapter`: what
    is trained beside a frozen model; `source` may be without it.

    `prove` (see `probe.check`) is called for a class that `models/partition.py` does not list, where tp is more than 1.

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
    facts = facts_of(model)
    if adapter is not None:
        targets = targets_of(facts, adapter)
        attach(model, facts, adapter)
        if targets[0].weights[0] not in source.names():
            source = WithAdapters(source, targets, adapter, seed)
        facts = adapted(facts, adapter)
    plan = lower(facts, layout, dist.get_rank())
    if step is not None:
        plan = within_budget(plan, *step, compiled=compile_blocks)
    elif budget_bytes(layout.recompute) is not None:
        raise UserError(
            f"a budget of {layout.recompute} is spent for rows and micro batches that are known",
            fix="ff.parallelize(..., step=(tokens of a row, micro batches of a step)), or +selective or +full",
        )
    if facts.counted:
        check = partial(check_rows, facts.counted.name, facts.counted.most, layout.cp)
        model.get_submodule(facts.anatomy.base).register_forward_pre_hook(check, with_kwargs=True)
    mesh = build_mesh(plan.placement.grid, device.type)
    if not plan.partition.is_proved:
        prove(model, layout, device, partial(parallelize, prove=_trust))
    model.to("meta")
    _tie(model, facts.anatomy)
    store = WeightGradStore() if layout.schedule.splits_backward else None
    fp8 = plan.feature(Fp8Plan)
    amax = AmaxHistory(fp8.amax_names, fp8.amax_steps, device)
    linears = Linears(store, fp8_products(model, plan, mesh, amax), fp8.covers, are_outside=bool(fp8.amax_names))
    _place_linears(model, plan, linears)
    tp = tensor.apply_tensor_parallel(model, plan, mesh.groups.get("tp"), linears, compiled=compile_blocks)
    chunk_mlps(model, plan, tp.enter)
    cp = context.apply_context_parallel(model, plan, mesh)
    compiled, recompute = Compiled() if compile_blocks else None, plan.recompute
    rows = RowKernels().compiled(compiled.block) if compiled else RowKernels()
    balance = balancing.watch_routers(model, plan, tp, cp, device)
    experts = expert.apply_expert_parallel(model, plan, tp, mesh.groups.get("ep"), balance.drops, linears, rows)
    expert.route_in_fp32(model, plan.fp32_routers)
    hand_on_cu_seqlens(model, facts.forgetful)
    if facts.padding is not None:
        count_behind_padding(model.get_submodule(facts.anatomy.base), facts.padding)
    dtype = data.COMPUTE_DTYPES[layout.precision]
    staged = install(model, plan, tp, cp, dtype=dtype)
    if compiled:
        cp.combine = compiled.block("attention over cp", cp.combine)
    offload = offload_of(layout, offload_to, device)
    _keep_products(model, plan, recompute, is_compiled=compile_blocks)
    _wrap_blocks(model, plan, recompute=recompute, compiled=compiled, offload=offload)
    reduce_dtype = torch.float64 if layout.precision == "fp64" else data.COMPUTE_DTYPES[reduce]
    model.to(data.master_dtype(layout.precision))
    if adapter is not None:
        data.rest_frozen(model, dtype)
    data.apply_data_parallel(model, plan.feature(FsdpPlan).sharded, mesh, reduce_dtype=reduce_dtype)
    groups = mesh.groups.get("pp"), mesh.groups.get("pp_ends")
    piped = pipeline.Pipeline(plan, staged, *groups, balance, linears.store)
    gathers = gather_parameters(model, plan, device, dtype, offload.memory if layout.offload_parameters else None)
    _tie(model, facts.anatomy)
    if plan.feature(FsdpPlan).rests_in_dtensors and not plan.feature(FsdpPlan).is_used:
        data.rest_in_dtensors(model, mesh)
    at_home = {name: gather.shard for name, gather in gathers.items() if layout.offload_parameters}
    offload.states.rest({model.get_parameter(name): shard for name, shard in at_home.items()})
    partial_gradients = tensor.held_in_part(model, plan)  # of the parameters that stay from here on
    model.fivefold = ParallelState(
        plan,
        mesh,
        tp,
        cp,
        experts,
        piped,
        partial_gradients,
        reduce_dtype,
        balance,
        offload,
        amax,
        Fp8Scales(plan, gathers, amax, dtype),
        compiled,
        CompiledKernels(compiled.block) if compiled else EAGER,
        copies=Copies(model, plan.feature(FsdpPlan).stood_in_for, dtype)
        if plan.feature(FsdpPlan).stood_in_for
        else None,
    )
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    fill(model, source)
    model.run_stage = MethodType(partial(passes.run_stage, loss_chunks=loss_chunks), model)
    model.stage_logits = MethodType(passes.stage_logits, model)
    methods = "run_stage", "stage_logits"
    for method in methods:
        register_fsdp_forward_method(model, method)
    if copies := model.fivefold.copies:
        copies.install(model, plan.placement.layers, methods)
    pipeline.prefetch_within_stages(model, plan)
    return model


def _trust(*_: Any) -> None:
    """`prove` for the small model of `probe.check`, which needs no proof of its own."""


def _place_linears(model: nn.Module, plan: ParallelPlan, linears: Linears) -> None:
    """Let every linear of the layers, and the head, multiply as its role asks.

    Row linears are left to `apply_tensor_parallel`, which knows how their partial products are summed.
    """
    anatomy, partition = plan.anatomy, plan.partition
    of_facts = plan.facts.partition.roles
    latent = [name.rpartition(".")[0] for name, role in of_facts.items() if role.kind == "latent"]
    roles: dict[str, Role] = dict.fromkeys(latent, "latent")
    roles |= {anatomy.head: "head", **{each.router: "router" for each in plan.facts.experts}}
    for region in partition.tp_blocks:
        roles |= {region.row: "row", **{name: "column" for name in region.columns}}
    for name, module in model.named_modules():
        is_linear = hf_internals.linear_dims(module) is not None and (name in roles or is_within(name, anatomy.layers))
        if is_linear and (role := roles.get(name, "dense")) != "row":
            tensor.place(module, role, linears.of(name))
    for group in plan.feature(Fp8Plan).inputs:
        modules = [model.get_submodule(linear.name.removesuffix(".weight")) for linear in group]
        if len(group) > 1:
            tensor.place_together(modules, "column", linears)


def fp8_products(
    model: nn.Module, plan: ParallelPlan, mesh: Mesh, amax: AmaxHistory
) -> dict[Role, Callable[..., Products]]:
    """How linears multiply in fp8, by role. Ranks that split a dimension agree on largest values over its axis."""
    if plan.layout.fp8 == "none":
        return {}
    recipe, products = RECIPES[plan.layout.fp8], dict[Role, Callable[..., Products]]()
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    for role, axes in SPLIT_OVER.items():
        groups = {dim: mesh.groups[axis] for dim, axis in axes.items() if axis in mesh.groups}
        agree = {dim: partial(max_all, group=own) for dim, own in groups.items()}
        products[role] = partial(_float8, recipe, agree, names, amax)
    return {**products, "expert": partial(Float8Grouped, recipe)}


def _float8(
    recipe: Recipe, agree: Mapping[Dim, Agree], names: Mapping[nn.Module, str], amax: AmaxHistory,
    linears: Sequence[nn.Module], is_transposed: bool,
) -> Float8:  # fmt: skip
    """The products of linears that are given the same input."""
    if not recipe.history:
        return Float8(recipe, agree, is_transposed)
    return Delayed(recipe, agree, is_transposed, amax, tuple(amax.names.index(names[each]) for each in linears))


def _keep_products(model: nn.Module, plan: ParallelPlan, recompute: Recompute, *, is_compiled: bool) -> None:
    """Under selective recompute, let linears and attention keep what they give. A graph cannot keep anything: it ends
    before, and another begins behind. (A block that is one graph keeps by `torch.compile`'s own means.)"""
    outside: Callable[..., Any] = torch.compiler.disable if is_compiled else lambda forward: forward
    rows = {block.row: block.is_last for block in plan.partition.tp_blocks} if plan.reduces_rows else {}
    for layer in filter(recompute.keeps, plan.placement.layers):
        if is_compiled and plan.feature(GraphPlan).is_one_graph(layer):
            continue
        for name, module in model.get_submodule(layer).named_modules(prefix=layer):
            if name in plan.facts.attends:
                setattr(module, KEEPS, lambda forward: outside(keeping(forward)))
            elif name in rows:
                module.forward = outside((computing_again if rows[name] else handing_on)(module.forward))
            elif name in plan.feature(RecomputePlan).linears:
                module.forward = outside(keeping(module.forward))


def _wrap_blocks(
    model: nn.Module, plan: ParallelPlan, *, recompute: Recompute, compiled: Compiled | None, offload: Offload
) -> None:
    """Recompute, compile and offload each block inside FSDP's hooks; names do not change.

    A block that is one graph is compiled with its second forward: what runs again joins the kernels of the backward,
    and what nothing there reads is left out. Else its graphs are compiled, and all of them run again.
    """
    for region in plan.partition.of_layers(plan.placement.layers).tp_blocks:
        layer = next(name for name in plan.placement.layers if is_within(region.row, [name]))
        if compiled and region.is_last and recompute.of(layer) == "full" and plan.reduces_rows:
            if plan.feature(GraphPlan).is_one_graph(layer):
                continue
            # A graph saves its tensors when all of it has run. A second forward stops at the last saved tensor: it is
            # the input of this row, whose product and collective then come once.
            row = model.get_submodule(region.row)
            row.forward = torch.compiler.disable(row.forward)  # type: ignore[no-untyped-call]
    for name in plan.placement.layers:
        block, is_again, keeps = model.get_submodule(name), recompute.wraps(name), recompute.keeps(name)
        is_inside = is_again and compiled is not None and plan.feature(GraphPlan).is_one_graph(name)
        if is_inside:
            block.forward = _again(block.forward, graph_contexts if keeps else None)
        if compiled:
            block.forward = compiled.block(name, block.forward)
        if is_again and not is_inside:
            block.forward = _again(block.forward, contexts if keeps else None)
        if offload.activations:
            block.forward = offload.activations.layer(
                block,
                block.forward,
                is_first=name in plan.placement.stage_ends[0],
                is_last=name in plan.placement.stage_ends[1],
            )


def _again(forward: Callable[..., Any], around: Callable[..., Any] | None) -> Callable[..., Any]:
    """`forward`, which runs once more in backward. `around`: what stands around the two."""
    more: dict[str, Any] = {} if around is None else {"context_fn": around}
    return partial(checkpoint, forward, use_reentrant=False, **more)


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
