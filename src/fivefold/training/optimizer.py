"""The optimizer over a parallelized model, and the norm of a spread gradient."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.config import OptimizerSection
from fivefold.parallel.dtensor import local
from fivefold.parallel.state import state_of
from fivefold.torch_internals import norms, scale_
from fivefold.training.optimizers import rule_of


def build_optimizer(model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
    """The optimizer that `options` name, over every parameter of a parallelized `model`."""
    return rule_of(options.name).build(model, options)


def local_gradients(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(name, this rank's part of the gradient) of every parameter that has one."""
    return [(name, local(p.grad)) for name, p in model.named_parameters() if p.grad is not None]


def squared_norm(model: nn.Module) -> Tensor:
    """This rank's share of the squared gradient norm, fp64 scalar: each element of the model counted on one rank only.

    The sum over the world is the squared norm of the whole gradient, replicated parameters counted once
    (Megatron-LM once counted them per rank; the stock `clip_grad_norm_` fails on mixed meshes).
    """
    state = state_of(model)
    owned = [gradient for name, gradient in local_gradients(model) if state.plan.is_owner(name) and gradient.numel()]
    if not owned:
        return torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    return torch.stack(norms(owned)).double().square().sum()


def clip_(model: nn.Module, norm: float, max_norm: float) -> None:
    """Scale the gradients so that their global norm is at most `max_norm` (0: no clipping), by torch's own rule."""
    factor = max_norm / (norm + 1e-6)
    gradients = [gradient for _, gradient in local_gradients(model)]
    if max_norm > 0 and factor < 1.0 and gradients:
        scale_(gradients, factor)


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum over the world, in place."""
    dist.all_reduce(tensor)
    return tensor
