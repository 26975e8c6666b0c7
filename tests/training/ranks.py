"""What the ranks of the training tests do: the optimizer by itself."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fivefold.parallel.dtensor import local
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import all_reduce_sum, clip_, squared_norm, train_step
from fivefold.verification.reference import torch_optimizers
from tests.parity import (
    OPTIONS,
    Case,
    batch_of,
    build,
    documents,
    pieces,
    reference_model,
)


def decay_of(case: Case) -> dict[str, list[float]]:
    """Parameter name -> the weight decay of each optimizer group that holds it."""
    model = build(case)
    groups = build_optimizer(model, OPTIONS).param_groups
    return {
        name: [group["weight_decay"] for group in groups for p in group["params"] if p is parameter]
        for name, parameter in model.named_parameters()
    }


def before_and_after(case: Case) -> tuple[list[Any], list[Any]]:
    """Pieces of the weights before and after one step."""
    model = build(case)
    before = pieces(model, dict(model.named_parameters()))
    batch = batch_of(documents(case, 0), case.parsed, state_of(model).placement.data_rank)
    train_step(model, build_optimizer(model, OPTIONS), batch, learning_rate=1e-3, max_grad_norm=1.0)
    return before, pieces(model, dict(model.named_parameters()))


def norm_of(case: Case, value: float, poisoned_rank: int | None = None) -> float:
    """The squared norm over the world of a gradient that is `value` everywhere, NaN in one place if asked."""
    model = build(case)
    _set_gradients(model, value)
    if dist.get_rank() == poisoned_rank:
        local(model.get_submodule(state_of(model).plan.anatomy.embedding).weight.grad)[-1, -1] = float("nan")
    return float(all_reduce_sum(squared_norm(model)))


def clipped(case: Case, value: float, norm: float, max_norm: float) -> list[float]:
    """The distinct values of the gradients after clipping."""
    model = build(case)
    _set_gradients(model, value)
    clip_(model, norm, max_norm)
    return sorted({x for p in model.parameters() if p.grad is not None for x in local(p.grad).flatten().tolist()})


# ---- the same gradients everywhere, made up --------------------------------------------------------------------------


def made_up(shape: tuple[int, ...], step: int) -> torch.Tensor:
    """A gradient of this shape: of few directions, as real ones are."""
    random = torch.Generator().manual_seed(1000 * step + sum(shape))
    if len(shape) == 1:
        return torch.randn(shape, generator=random)
    left, right = (torch.randn(size, 3, generator=random) for size in shape)
    return left @ right.T + 0.01 * torch.randn(shape, generator=random)


def updated(case: Case, steps: int) -> dict[str, Any]:
    """Pieces of weights and momentum after so many steps with the gradients `made_up`."""
    model = build(case)
    state, optimizer = state_of(model), build_optimizer(model, case.options)
    for step in range(steps):
        for name, parameter in model.named_parameters():
            whole = made_up(state.placement.shards[name].shape, step)
            parameter.grad = torch.zeros_like(parameter)
            for global_region, local_region in state.placement.regions(name):
                local(parameter.grad)[local_region].copy_(whole[global_region])
        optimizer.step()
    parameters = dict(model.named_parameters())
    momentum = {
        n: optimizer.state[p]["momentum_buffer"] for n, p in parameters.items() if "exp_avg" not in optimizer.state[p]
    }
    return {"weights": pieces(model, parameters), "momentum": pieces(model, momentum)}


def updated_by_torch(case: Case, steps: int) -> dict[str, np.ndarray]:
    """Weights after those steps in the optimizers of torch, untouched: its Muon iterates in bf16."""
    model = reference_model(case, torch.float32)
    parameters = dict(model.named_parameters())
    optimizers = torch_optimizers(model, case.options, case.options.learning_rate)
    for step in range(steps):
        for parameter in parameters.values():
            parameter.grad = made_up(tuple(parameter.shape), step)
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach().double().numpy() for name, parameter in parameters.items()}


def places(case: Case) -> bool:
    """Whether the mesh's arithmetic puts this rank where torch's device mesh does."""
    state = state_of(build(case))
    coords, layout = state.placement.grid.coords(dist.get_rank()), state.plan.layout
    fsdp = coords.dp_shard * layout.cp + coords.cp
    in_mesh = state.mesh.meshes["dp_shard"].get_coordinate()
    assert in_mesh is not None
    return list(in_mesh) == ([coords.dp_replicate, fsdp] if layout.dp_replicate > 1 else [fsdp])


def without_gradients(case: Case, ranks: tuple[int, ...]) -> list[bool]:
    """Whether each of three matrices moved: the second has no gradient on `ranks`."""
    model = build(case)
    optimizer = build_optimizer(model, case.options)
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)]
    parameters = [dict(model.named_parameters())[name] for name in names]
    before = [local(p).clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    if dist.get_rank() in ranks:
        parameters[1].grad = None
    optimizer.step()
    return [not torch.equal(local(p), old) for p, old in zip(parameters, before, strict=True)]


def _set_gradients(model: Any, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
