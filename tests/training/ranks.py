"""What the ranks of the training tests do: the optimizer by itself."""

from typing import Any

import torch
import torch.distributed as dist

from fivefold.parallel.apply import spread_of
from fivefold.parallel.tensor import local
from fivefold.training.optimizer import all_reduce_sum, build_optimizer, clip_, squared_norm
from fivefold.training.step import train_step
from tests.parity import OPTIONS, Case, batch_of, build, documents, pieces


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
    batch = batch_of(documents(case, 0), case.parsed, spread_of(model).mesh.data_rank)
    train_step(model, build_optimizer(model, OPTIONS), batch, learning_rate=1e-3, max_grad_norm=1.0)
    return before, pieces(model, dict(model.named_parameters()))


def norm_of(case: Case, value: float, poisoned_rank: int | None = None) -> float:
    """The squared norm over the world of a gradient that is `value` everywhere, NaN in one place if asked."""
    model = build(case)
    _set_gradients(model, value)
    if dist.get_rank() == poisoned_rank:
        model.get_submodule(spread_of(model).anatomy.embedding).weight.grad.to_local()[-1, -1] = float("nan")
    return float(all_reduce_sum(squared_norm(model)))


def clipped(case: Case, value: float, norm: float, max_norm: float) -> list[float]:
    """The distinct values of the gradients after clipping."""
    model = build(case)
    _set_gradients(model, value)
    clip_(model, norm, max_norm)
    return sorted({x for p in model.parameters() if p.grad is not None for x in local(p.grad).flatten().tolist()})


def _set_gradients(model: Any, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
