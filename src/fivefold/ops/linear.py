"""The one place for every matmul with a weight: its role decides how a linear multiplies.

A linear has three products: its output, the gradient of its input, and the gradient of its weight. `Linears.place` is
called once for every linear of a model, when the model is parallelized, and `Linears.grouped` multiplies for experts.
If a role needs nothing, a linear keeps the forward of its own class (a quantised one's).

| role | which linear | what it needs |
|---|---|---|
| `column` | outputs split over tp | deferred weight gradient |
| `row` | inputs split over tp | partial products summed before the bias; deferred weight gradient |
| `dense` | any other one inside a layer | deferred weight gradient |
| `latent` | gradients of a tp rank's own heads only | deferred weight gradient |
| `expert` | one matmul for all experts of a layer | deferred weight gradient |
| `router` | routes tokens | nothing: `parallel/experts/runtime.py` computes the whole router in fp32 |
| `head` | gives logits | nothing: the chunked loss computes its gradients in forward |

Two extensions plug in. A `WeightGradStore` takes weight gradients that a pipeline schedule computes later ("zero
bubble", arXiv:2401.10241). A recipe replaces the three products of a role, for a precision of their own.

A linear may have two attributes. `own_products` makes its `Products`, whatever its role, for a weight in a format of
its own. `branch` maps its input to what is added to its product.

Legend: I inputs and O outputs of a linear, S rows sorted by expert, E experts.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.ops.keep import product_with_inputs, save_outputs
from fivefold.torch_internals import grouped_mm

Role = Literal["column", "row", "dense", "latent", "expert", "router", "head"]
LATER: frozenset[Role] = frozenset({"column", "row", "dense", "latent", "expert"})  # weight gradients can wait
ALIGNED = 16  # bytes: strides of a grouped matmul must be multiples of this

Multiply = Callable[[Tensor], Tensor]


Later = Callable[[], tuple[Tensor, ...]]  # computes the gradients of weights


class Products(Protocol):
    """The three products of linears that share an input, most often of one. Weights are as modules store them."""

    def outputs(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(outputs, tensors for backward besides the weights)."""

    def input_again(self, x: Tensor, scales: Sequence[Tensor]) -> Tensor:
        """The first tensor for backward, if the outputs and the scales have been saved."""

    def gradients(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor], *, wants_input: bool
    ) -> tuple[Tensor | None, Later]:
        """(gradient of the input if wanted, function that computes the gradients of the weights)."""


class OneByOne:
    """`Products` of linears that share nothing but their input, from the three products of one."""

    def outputs(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return tuple(self.output(x, weight) for weight in weights), (x,)

    def input_again(self, x: Tensor, scales: Sequence[Tensor]) -> Tensor:
        return x

    def gradients(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor], *, wants_input: bool
    ) -> tuple[Tensor | None, Later]:
        def later() -> tuple[Tensor, ...]:
            return tuple(self.weight_grad(grad, kept[0]) for grad in grads)

        if not wants_input:
            return None, later
        parts = [self.input_grad(*both) for both in zip(grads, weights, strict=True)]
        return sum(parts[1:], start=parts[0]), later

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError


# ---- deferred weight gradients ---------------------------------------------------------------------------------------


class WeightGradStore:
    """Weight gradients that wait for the W slot of their stage and micro batch.

    Example, one linear of stage 0 in micro batch 3: forward inside `collecting((0, 3))` notes where its weight gradient
    will go, backward puts `(weights, later)` there and goes on with the gradient of the input, and `compute((0, 3))`
    multiplies.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[tuple[tuple[Tensor, ...], Later]]] = {}
        self.queue: deque[tuple[tuple[Tensor, ...], Later]] | None = None  # of the current slot

    @contextmanager
    def collecting(self, slot: Hashable) -> Iterator[None]:
        """Defer the weight gradients of forwards inside this context (recomputed ones too) until `compute(slot)`."""
        self.queue = self._queues.setdefault(slot, deque())
        try:
            yield
        finally:
            self.queue = None

    def compute(self, slot: Hashable) -> int:
        """Compute the gradients of a slot and add them to the weights', as backward would have. Returns how many."""
        queue, count = self._queues.pop(slot), 0
        while queue:  # one by one, to free the inputs of each
            weights, later = queue.popleft()
            trained = {weight: grad for weight, grad in zip(weights, later(), strict=True) if weight.requires_grad}
            torch.autograd.backward(tuple(trained), tuple(trained.values()))
            count += len(trained)
        return count


class _Matmul(torch.autograd.Function):
    """`products.outputs`; backward puts weight gradients into `queue`, or without one computes them at once."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        # No named arguments before the weights: without gradients, Dynamo leaves out `ctx` if a call has one argument
        # more than the signature, which here is two weights.
        x, products, queue, *weights = given
        made: list[Tensor] = []

        def compute() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            outs, (first, *more) = products.outputs(x, weights)
            made.append(first)
            return outs, tuple(more)

        outs: tuple[Tensor, ...]
        outs, more = product_with_inputs(compute)  # skipped in the second forward of selective recompute
        ctx.save_for_backward(*weights, made[0] if made else products.input_again(x, more), *more)
        ctx.products, ctx.queue, ctx.weights = products, queue, tuple(weights)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, count, wanted = ctx.saved_tensors, len(grads), ctx.needs_input_grad[3:]
        back, later = ctx.products.gradients(grads, saved[:count], saved[count:], wants_input=ctx.needs_input_grad[0])
        made: Sequence[Tensor | None] = [None] * count
        if ctx.queue is not None:
            ctx.queue.append((ctx.weights, later))
        elif any(wanted):
            made = [grad if is_wanted else None for grad, is_wanted in zip(later(), wanted, strict=True)]
        return back, None, None, *made


# ---- multiplication by role ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linears:
    """Multiplication of a model's linears. `store`: for a schedule that splits backward. `products`: role -> factory
    of the products of linears that share their input, from these linears and the fields of `Dense` (`expert`: from the
    fields of `Grouped`). Other roles, and modules without products, multiply in the compute dtype. `are_outside`: no
    graph holds these products."""

    store: WeightGradStore | None = None
    products: Mapping[Role, Callable[..., Products]] = field(default_factory=dict)
    has_products: Callable[[str], bool] = lambda module: True
    are_outside: bool = False

    def of(self, module: str) -> "Linears":
        return self if self.has_products(module) else replace(self, products={})

    def place(
        self, linear: Any, role: Role, *, is_transposed: bool, is_plain: bool, reduce: Multiply | None = None
    ) -> None:
        """Let `linear` multiply as its role needs. `is_transposed`: its weight is [I, O]. `is_plain`: its forward is
        that of a linear and does nothing else. `reduce`: sums the partial products of a row-parallel linear."""
        if own := getattr(linear, "own_products", None):
            multiply = lambda x: self._multiply(x, [linear.weight], own(), role)[0]  # noqa: E731
            linear.forward = _biased(linear, multiply, reduce or _nothing)
            return
        waits = self.store is not None and role in LATER
        multiply = _plain_product(linear, is_transposed) if is_plain else _own_product(linear)
        if is_plain and (waits or role in self.products):
            make = self.products.get(role)
            products = make([linear], is_transposed) if make else Dense(is_transposed)
            multiply = lambda x: self._multiply(x, [linear.weight], products, role)[0]  # noqa: E731
            if waits or (make and self.are_outside):
                # A graph cannot put anything into a store or a history: it breaks here.
                multiply = torch.compiler.disable(multiply)  # type: ignore[no-untyped-call]
        elif reduce is None and not hasattr(linear, "branch"):
            return
        linear.forward = _biased(linear, multiply, reduce or _nothing)

    def place_together(self, linears: Sequence[Any], role: Role, *, is_transposed: bool) -> None:
        """Let linears that share an input, in call order, multiply as one: the first multiplies for all, and the others
        return their outputs."""
        products = self.products[role](linears, is_transposed)
        ready: list[list[Tensor]] = [[] for _ in linears[1:]]

        def first(x: Tensor) -> Tensor:
            out, *others = self._multiply(x, [linear.weight for linear in linears], products, role)
            for place, other in zip(ready, others, strict=True):
                place[:] = [other]  # a forward that recompute ended early may have left one
            return out

        for at, linear in enumerate(linears):
            multiply = first if at == 0 else partial(_taken, ready[at - 1])
            if self.store is not None or self.are_outside:  # see `place`
                multiply = torch.compiler.disable(multiply)  # type: ignore[no-untyped-call]
            linear.forward = _biased(linear, multiply, _nothing)

    def grouped(self, x_SI: Tensor, weight: Tensor, counts_E: Tensor, *, is_transposed: bool) -> Tensor:
        """Multiply rows sorted by expert with their expert's matrix of `weight` [E, O, I], or [E, I, O] if
        `is_transposed`: [S, O]. Uses one kernel where it can."""
        is_served, x_SI = _is_served(x_SI, weight), x_SI.to(weight.dtype)
        if is_served and not ("expert" in self.products or self._is_put_off("expert", weight)):
            plain = Grouped(counts_E, is_transposed, is_served)
            return save_outputs(plain.output)(x_SI, weight)  # type: ignore[no-any-return]  # the kernel has its own backward
        products = self.products.get("expert", Grouped)(counts_E, is_transposed, is_served)
        return self._multiply(x_SI, [weight], products, "expert")[0]

    def _multiply(self, x: Tensor, weights: Sequence[Tensor], products: Products, role: Role) -> tuple[Tensor, ...]:
        queue = self.store.queue if self.store and self._is_put_off(role, *weights) else None
        return _Matmul.apply(x, products, queue, *weights)  # type: ignore[no-any-return,no-untyped-call]

    def _is_put_off(self, role: Role, *weights: Tensor) -> bool:
        return (
            self.store is not None and self.store.queue is not None and role in LATER
            and any(weight.requires_grad for weight in weights) and torch.is_grad_enabled()
        )  # fmt: skip


PLAIN = Linears()


def _plain_product(linear: Any, is_transposed: bool) -> Multiply:
    return lambda x: F.linear(x, linear.weight.T if is_transposed else linear.weight)


def _own_product(linear: Any) -> Multiply:
    """The product of a custom class without its bias, which is added once, to the sum of all ranks."""
    own = linear.forward

    def multiply(x: Tensor) -> Tensor:
        bias, linear.bias = linear.bias, None
        try:
            return own(x)  # type: ignore[no-any-return]
        finally:
            linear.bias = bias

    return multiply


def _biased(linear: Any, multiply: Multiply, reduce: Multiply) -> Multiply:
    """Sum partial products, with those of a branch, and then add the bias once."""
    branch: Multiply | None = getattr(linear, "branch", None)

    def forward(x: Tensor) -> Tensor:
        out = multiply(x)
        if branch is not None:
            out = out + branch(x)
        out = reduce(out)
        return out if linear.bias is None else out + linear.bias

    return forward


def _nothing(out: Tensor) -> Tensor:
    return out


def _taken(ready: list[Tensor], _: Tensor) -> Tensor:
    return ready.pop()


# ---- products in the compute dtype -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dense(OneByOne):
    """x [.., I] times a weight [O, I], or [I, O] if `is_transposed` (GPT-2)."""

    is_transposed: bool

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.matmul(x, weight if self.is_transposed else weight.T)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        return torch.matmul(grad, weight.T if self.is_transposed else weight)

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        flat_x, flat_grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        return flat_x.T @ flat_grad if self.is_transposed else flat_grad.T @ flat_x


@dataclass(frozen=True, eq=False)
class Grouped(OneByOne):
    """Rows [S, I] sorted by expert, `counts_E` for each, times weights [E, O, I], or [E, I, O] if `is_transposed`.
    `is_served`: by PyTorch's kernel; else in a loop, which takes any dtype and size.

    An expert without rows gets a gradient of zeros, not None: the ranks that hold its other shards wait for it.
    """

    counts_E: Tensor
    is_transposed: bool
    is_served: bool

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._rows(x, weight if self.is_transposed else weight.transpose(1, 2))

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self._rows(grad, weight.transpose(1, 2) if self.is_transposed else weight)

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        left, right = (x, grad) if self.is_transposed else (grad, x)
        if self.is_served and grouped_mm is not None:
            return grouped_mm(left.T, right, offs=self.ends)
        parts = zip(*(torch.split(matrix, self.counts_E.tolist()) for matrix in (left, right)), strict=True)
        return torch.stack([rows.T @ others for rows, others in parts])

    def _rows(self, rows: Tensor, weight_Exx: Tensor) -> Tensor:
        if self.is_served and grouped_mm is not None:
            return grouped_mm(rows, weight_Exx, offs=self.ends)
        parts = torch.split(rows, self.counts_E.tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, weight_Exx, strict=True)])

    @property
    def ends(self) -> Tensor:
        return self.counts_E.cumsum(0).to(torch.int32)


def _is_served(x_SI: Tensor, weight: Tensor) -> bool:
    """True if PyTorch's grouped matmul takes these: 16-bit dtypes (on a CPU fp32 too), aligned, and not empty."""
    types = {torch.bfloat16} | ({torch.float32, torch.float16} if weight.device.type == "cpu" else set())
    if grouped_mm is None or weight.dtype not in types or not len(x_SI):
        return False
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return False
    return all(size * weight.element_size() % ALIGNED == 0 for size in weight.shape[1:])
