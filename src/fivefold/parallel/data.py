"""Data parallelism: FSDP2 over `dp_shard * cp`, copies over `dp_replicate`, and the three ZeRO stages.

Gradients are summed, never averaged: the loss is already divided by the global count of target tokens, so data
ranks, accumulation and later folds agree by construction (and gloo, which has no pre-multiplied sum, works).

| zero | parameters gathered | gradients reduced |
| ---- | ------------------- | ----------------- |
| 1    | once a step         | once a step       |
| 2    | once a step         | per micro batch   |
| 3    | twice a micro batch (forward, backward) | per micro batch |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fivefold.core.layout import Layout
from fivefold.models.anatomy import Anatomy
from fivefold.models.trace import Experts
from fivefold.parallel.collectives import Collective, StepShape
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.sharding import Over
from fivefold.torch_internals import fsdp_forget

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def master_dtype(precision: str) -> torch.dtype:
    """What parameters and optimizer state are kept in: fp32, or fp64 when that is what a proof computes in."""
    return torch.float64 if precision == "fp64" else torch.float32


@dataclass(frozen=True)
class Unit:
    """One group of parameters that FSDP gathers and reduces together. `name` "" is the whole model's own unit.
    `frozen`: those of them that have no gradient, such as a correction bias (ERNIE 4.5): they are gathered alone."""

    name: str
    parameters: tuple[str, ...]
    over: Over = "tp"  # whose ranks the blocks of its parameters go to
    frozen: frozenset[str] = frozenset()


def units(model: nn.Module, anatomy: Anatomy, experts: Sequence[Experts] = ()) -> tuple[Unit, ...]:
    """The experts of each layer, the embedding (unless tied), each layer, and last the rest: final norm and head (and a
    tied embedding). An inner unit stands before the one around it.

    What is on another pipeline rank has no parameters here: it is left out.
    """
    names = [name for name, _ in model.named_parameters()]
    separate = (*anatomy.layers,) if anatomy.tied else (anatomy.embedding, *anatomy.layers)
    found = [Unit(each.name, tuple(n for n in names if n.startswith(each.name + ".")), "ep") for each in experts]
    inner = {name for unit in found for name in unit.parameters}
    found += [Unit(m, tuple(n for n in names if n.startswith(m + ".") and n not in inner)) for m in separate]
    taken = {name for unit in found for name in unit.parameters}
    found = [unit for unit in found if unit.parameters]
    frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    everything = (*found, Unit("", tuple(name for name in names if name not in taken)))
    return tuple(replace(unit, frozen=frozen.intersection(unit.parameters)) for unit in everything)


def apply_data_parallel(
    model: nn.Module, model_units: Sequence[Unit], mesh: Mesh, *, reduce_dtype: torch.dtype
) -> None:
    """Shard `model` in place with FSDP2, one group per unit. On one process the same path casts and accumulates."""
    layout = mesh.layout
    for unit in model_units:
        policy = MixedPrecisionPolicy(
            param_dtype=COMPUTE_DTYPES[layout.precision],
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=unit.over != "ep",  # the router's weights stay in its type
        )
        module, fsdp = model.get_submodule(unit.name), mesh.fsdp_mesh(unit.over)
        drop = not keeps_gathered(layout, unit.name)
        sharded = fully_shard(module, mesh=fsdp, mp_policy=policy, reshard_after_forward=drop)
        if fsdp.size() > 1:
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(1.0)


def keeps_gathered(layout: Layout, unit: str) -> bool:
    """Whether a unit's parameters stay gathered between forward and backward; the last unit's are needed at once."""
    return layout.zero < 3 or unit == ""


def prepare_micro_batch(model: nn.Module, layout: Layout, *, last: bool) -> None:
    """Tell FSDP what this micro batch's backward gathers, keeps and reduces (the table at the top)."""
    root = cast(FSDPModule, model)
    root.set_requires_gradient_sync(last or layout.zero > 1)
    root.set_requires_all_reduce(last)
    root.set_reshard_after_backward(last or layout.zero == 3)


def reshard(model: nn.Module) -> None:
    """Drop what is gathered, so that the next use sees the parameters as they are then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def put_in_order(model: nn.Module) -> None:
    """Sharded and idle: what a call that raised half-way has left gathered, or under way, is as before it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            fsdp_forget(module)


UnshardCounts = Mapping[str, tuple[int, int]]  # unit -> how often it is gathered and reduced in a step


def unshard_counts(model_units: tuple[Unit, ...], shape: StepShape) -> UnshardCounts:
    """The table at the top: of micro batches one after the other, each through the whole model."""
    reductions = 1 if shape.zero == 1 else shape.micro_batches
    twice = {unit.name: 1 if unit.name == "" else 2 for unit in model_units}
    return {name: (1 if shape.zero < 3 else shape.micro_batches * times, reductions) for name, times in twice.items()}


def declare(
    model_units: tuple[Unit, ...], local_shapes: dict[str, tuple[int, ...]], mesh: Mesh, shape: StepShape,
    of_units: UnshardCounts,
) -> list[Collective]:  # fmt: skip
    """Those of one optimizer step. `local_shapes`: parameter -> its shape after tensor parallelism, before FSDP."""
    found = []
    for unit in filter(lambda each: each.parameters, model_units):
        shards, axis = mesh.rows(unit.over), mesh.fsdp_axis(unit.over)
        numels = {name: _padded_numel(local_shapes[name], shards) for name in unit.parameters}
        gathered, reduced = sum(numels.values()), sum(numels[name] for name in numels.keys() - unit.frozen)
        gathers, reductions = of_units[unit.name]
        if shards > 1:
            found.append(Collective(axis, "all_gather", gathers, gathers * gathered * shape.compute_bytes))
        if shards > 1 and reduced:
            found.append(Collective(axis, "reduce_scatter", reductions, reductions * reduced * shape.reduce_bytes))
        if mesh.layout.dp_replicate > 1 and reduced:
            found.append(Collective("dp_replicate", "all_reduce", 1, reduced // shards * shape.reduce_bytes))
    return found


def _padded_numel(shape: tuple[int, ...], shards: int) -> int:
    """FSDP pads dimension 0 up to a multiple of the shards on the wire."""
    rows, rest = shape[0], torch.Size(shape[1:]).numel()
    return -(-rows // shards) * shards * rest
