"""The three products of a linear in fp8, following a recipe of `parallel/fp8/recipes.py`.

Example: a row (1.0, -3.0, 0.1) has the largest value 3. Its scale is 448 / 3 = 149.3, or 128 as a power of two. With
128 it is cast to (128, -384, 13), which stands for (1.0, -3.0, 0.1016).

Without fp8 units, or without a scaled matmul in PyTorch for the recipe, fp8 is emulated: the same cast operands are
multiplied in a dtype that holds them. The effect on the loss is the same, and nothing is faster.

Legend: M, N free dimensions, K the one summed over; I inputs and O outputs of a linear, S tokens.
"""

import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.ops.linear import Dense, Grouped, Later, OneByOne
from fivefold.parallel.fp8.kernels import Rounded, grouped_matmul, is_served, is_served_grouped, laid_out, scaled_matmul
from fivefold.parallel.fp8.recipes import (
    DIMS,
    Cast,
    Dim,
    Format,
    Pair,
    Product,
    Recipe,
    by_row,
    shared_dims,
)

DTYPES: Mapping[Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LEAST = 1e-30  # stands for the largest value of a region of zeros

Agree = Callable[[Tensor], Tensor]  # largest values on this rank -> those of all ranks that split a dimension


# ---- casts -----------------------------------------------------------------------------------------------------------


def scale_of(largest: Tensor, cast: Cast, x_MK: Tensor) -> Tensor:
    """Scales that multiply `x_MK` before the cast, in fp32 (fp64 for fp64), of a shape that broadcasts with it.

    `largest`: of each region. A leading dimension counts matrices, each with its own scales.
    """
    scale = torch.finfo(DTYPES[cast.form]).max / largest.double().clamp(min=LEAST)
    if cast.is_power_of_2:
        scale = torch.exp2(torch.log2(scale).floor())
    for dim, size in zip((-2, -1), cast.region, strict=True):
        if size is not None and size > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, x_MK.shape[dim])
    return scale.to(torch.float64 if x_MK.dtype == torch.float64 else torch.float32)


def cast_to_fp8(x_MK: Tensor, cast: Cast, scale: Tensor) -> Tensor:
    """Round `x_MK * scale` to the nearest fp8 numbers, ties to even. Too large values become the largest; NaN stays."""
    dtype = DTYPES[cast.form]
    most = torch.finfo(dtype).max
    scaled = torch.mul(x_MK, scale).clamp_(-most, most)  # in the dtype of the scale, which is the wider one
    return (_rounded_once(scaled, dtype) if scaled.dtype == torch.float64 else scaled).to(dtype)


def _rounded_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest numbers of `dtype`, in fp64. (PyTorch converts fp64 to fp8 by way of fp32: 17 + 1e-8 becomes
    17, half way between 16 and 18, and then 16.)"""
    about = torch.finfo(dtype)
    exponent = torch.frexp(x).exponent - 1  # 2^exponent <= |x| < 2^(exponent + 1)
    lowest = math.frexp(about.tiny)[1] - 1
    step = torch.ldexp(about.eps * torch.ones_like(x), exponent.clamp(min=lowest))
    return (x / step).round() * step


def _largest(x_MK: Tensor, region: tuple[int | None, int | None]) -> Tensor:
    """The largest absolute value of each region: [1 or M/m, 1 or K/k]."""
    free, summed = region
    if summed is None:
        return x_MK.abs().amax(dim=-1 if free else (-2, -1), keepdim=True)
    m, k = free or x_MK.shape[-2], summed
    padded = F.pad(x_MK, (0, -x_MK.shape[-1] % k, 0, -x_MK.shape[-2] % m))
    parts = padded.unflatten(-1, (-1, k)).unflatten(-3, (-1, m))  # type: ignore[no-untyped-call]
    return parts.abs().amax(dim=(-3, -1))  # type: ignore[no-any-return]


# ---- products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Float8:
    """The products, by `recipe`, of linears that share an input. Weights are [O, I], or [I, O] if `is_transposed`
    (GPT-2); a recipe that casts weights once gets each as an `Fp8Weight`. `agree`: for dimensions that ranks split.

    The input is cast once for all of them. Largest values needed at the same time share a collective: one for the
    outputs, one for the gradient of the input, one for the gradients of the weights.
    """

    recipe: Recipe
    agree: Mapping[Dim, Agree]
    is_transposed: bool

    def outputs(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        once = self.recipe.casts_once
        (rows,), matrices = self.casts("output", [_flat(x)], [] if once else self._turned(weights, self.is_transposed))
        matrices = self._rounded(weights, self.is_transposed) if once else matrices
        outs = tuple(self._product("output", rows, matrix, x.dtype).view(*x.shape[:-1], -1) for matrix in matrices)
        return outs, rows if once else (x,)

    def casts(
        self, which: Product, a_MK: Sequence[Tensor], b_NK: Sequence[Tensor]
    ) -> tuple[list[Rounded], list[Rounded]]:
        return casts(which, self.recipe, self.agree, a_MK, b_NK)

    def input_again(self, x: Tensor, scales: Sequence[Tensor]) -> Tensor:
        return cast_to_fp8(_flat(x), self.recipe.output[0], scales[0]) if self.recipe.casts_once else x

    def gradients(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor], *, wants_input: bool
    ) -> tuple[Tensor | None, Later]:
        flat, dtype = [_flat(grad) for grad in grads], grads[0].dtype
        if self.recipe.casts_once:
            values, scale = kept
            rows, _ = self.casts("input_grad", flat, [])
            later: Later = partial(self._weight_grads, [(grad.T, own) for grad, own in rows], (values.T, scale), dtype)
            if not wants_input:
                return None, later
            matrices = self._rounded(weights, not self.is_transposed)
        else:
            later = partial(self._cast_weight_grads, flat, *kept)
            if not wants_input:
                return None, later
            rows, matrices = self.casts("input_grad", flat, self._turned(weights, not self.is_transposed))
        parts = [self._product("input_grad", *both, dtype) for both in zip(rows, matrices, strict=True)]
        return sum(parts[1:], start=parts[0]).view(*grads[0].shape[:-1], -1), later

    def _cast_weight_grads(self, grads_SO: Sequence[Tensor], x: Tensor) -> tuple[Tensor, ...]:
        if self.recipe.weight_grad is None:
            return tuple(Dense(self.is_transposed).weight_grad(grad, x) for grad in grads_SO)
        turned = [grad.T for grad in grads_SO]
        rows, (columns,) = self.casts("weight_grad", turned, [_flat(x).T])
        return self._weight_grads(rows, columns, x.dtype)

    def _weight_grads(self, grads_OS: Sequence[Rounded], x_IS: Rounded, dtype: torch.dtype) -> tuple[Tensor, ...]:
        made = (self._product("weight_grad", grad, x_IS, dtype) for grad in grads_OS)
        return tuple(product.T if self.is_transposed else product for product in made)

    def _turned(self, weights: Sequence[Tensor], is_turned: bool) -> list[Tensor]:
        return [weight.T if is_turned else weight for weight in weights]

    def _rounded(self, weights: Sequence[Tensor], is_turned: bool) -> list[Rounded]:
        """Codes and scales of weights that FSDP has gathered in fp8."""
        own = [typing.cast(Fp8Weight, weight) for weight in weights]
        return [*zip(self._turned([part.codes for part in own], is_turned), (part.scale for part in own), strict=True)]

    def _product(self, which: Product, a_MK: Rounded, b_NK: Rounded, dtype: torch.dtype) -> Tensor:
        """`a` times `b` transposed, in `dtype`: [M, N]."""
        pair: Pair = getattr(self.recipe, which)
        if is_served(a_MK[0], b_NK[0], pair, dtype):
            if which == "input_grad" and self.recipe.casts_once:
                b_NK = laid_out(b_NK[0], a_MK[0]), b_NK[1]
            return scaled_matmul(a_MK, b_NK, pair, dtype, fast=which == "output")
        wide = held_in(dtype, pair)
        return (restored(*a_MK, wide) @ restored(*b_NK, wide).T).to(dtype)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True, eq=False)
class Float8Grouped(OneByOne):
    """The products of experts by `recipe`: see `ops.linear.Grouped` for the shapes.

    Rows are cast one by one, because the rows of an expert come from other ranks and micro batches: a recipe that casts
    whole tensors casts rows here. Weights are cast expert by expert. Weight gradients sum over these rows, so they stay
    in the compute dtype.
    """

    recipe: Recipe
    counts_E: Tensor
    is_transposed: bool
    is_served: bool

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._product("output", x, weight.transpose(1, 2) if self.is_transposed else weight)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self._product("input_grad", grad, weight if self.is_transposed else weight.transpose(1, 2))

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        return Grouped(self.counts_E, self.is_transposed, self.is_served).weight_grad(grad, x)

    def _product(self, which: Product, rows_SK: Tensor, weight_ENK: Tensor) -> Tensor:
        (rows,), (weight,) = casts(which, by_row(self.recipe), {}, [rows_SK], [weight_ENK])
        plain, dtype = Grouped(self.counts_E, False, self.is_served), rows_SK.dtype
        if self.is_served and is_served_grouped(rows[0], weight[0], getattr(self.recipe, which), dtype):
            return grouped_matmul(rows, weight, plain.ends, dtype, fast=which == "output")
        return plain.output(restored(*rows, dtype), restored(*weight, dtype))


def casts(
    which: Product, recipe: Recipe, agree: Mapping[Dim, Agree], a_MK: Sequence[Tensor], b_NK: Sequence[Tensor]
) -> tuple[list[Rounded], list[Rounded]]:
    """Cast the operands of products to fp8: several on one side if linears share the other side."""
    m, n, k = DIMS[which]
    a, b = getattr(recipe, which)
    operands = [(matrix, a, m) for matrix in a_MK] + [(matrix, b, n) for matrix in b_NK]
    largest = _agreed(
        [_largest(matrix, cast.region) for matrix, cast, _ in operands],
        [shared_dims(cast, free, k) for _, cast, free in operands],
        agree,
    )
    found = []
    for (value, cast, _), own in zip(operands, largest, strict=True):
        scale = scale_of(own, cast, value)
        found.append((cast_to_fp8(value, cast, scale), scale))
    return found[: len(a_MK)], found[len(a_MK) :]


def _agreed(largest: list[Tensor], spans: Sequence[Sequence[Dim]], agree: Mapping[Dim, Agree]) -> list[Tensor]:
    """Largest values of whole regions, from this rank's parts: one collective for each dimension that ranks split.
    `spans`: the dimensions that the regions of each operand span."""
    for dim, of_all in agree.items():
        own = [at for at, dims in enumerate(spans) if dim in dims]
        if own:
            together = of_all(torch.cat([largest[at].flatten() for at in own]))
            for at, part in zip(own, torch.split(together, [largest[at].numel() for at in own]), strict=True):
                largest[at] = part.view_as(largest[at])
    return largest


def restored(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.to(scale.dtype) / scale).to(dtype)


def held_in(dtype: torch.dtype, pair: Pair) -> torch.dtype:
    """Dtype that holds dequantised operands: `dtype` (bf16 does, if scales are powers of 2), or a wider one."""
    return dtype if all(cast.is_power_of_2 for cast in pair) else torch.promote_types(dtype, torch.float32)


# ---- weights ---------------------------------------------------------------------------------------------------------

_VIEWS = frozenset(
    (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.t.default,
     torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.as_strided.default)
)  # fmt: skip


class Fp8Weight(Tensor):
    """A weight [O, I] of `dtype`, cast before FSDP gathers it: `codes` [O, I] in e4m3 divided by `scale` [1, 1].

    fp8 products use the two as they are; every other operation sees the dequantised weight. `codes` may share storage
    that FSDP frees and fills again; `scale` is replaced then. (As in torchao's float8 training.)
    """

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> "Fp8Weight":
        return Tensor._make_wrapper_subclass(cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    def restored(self) -> Tensor:
        return restored(self.codes, self.scale, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fp8Weight({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> "Fp8Weight":
        return Fp8Weight(inner["codes"], inner["scale"], dtype)

    __torch_function__ = nn.Parameter.__torch_function__  # none: `__torch_dispatch__` alone

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _VIEWS:
            own: Fp8Weight = args[0]
            return Fp8Weight(func(own.codes, *args[1:], **(kwargs or {})), own.scale, own.dtype)
        plain = torch.utils._pytree.tree_map_only(Fp8Weight, Fp8Weight.restored, (args, kwargs or {}))
        return func(*plain[0], **plain[1])
