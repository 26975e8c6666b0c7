"""Routers in fp32: under 16-bit compute a router says where tokens go, and with which weights, in fp32.

A router's gathered parameters and its input are 16-bit; both are cast to fp32. So different logits are not rounded to a
tie, and the weights reach the experts in fp32. (Megatron: `moe_router_dtype`.) The router keeps its class and its
forward; only the arguments of the forward change. Under fp32 and fp64 compute nothing changes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.models.facts import Experts


def compute_in_fp32(model: nn.Module, modules: Sequence[Experts], compute: torch.dtype) -> None:
    """Let the routers of `modules` compute in fp32, where the model computes in a type (`compute`) of 16 bits."""
    if compute.itemsize > 2:
        return
    for each in modules:
        router = model.get_submodule(each.router)
        if scores_experts(router, each.experts):
            router.forward = torch.compiler.disable(partial(_forward, _Own(router)))  # type: ignore[no-untyped-call]


def scores_experts(module: nn.Module, experts: int) -> bool:
    """Whether a module, or one inside it (Gemma 4), has a row of weights for each of the experts."""
    return any(parameter.ndim == 2 and parameter.shape[0] == experts for parameter in module.parameters())


class _Own(nn.Module):
    """A router's own forward, without its hooks: those run around it, once."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router, self.plain = router, router.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)


def _forward(own: _Own, *args: Any, **kwargs: Any) -> Any:
    parameters = {name: _in_fp32(parameter) for name, parameter in own.named_parameters()}
    args, kwargs = tuple(map(_in_fp32, args)), {name: _in_fp32(each) for name, each in kwargs.items()}
    return torch.func.functional_call(own, parameters, args, kwargs)


def _in_fp32(value: Any) -> Any:
    """What is of 16 bits and floats, in fp32."""
    is_short = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize == 2
    return value.float() if is_short else value
