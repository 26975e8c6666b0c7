"""The one seam of every matmul with a weight: here a role decides how a linear multiplies.

A linear has three products: its output, the gradient of its input, and the gradient of its weight. `Linears.place` is
called once for every linear of a model, when the model is parallelized, and `Linears.grouped` multiplies for experts.
Where nothing is asked of a role, a linear keeps the forward of its own class, whatever that is (an adapter's, a
quantised one's).

| role | which linear | what is asked of it |
|---|---|---|
| `column` | its outputs are split over tp | weight gradient later |
| `row` | its inputs are split over tp | partial products summed before the bias; weight gradient later |
| `dense` | any other one inside a layer | weight gradient later |
| `latent` | its gradients are those of a tp rank's own heads | weight gradient later |
| `expert` | one matmul for all experts of a layer | weight gradient later |
| `router` | says where tokens go | nothing: `parallel/experts/runtime.py` lets all of a router compute in fp32 |
| `head` | gives logits | nothing: the chunked loss computes its gradients in forward |

Two things hook in. A `WeightGradStore` takes weight gradients that a pipeline schedule computes later ("zero bubble",
arXiv:2401.10241). A recipe replaces the three products of a role, for a precision of their own.

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

from fivefold.ops.keep import keeping, product_with_inputs
from fivefold.ops.nf4 import Nf4
from fivefold.torch_internals import grouped_mm

Role = Literal["column", "row", "dense", "latent", "expert", "router", "head"]
LATER: frozenset[Role] = frozenset({"column", "row", "dense", "latent", "expert"})  # whose weight gradients can wait
ALIGNED = 16  # bytes: what the strides of a grouped matmul must be multiples of

Multiply = Callable[[Tensor], Tensor]


Later = Callable[[], tuple[Tensor, ...]]  # computes the gradients of weights


class Products(Protocol):
    """The three products of linears that are given the same input: most often one linear. Weights are as their modules
    store them."""

    def outputs(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(outputs, what backward needs besides the weights)."""

    def input_again(self, x: Tensor, scales: Sequence[Tensor]) -> Tensor:
        """The first thing that backward needs, where the outputs and the scales have been kept."""

    def gradients(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor], *, wants_input: bool
    ) -> tuple[Tensor | None, Later]:
        """(gradient of the input where it is wanted, what computes the gradients of the weights)."""


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


# ---- weight gradients that are computed later ------------------------------------------------------------------------


class WeightGradStore:
    """Weight gradients that wait for the W slot of their stage and micro batch.

    Example, one linear of stage 0 in micro batch 3: forward inside `collecting((0, 3))` notes where its weight gradient
    will go, backward puts `(weights, later)` there and goes on with the gradient of the input, and `compute((0, 3))`
    multiplies.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[tuple[tuple[Tensor, ...], Later]]] = {}
        self.queue: deque[tuple[tuple[Tensor, ...], Later]] | None = None  # of the slot under way

    @contextmanager
    def collecting(self, slot: Hashable) -> Iterator[None]:
        """Inside, what runs forward (a recomputed forward too) puts its weight gradients off until `compute(slot)`."""
        self.queue = self._queues.setdefault(slot, deque())
        try:
            yield
        finally:
            self.queue = None

    def compute(self, slot: Hashable) -> int:
        """Compute the gradients of a slot and add them to the weights', as backward would have. Returns how many."""
        queue, count = self._queues.pop(slot), 0
        while queue:  # one by one, so that what each was made of is free again
            weights, later = queue.popleft()
            trained = {weight: grad for weight, grad in zip(weights, later(), strict=True) if weight.requires_grad}
            torch.autograd.backward(tuple(trained), tuple(trained.values()))
            count += len(trained)
        return count


class _Matmul(torch.autograd.Function):
    """`products.outputs`; backward puts the weights' gradients into `queue`, or without one computes them at once."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        # Named arguments before the weights would not do: where no gradient is asked for, Dynamo leaves out `ctx` if a
        # call has one argument more than the signature, which here is two weights.
        x, products, queue, *weights = given
        made: list[Tensor] = []

        def compute() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            outs, (first, *more) = products.outputs(x, weights)
            made.append(first)
            return outs, tuple(more)

        outs: tuple[Tensor, ...]
        outs, more = product_with_inputs(compute)  # not computed in the second forward of selective recompute
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
            made = [each if is_wanted else None for each, is_wanted in zip(later(), wanted, strict=True)]
        return back, None, None, *made


@dataclass(frozen=True)
class GroupedAdapter:
    """Beside the matrices of experts: `a` [E, r, I] and `b` [E, O, r] (`models/adapter_facts.py`)."""

    a: Tensor
    b: Tensor
    scale: float


# ---- the seam --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linears:
    """How the linears of one model multiply. `store`: of a schedule that splits backward. `products`: role -> what
    makes the products of linears that share their input, from these linears and the fields of `Dense` (`expert`: from
    the fields of `Grouped`); a role that is not in it multiplies in the compute dtype, as does a module that has none.
    `are_outside`: no graph holds these products."""

    store: WeightGradStore | None = None
    products: Mapping[Role, Callable[..., Products]] = field(default_factory=dict)
    has_products: Callable[[str], bool] = lambda module: True
    are_outside: bool = False

    def of(self, module: str) -> "Linears":
        """How the linear, or the experts, of this name multiply."""
        return self if self.has_products(module) else replace(self, products={})

    def place(
        self, linear: Any, role: Role, *, is_transposed: bool, is_plain: bool, reduce: Multiply | None = None
    ) -> None:
        """Let `linear` multiply as its role asks. `is_transposed`: its weight is [I, O]. `is_plain`: its forward is
        that of a linear and does nothing else. `reduce`: sums up the partial products of a row."""
        if getattr(linear, "in_nf4", False):
            multiply = lambda x: self._multiply(x, [linear.weight], Nf4(), role)[0]  # noqa: E731
            linear.forward = _biased(linear, multiply, reduce or _nothing)
            return
        waits = self.store is not None and role in LATER
        multiply = _plain_product(linear, is_transposed) if is_plain else _own_product(linear)
        if is_plain and (waits or role in self.products):
            make = self.products.get(role)
            products = make([linear], is_transposed) if make else Dense(is_transposed)
            multiply = lambda x: self._multiply(x, [linear.weight], products, role)[0]  # noqa: E731
            if waits or (make and self.are_outside):
                # A graph cannot put anything into a store, or a history: it ends before, and another begins behind.
                multiply = torch.compiler.disable(multiply)  # type: ignore[no-untyped-call]
        elif reduce is None and not _is_adapted(linear):
            return
        linear.forward = _biased(linear, multiply, reduce or _nothing)

    def place_together(self, linears: Sequence[Any], role: Role, *, is_transposed: bool) -> None:
        """Let linears that are given the same input, in the order in which they are called, multiply as one: the first
        multiplies for all, and each of the others has its output ready."""
        products = self.products[role](linears, is_transposed)
        ready: list[list[Tensor]] = [[] for _ in linears[1:]]

        def first(x: Tensor) -> Tensor:
            out, *others = self._multiply(x, [each.weight for each in linears], products, role)
            for place, other in zip(ready, others, strict=True):
                place[:] = [other]  # a forward that recompute ended early has left one
            return out

        for at, linear in enumerate(linears):
            multiply = first if at == 0 else partial(_taken, ready[at - 1])
            if self.store is not None or self.are_outside:  # see `place`
                multiply = torch.compiler.disable(multiply)  # type: ignore[no-untyped-call]
            linear.forward = _biased(linear, multiply, _nothing)

    def grouped(
        self, x_SI: Tensor, weight: Tensor, counts_E: Tensor, *, is_transposed: bool,
        adapter: "GroupedAdapter | None" = None,
    ) -> Tensor:  # fmt: skip
        """Rows sorted by expert, each times its expert's matrix of `weight` [E, O, I], or [E, I, O] where
        `is_transposed`: [S, O]. One kernel where it serves these tensors. An adapter adds two products of its rank."""
        if adapter is not None:
            beside = replace(self, products={})  # in the compute type, as those of linears
            made_Sr = beside.grouped(x_SI, adapter.a, counts_E, is_transposed=False)
            more_SO = beside.grouped(made_Sr, adapter.b, counts_E, is_transposed=False)
            return self.grouped(x_SI, weight, counts_E, is_transposed=is_transposed) + adapter.scale * more_SO
        is_served, x_SI = _is_served(x_SI, weight), x_SI.to(weight.dtype)
        if is_served and not ("expert" in self.products or self._is_put_off("expert", weight)):
            plain = Grouped(counts_E, is_transposed, is_served)
            return keeping(plain.output)(x_SI, weight)  # type: ignore[no-any-return]  # the kernel has its own backward
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
    """What a class of its own multiplies, without the bias: that is added once, to the sum of all ranks."""
    own = linear.forward

    def multiply(x: Tensor) -> Tensor:
        bias, linear.bias = linear.bias, None
        try:
            return own(x)  # type: ignore[no-any-return]
        finally:
            linear.bias = bias

    return multiply


def _biased(linear: Any, multiply: Multiply, reduce: Multiply) -> Multiply:
    """Partial products are summed first, with those of an adapter, and the bias is added once."""
    is_adapted = _is_adapted(linear)

    def forward(x: Tensor) -> Tensor:
        out = multiply(x)
        if is_adapted:
            out = out + linear.lora_scale * linear.lora_B(linear.lora_A(x))
        out = reduce(out)
        return out if linear.bias is None else out + linear.bias

    return forward


def _is_adapted(linear: Any) -> bool:
    """Whether a linear has an adapter beside its weight (`models/adapter.py`)."""
    return hasattr(linear, "lora_A")


def _nothing(out: Tensor) -> Tensor:
    return out


def _taken(ready: list[Tensor], _: Tensor) -> Tensor:
    return ready.pop()


# ---- products in the compute dtype -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dense(OneByOne):
    """x [.., I] times a weight [O, I], or [I, O] where `is_transposed` (GPT-2)."""

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
    """Rows [S, I] sorted by expert, `counts_E` of them each, times weights [E, O, I], or [E, I, O] where
    `is_transposed`. `is_served`: by PyTorch's kernel; else in a loop, which takes any type and size.

    An expert without rows gets a gradient of zeros, not none: the ranks that hold its other shards wait for it.
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
        parts = zip(*(torch.split(each, self.counts_E.tolist()) for each in (left, right)), strict=True)
        return torch.stack([rows.T @ others for rows, others in parts])

    def _rows(self, rows: Tensor, weight_Exx: Tensor) -> Tensor:
        if self.is_served and grouped_mm is not None:
            return grouped_mm(rows, weight_Exx, offs=self.ends)
        parts = torch.split(rows, self.counts_E.tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, weight_Exx, strict=True)])

    @property
    def ends(self) -> Tensor:
        """Behind the last row of each expert, [E] int32."""
        return self.counts_E.cumsum(0).to(torch.int32)


def _is_served(x_SI: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch's grouped matmul takes these: 16-bit types (on a CPU fp32 too), aligned, and not empty."""
    types = {torch.bfloat16} | ({torch.float32, torch.float16} if weight.device.type == "cpu" else set())
    if grouped_mm is None or weight.dtype not in types or not len(x_SI):
        return False
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return False
    return all(size * weight.element_size() % ALIGNED == 0 for size in weight.shape[1:])
