"""Gradients of weights, put off: backward gives the gradients of the inputs first, and those of the matrices later.

A zero-bubble pipeline cuts a backward in two. In its blocks every `F.linear` (and GPT-2's `torch.addmm`) is an autograd
function that only notes what the gradient of its weight is made of; `Deferred.compute` makes them all. What is small
(biases, norms), and what the chunked loss has already, is not put off.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Deferred:
    """The weights' gradients of one micro batch on one stage that are still to be made."""

    def __init__(self) -> None:
        self._products: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def put(self, weight: Tensor, product: Callable[[], Tensor]) -> None:
        """Note what the gradient of `weight` is made of."""
        self._products.append((weight, product))

    def compute(self) -> None:
        """Make the gradients and add them to the weights', as backward would have."""
        for weight, product in self._products:
            torch.autograd.backward(weight, product())
        self._products.clear()


class Holder(Protocol):
    """Says where the gradients of weights go now; None: nothing is put off."""

    deferred: Deferred | None


def store_weight_grads(model: nn.Module, layers: Sequence[str], holder: Holder) -> None:
    """Let the blocks put off their weights' gradients while `holder` says so, a recomputed forward included."""
    for name in layers:
        block = model.get_submodule(name)
        block.forward = partial(_forward, block.forward, holder)


def _forward(plain: Callable[..., Any], holder: Holder, *args: Any, **kwargs: Any) -> Any:
    if holder.deferred is None:
        return plain(*args, **kwargs)
    with _Deferring(holder.deferred):
        return plain(*args, **kwargs)


class _Deferring(TorchFunctionMode):
    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and _is_trained(args[1]):
            product = _linear(args[0], args[1], False, self._deferred)
            bias = args[2] if len(args) > 2 else None
            return product if bias is None else product + bias
        if func is torch.addmm and not kwargs and _is_trained(args[2]):
            return args[0] + _linear(args[1], args[2], True, self._deferred)
        return func(*args, **kwargs)


def _is_trained(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and weight.requires_grad and torch.is_grad_enabled()


def _linear(x: Tensor, weight: Tensor, is_transposed: bool, deferred: Deferred) -> Tensor:
    return _Linear.apply(x, weight, is_transposed, deferred)  # type: ignore[no-any-return,no-untyped-call]


class _Linear(torch.autograd.Function):
    """x W^T, or x W for a weight stored the other way round; the gradient of W is put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, is_transposed: bool, deferred: Deferred) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.is_transposed, ctx.deferred, ctx.weight = is_transposed, deferred, weight
        return torch.matmul(x, weight if is_transposed else weight.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad, is_transposed = grads[0], ctx.is_transposed
        flat_x, flat_grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        first, second = (flat_x, flat_grad) if is_transposed else (flat_grad, flat_x)
        ctx.deferred.put(ctx.weight, lambda: first.T @ second)
        back = torch.matmul(grad, weight.T if is_transposed else weight) if ctx.needs_input_grad[0] else None
        return back, None, None, None
