"""The three products of a linear in fp8: how each operand is scaled and rounded to eight bits, by recipe.

A product sums over one dimension of both operands, the last: `a [M, K]` times `b [N, K]` is [M, N]. Each operand is
divided into regions, each region is scaled so that its largest value becomes the largest number of fp8, and rounded
("cast"). The recipes differ in regions and in formats:

| recipe | region of activations and gradients | region of weights | formats | source |
|---|---|---|---|---|
| `tensorwise` | tensor | tensor | e4m3, gradients e5m2 | arXiv:2209.05433 |
| `rowwise` | row | row | e4m3; scales are powers of 2 | PyTorch's float8 recipes |
| `rowwise_gw_hp` | row | row, tensor in backward | e4m3; weight gradients in the compute dtype | same |
| `blockwise` | 1 x 128 | 128 x 128 | e4m3 | DeepSeek-V3, arXiv:2412.19437 |
| `mxfp8` | 1 x 32 | 1 x 32 | e4m3; scales are powers of 2 | OCP Microscaling, arXiv:2310.10537 |

Example: a row (1.0, -3.0, 0.1) has the largest value 3. Rowwise, its scale is 448 / 3 = 149.3, as a power of two 128.
It is cast to (128, -384, 12.8 -> 13), which stands for (1.0, -3.0, 0.1016).

Where the device has no fp8 units, the same rounded operands are multiplied in fp32 (fp64 for proofs): the effect on
the loss is the same, and nothing is faster.

Legend: M, N free dimensions, K the one summed over; I inputs and O outputs of a linear, S tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.ops.linear import Dense

LEAST = 1e-30  # of a region's largest value: a region of zeros is scaled as if it had this one


# ---- formats ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A format of eight bits, and its largest number."""

    dtype: torch.dtype
    most: float


E4M3 = Format(torch.float8_e4m3fn, 448.0)
E5M2 = Format(torch.float8_e5m2, 57344.0)


# ---- casts -----------------------------------------------------------------------------------------------------------

Shared = Callable[[Tensor], Tensor]  # the largest values of this rank's part of regions -> those of all ranks' parts


@dataclass(frozen=True)
class Cast:
    """How an operand [M, K] is cast. `region`: how much of M and of K has one scale; None is all of it."""

    form: Format
    region: tuple[int | None, int | None]
    is_power_of_2: bool = False

    def scale(self, x_MK: Tensor, share: Shared) -> Tensor:
        """What every number is multiplied by, in fp32 (fp64 for fp64): it broadcasts with `x_MK`."""
        most = share(self._largest(x_MK)).double().clamp(min=LEAST)
        scale = self.form.most / most
        if self.is_power_of_2:
            scale = torch.exp2(torch.log2(scale).floor())
        scale = scale.to(_wide(x_MK))
        return self._spread(scale, x_MK.shape)

    def __call__(self, x_MK: Tensor, share: Shared) -> tuple[Tensor, Tensor]:
        """The numbers in fp8, nearest ones with ties to even, and their scale. Too large ones become the largest; NaN
        stays."""
        scale = self.scale(x_MK, share)
        scaled = x_MK.to(scale.dtype) * scale
        return scaled.clamp(-self.form.most, self.form.most).to(self.form.dtype), scale

    def _largest(self, x_MK: Tensor) -> Tensor:
        """Of each region: [1 or M/m, 1 or K/k]."""
        free, summed = self.region
        if summed is None:
            return x_MK.abs().amax(dim=1 if free else (0, 1), keepdim=True)
        m, k = free or x_MK.shape[0], summed
        padded = F.pad(x_MK, (0, -x_MK.shape[1] % k, 0, -x_MK.shape[0] % m))
        return padded.unflatten(1, (-1, k)).unflatten(0, (-1, m)).abs().amax(dim=(1, 3))  # type: ignore[no-any-return,no-untyped-call]

    def _spread(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """A scale for every number that does not share it by broadcasting."""
        for dim, size in enumerate(self.region):
            if size and size > 1:
                scale = scale.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
        return scale


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---- recipes ---------------------------------------------------------------------------------------------------------

Pair = tuple[Cast, Cast]


@dataclass(frozen=True)
class Recipe:
    """How the operands of each product are cast; where there is no pair, it is multiplied in the compute dtype.

    `output`: activations [S, I] and weight [O, I]. `input_grad`: gradients [S, O] and weight [I, O]. `weight_grad`:
    gradients [O, S] and activations [I, S].
    """

    output: Pair
    input_grad: Pair
    weight_grad: Pair | None


_TENSOR, _TENSOR_GRAD = Cast(E4M3, (None, None)), Cast(E5M2, (None, None))
_ROW, _TENSOR_2 = Cast(E4M3, (1, None), is_power_of_2=True), Cast(E4M3, (None, None), is_power_of_2=True)
_STRIP, _BLOCK = Cast(E4M3, (1, 128)), Cast(E4M3, (128, 128))
_MICRO = Cast(E4M3, (1, 32), is_power_of_2=True)

RECIPES: dict[str, Recipe] = {
    "tensorwise": Recipe((_TENSOR, _TENSOR), (_TENSOR_GRAD, _TENSOR), (_TENSOR_GRAD, _TENSOR)),
    "rowwise": Recipe((_ROW, _ROW), (_ROW, _ROW), (_ROW, _ROW)),
    "rowwise_gw_hp": Recipe((_ROW, _ROW), (_ROW, _TENSOR_2), None),
    "blockwise": Recipe((_STRIP, _BLOCK), (_STRIP, _BLOCK), (_STRIP, _STRIP)),
    "mxfp8": Recipe((_MICRO, _MICRO), (_MICRO, _MICRO), (_MICRO, _MICRO)),
}


# ---- products --------------------------------------------------------------------------------------------------------


def own(x: Tensor) -> Tensor:
    """`Shared` where a rank has whole regions."""
    return x


@dataclass(frozen=True)
class Splits:
    """Which dimensions of a linear ranks share, each with what makes the largest value of all of them: its `inputs`
    (a row under tp), its `outputs` (a column), its `tokens` (cp)."""

    inputs: Shared = own
    outputs: Shared = own
    tokens: Shared = own


@dataclass(frozen=True)
class Float8:
    """The products of a linear by `recipe`. Its weight is [O, I], or [I, O] where `is_transposed` (GPT-2)."""

    recipe: Recipe
    splits: Splits
    is_transposed: bool

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        rows, splits = x.reshape(-1, x.shape[-1]), self.splits
        out = product(rows, self._of_outputs(weight), self.recipe.output, splits.tokens, splits.outputs, splits.inputs)
        return out.view(*x.shape[:-1], -1)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        rows, splits = grad.reshape(-1, grad.shape[-1]), self.splits
        weight = self._of_outputs(weight).T
        out = product(rows, weight, self.recipe.input_grad, splits.tokens, splits.inputs, splits.outputs)
        return out.view(*grad.shape[:-1], -1)

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        if self.recipe.weight_grad is None:
            return Dense(self.is_transposed).weight_grad(grad, x)
        x, grad, splits = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1]), self.splits
        out = product(grad.T, x.T, self.recipe.weight_grad, splits.outputs, splits.inputs, splits.tokens)
        return out.T if self.is_transposed else out

    def _of_outputs(self, weight: Tensor) -> Tensor:
        return weight.T if self.is_transposed else weight


def product(a_MK: Tensor, b_NK: Tensor, casts: Pair, of_m: Shared, of_n: Shared, of_k: Shared) -> Tensor:
    """`a` times `b` transposed, both cast, in the dtype of `a`: [M, N]. `of_m`, `of_n`, `of_k`: who shares M, N, K."""
    values, scales = zip(
        *(
            cast(operand, _both(of_free, of_k, cast))
            for operand, cast, of_free in ((a_MK, casts[0], of_m), (b_NK, casts[1], of_n))
        ),
        strict=True,
    )
    a, b = (value.to(scale.dtype) / scale for value, scale in zip(values, scales, strict=True))
    return (a @ b.T).to(a_MK.dtype)  # type: ignore[no-any-return]


def _both(of_free: Shared, of_k: Shared, cast: Cast) -> Shared:
    """A region of all of a dimension is shared with those who have other parts of the dimension."""
    free, summed = cast.region
    first = of_free if free is None else own
    second = of_k if summed is None else own
    return lambda x: second(first(x))
