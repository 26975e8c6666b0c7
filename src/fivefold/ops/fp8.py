"""The three products of a linear in fp8, by a recipe of `core/fp8.py`.

Example: a row (1.0, -3.0, 0.1) has the largest value 3. Its scale is 448 / 3 = 149.3, or 128 as a power of two. With
128 it is cast to (128, -384, 13), which stands for (1.0, -3.0, 0.1016).

Where the device has no fp8 units, the same cast operands are multiplied in fp32 (fp64 for proofs): the effect on the
loss is the same, and nothing is faster.

Legend: M, N free dimensions, K the one summed over; I inputs and O outputs of a linear, S tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.core.fp8 import DIMS, Cast, Dim, Format, Product, Recipe, shared_dims
from fivefold.ops.linear import Dense

DTYPES: Mapping[Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LEAST = 1e-30  # a region of zeros is scaled as if this were its largest value

Agree = Callable[[Tensor], Tensor]  # largest values on this rank -> those of all ranks that split a dimension


# ---- casts -----------------------------------------------------------------------------------------------------------


def scale_of(x_MK: Tensor, cast: Cast, agree: Agree) -> Tensor:
    """What the numbers of `x_MK` are multiplied by, in fp32 (fp64 for fp64), of a shape that broadcasts with it."""
    largest = agree(_largest(x_MK, cast.region)).double().clamp(min=LEAST)
    scale = torch.finfo(DTYPES[cast.form]).max / largest
    if cast.is_power_of_2:
        scale = torch.exp2(torch.log2(scale).floor())
    for dim, size in enumerate(cast.region):
        if size is not None and size > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, x_MK.shape[dim])
    return scale.to(torch.float64 if x_MK.dtype == torch.float64 else torch.float32)


def cast_to_fp8(x_MK: Tensor, cast: Cast, scale: Tensor) -> Tensor:
    """The nearest numbers of eight bits to `x_MK * scale`, ties to even. What is too large becomes the largest; NaN
    stays."""
    dtype = DTYPES[cast.form]
    most = torch.finfo(dtype).max
    return (x_MK.to(scale.dtype) * scale).clamp(-most, most).to(dtype)


def _largest(x_MK: Tensor, region: tuple[int | None, int | None]) -> Tensor:
    """The largest absolute value of each region: [1 or M/m, 1 or K/k]."""
    free, summed = region
    if summed is None:
        return x_MK.abs().amax(dim=1 if free else (0, 1), keepdim=True)
    m, k = free or x_MK.shape[0], summed
    padded = F.pad(x_MK, (0, -x_MK.shape[1] % k, 0, -x_MK.shape[0] % m))
    parts = padded.unflatten(1, (-1, k)).unflatten(0, (-1, m))  # type: ignore[no-untyped-call]
    return parts.abs().amax(dim=(1, 3))  # type: ignore[no-any-return]


# ---- products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Float8:
    """The products of a linear by `recipe`. Its weight is [O, I], or [I, O] where `is_transposed` (GPT-2). `agree`: of
    the dimensions that several ranks split."""

    recipe: Recipe
    agree: Mapping[Dim, Agree]
    is_transposed: bool

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        out = self._product("output", x.reshape(-1, x.shape[-1]), self._of_outputs(weight))
        return out.view(*x.shape[:-1], -1)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        out = self._product("input_grad", grad.reshape(-1, grad.shape[-1]), self._of_outputs(weight).T)
        return out.view(*grad.shape[:-1], -1)

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        if self.recipe.weight_grad is None:
            return Dense(self.is_transposed).weight_grad(grad, x)
        out = self._product("weight_grad", grad.reshape(-1, grad.shape[-1]).T, x.reshape(-1, x.shape[-1]).T)
        return out.T if self.is_transposed else out

    def _of_outputs(self, weight: Tensor) -> Tensor:
        return weight.T if self.is_transposed else weight

    def _product(self, which: Product, a_MK: Tensor, b_NK: Tensor) -> Tensor:
        """`a` times `b` transposed, both cast, in the dtype of `a`: [M, N]."""
        m, n, k = DIMS[which]
        pair: tuple[Cast, Cast] = getattr(self.recipe, which)
        operands = ((a_MK, pair[0], m), (b_NK, pair[1], n))
        scales = [scale_of(each, cast, self._agreed(shared_dims(cast, free, k))) for each, cast, free in operands]
        values = [cast_to_fp8(each, cast, s) for (each, cast, _), s in zip(operands, scales, strict=True)]
        a, b = (value.to(scale.dtype) / scale for value, scale in zip(values, scales, strict=True))
        return (a @ b.T).to(a_MK.dtype)

    def _agreed(self, dims: tuple[Dim, ...]) -> Agree:
        def agree(largest: Tensor) -> Tensor:
            for dim in dims:
                if dim in self.agree:
                    largest = self.agree[dim](largest)
            return largest

        return agree
