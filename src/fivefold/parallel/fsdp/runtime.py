"""Data parallelism: FSDP2 over `dp_shard * cp`, copies over `dp_replicate`, and the three ZeRO stages.

Gradients are summed, never averaged: the loss is already divided by the global count of target tokens, so data
ranks, accumulation and later folds agree by construction (and gloo, which has no pre-multiplied sum, works).
`unshards.py` has the table of what each stage gathers and reduces, and when.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as dtensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fivefold.parallel.dtypes import COMPUTE_DTYPES
from fivefold.parallel.fsdp.copies import Copies
from fivefold.parallel.fsdp.spec import (
    CastInputs,
    FsdpPlan,
    KeepCopy,
    PrefetchWithinStages,
    RestAsDTensors,
    SendOtherwise,
    ShardUnit,
    StandIn,
    Unit,
    keeps_gathered,
)
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.nodes.levels import Int8Wire, UnitGather, UnitReduce, WirePart, in_two_levels
from fivefold.parallel.state import METHODS, Builders, ParallelState, state_of
from fivefold.torch_internals import fsdp_cuts_own_shards, fsdp_drop_copy, fsdp_forget, fsdp_keep_copy, fsdp_sent


def builders(state: ParallelState) -> Builders:
    mesh, plan = state.mesh, state.plan.feature(FsdpPlan)
    return {
        ShardUnit: lambda module, edit: _shard(module, edit.unit, mesh, state.reduce_dtype),
        KeepCopy: lambda module, edit: leave_after_forward(module, edit.unit, mesh),
        SendOtherwise: lambda _, edit: _send_otherwise(state.model, edit.unit, mesh, plan),
        PrefetchWithinStages: lambda model, edit: _prefetch_within(model, edit.stages),
        RestAsDTensors: lambda model, _: rest_in_dtensors(model, mesh),
        StandIn: lambda model, _: state.live(Copies).around_model(model, METHODS),
        CastInputs: lambda layer, _: state.live(Copies).before_layer(layer),
    }


def _shard(module: nn.Module, unit: Unit, mesh: Mesh, reduce_dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPES[mesh.layout.precision],
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=unit.over != "ep",  # the router's weights keep their dtype
    )
    fsdp, drop = mesh.meshes[mesh.grid.fsdp_axis(unit.over)], not keeps_gathered(mesh.layout, unit.name)
    with fsdp_cuts_own_shards():
        sharded = fully_shard(module, mesh=fsdp, mp_policy=policy, reshard_after_forward=drop)
    if fsdp.size() > 1:
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)


def leave_after_forward(module: Any, unit: Unit, mesh: Mesh) -> None:
    """Set what a unit's forward leaves for backward: all, this rank's shard, or its part of a node's copy."""
    drop, has_copy = not keeps_gathered(mesh.layout, unit.name), mesh.layout.hpz > 0
    nodes = mesh.meshes.get(mesh.grid.node_axis(unit.over))
    module.set_reshard_after_forward(drop and (not has_copy or nodes is not None), recurse=False)
    if drop and nodes is not None:
        fsdp_keep_copy(module, nodes)


def _send_otherwise(model: nn.Module, unit: Unit, mesh: Mesh, plan: FsdpPlan) -> None:
    module: Any = model.get_submodule(unit.name)
    grid, whole = mesh.grid, mesh.groups[mesh.grid.fsdp_axis(unit.over)]
    names = {(owner, leaf): f"{path}.{leaf}" for path, owner in model.named_modules() for leaf in owner._parameters}
    sent = [(names[place], numbers) for place, numbers in fsdp_sent(module)]
    gathered = (
        Int8Wire([WirePart(numbers, plan.block(name)) for name, numbers in sent]) if plan.is_coded(unit) else None
    )
    reduced = None
    if plan.reduces_coded(unit):
        trained = [(name, numbers) for name, numbers in sent if name not in unit.frozen]
        reduced = Int8Wire([WirePart(numbers, plan.reduced_block(name)) for name, numbers in trained])
    if plan.has_levels(unit):
        node, across = mesh.groups[grid.node_axis(unit.over)], mesh.groups[grid.across_axis(unit.over)]
        module.set_custom_all_gather(UnitGather(whole.size(), in_two_levels(node, across), gathered))
        module.set_custom_reduce_scatter(UnitReduce(node, across, reduced))
        return
    if gathered:
        module.set_custom_all_gather(
            UnitGather(whole.size(), partial(dist.all_gather_into_tensor, group=whole), gathered)
        )
    if reduced:
        module.set_custom_reduce_scatter(UnitReduce(None, whole, reduced))


def _prefetch_within(model: Any, stages: Sequence[Sequence[str]]) -> None:
    """Prefetch within stages. By default FSDP follows the order of the last forward, which may be another stage's."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_backward_prefetch([module])  # itself: nothing ahead
    for names in stages:
        for before, layer in pairwise(map(model.get_submodule, names)):
            layer.set_modules_to_backward_prefetch([before])


def rest_in_dtensors(model: nn.Module, mesh: Mesh) -> None:
    """Store parameters as DTensors over one rank, which refuse to be taken for whole, if nothing is to be sharded."""
    resting = dict[nn.Parameter, nn.Parameter]()  # a tied one stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in resting:
                own = mesh.meshes["dp_shard"]
                placements = [dtensor.Shard(0)] * own.ndim
                whole = dtensor.DTensor.from_local(parameter.detach(), own, placements, run_check=False)
                resting[parameter] = nn.Parameter(whole, parameter.requires_grad)
            module._parameters[name] = resting[parameter]


def reshard(model: Any) -> None:
    """Drop gathered and copied parameters, so that the next use sees the parameters as they are then."""
    for module in model.modules() if state_of(model).plan.feature(FsdpPlan).is_used else ():
        if isinstance(module, FSDPModule):
            module.reshard()
            fsdp_drop_copy(module)
    state_of(model).live(Copies).put_back()


def put_in_order(model: Any) -> None:
    """Make the model sharded and idle again, after a call that raised half-way left units gathered or in flight."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            fsdp_forget(module)  # first: a unit that believes it is in a forward stays gathered
            module.set_requires_gradient_sync(True, recurse=False)  # as a user's own backward needs it
    reshard(model)
