"""fp8 in the reference: every operand of every linear rounded by a table of the format's numbers, region by region.

It shares only the recipes, which are data, with `parallel/fp8/matmul.py`. Max-pooling gives the largest values. A
search in the sorted table gives the nearest number. The rounded operands are multiplied in fp32, or in fp64 if the
model is fp64.

Legend: M, N free dimensions, K the contracted one; I inputs and O outputs of a linear, S tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models import hf_internals
from fivefold.parallel.fp8.recipes import RECIPES, Cast, Format, Pair, Recipe, by_row
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.plan import ParallelPlan

_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@lru_cache
def numbers(form: Format) -> Tensor:
    """All finite numbers of a format from zero up, fp64."""
    each = torch.arange(128, dtype=torch.uint8).view(_FORMATS[form]).double()
    return each[each.isfinite()]


def nearest(x: Tensor, form: Format) -> Tensor:
    """Round numbers (fp64) to the nearest of the format. Ties go to an even index of the table: its last bit is 0."""
    table = numbers(form).to(x.device)
    size = x.abs().clamp(max=float(table[-1]))
    above = torch.searchsorted(table, size.contiguous()).clamp(1, len(table) - 1)  # size <= table[above]
    below = above - 1
    up, down = table[above] - size, size - table[below]
    takes_upper = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(takes_upper, table[above], table[below]) * x.sign()


def cast(x_MK: Tensor, how: Cast, most: float | None = None) -> Tensor:
    """Round the operand [M, K] of a product, in fp32 or fp64. `most` sets the scale; None: its own largest value."""
    m, k = (size or whole for size, whole in zip(how.region, x_MK.shape, strict=True))
    wide = torch.float64 if x_MK.dtype == torch.float64 else torch.float32
    largest = F.max_pool2d(x_MK.to(wide).abs()[None, None], (m, k), ceil_mode=True)[0, 0]
    if most is not None:
        largest = torch.full_like(largest, most, dtype=torch.float64)
    rows, columns = torch.arange(x_MK.shape[0]) // m, torch.arange(x_MK.shape[1]) // k
    scale = float(numbers(how.form)[-1]) / largest.double().clamp(min=1e-30)[rows][:, columns]
    if how.is_power_of_2:
        scale = 2.0 ** scale.log2().floor()
    scale = scale.to(wide)
    return nearest((x_MK.to(wide) * scale).double(), how.form).to(wide) / scale


def multiplied(
    a_MK: Tensor, b_NK: Tensor, pair: Pair | None, most_a: float | None = None, most_b: float | None = None
) -> Tensor:
    """Multiply `a` by `b` transposed, both cast: [M, N] in the dtype of `a`."""
    if pair is None:
        return torch.mm(a_MK, b_NK.T)
    return torch.mm(cast(a_MK, pair[0], most_a), cast(b_NK, pair[1], most_b).T).to(a_MK.dtype)


@dataclass
class Amax:
    """Delayed scaling of one linear: the largest values of the last steps, and those of this one so far."""

    steps: int
    before: dict[str, list[float]] = field(default_factory=dict)
    now: dict[str, float] = field(default_factory=dict)

    def most(self, operand: str, x: Tensor, *, trains: bool = True) -> float | None:
        """The largest value that sets an operand's scale; None: the operand's own. If `trains`, also record it."""
        if trains:
            self.now[operand] = max(self.now.get(operand, 0.0), float(x.abs().max()))
        return max(self.before[operand]) or 1.0 if operand in self.before else None

    def end_step(self) -> None:
        for operand, value in self.now.items():
            self.before[operand] = [*self.before.get(operand, []), value if math.isfinite(value) else 0.0][
                -self.steps :
            ]
        self.now.clear()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, amax: Amax | None, trains: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.amax = recipe, amax
        ctx.most = (amax.most("input", x, trains=trains), amax.most("weight", weight, trains=trains)) if amax else ()
        return multiplied(x, weight, recipe.output, *ctx.most)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (x, weight), grad, recipe = ctx.saved_tensors, grads[0], ctx.recipe
        most_x, most_weight = ctx.most or (None, None)
        most = ctx.amax.most("gradient", grad) if ctx.amax else None
        return (
            multiplied(grad, weight.T, recipe.input_grad, most, most_weight),
            multiplied(grad.T, x.T, recipe.weight_grad, most, most_x),
            None, None, None,
        )  # fmt: skip


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe, amax: Amax | None = None
) -> Tensor:
    out: Tensor = _Linear.apply(x.flatten(0, -2), weight, recipe, amax, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    out = out.view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def put_matmuls(model: nn.Module, plan: ParallelPlan) -> list[Amax]:
    """Make the linears and experts of `model` that `plan` has in fp8 multiply by its recipe; their classes stay.
    Returns the state of delayed scaling; call `end_step` of each after every update of the weights."""
    fp8 = plan.feature(Fp8Plan)
    if not fp8.is_used:
        return []
    recipe, kept = RECIPES[plan.layout.fp8], list[Amax]()
    linears = [linear.name.rpartition(".")[0] for linear in fp8.linears]
    for name in (*linears, *(experts.name for experts in fp8.expert_modules)):
        module: Any = model.get_submodule(name)
        if hf_internals.is_experts(module):
            module.forward = partial(_inside, partial(linear, recipe=by_row(recipe)), module.forward)
        else:
            kept += [Amax(recipe.history)] if recipe.history else []
            module.forward = partial(_forward, module, recipe, kept[-1] if kept else None)
    return kept


def _forward(module: Any, recipe: Recipe, amax: Amax | None, x: Tensor) -> Tensor:
    weight = module.weight.T if hf_internals.linear_dims(module) == (1, 0) else module.weight
    return linear(x, weight, module.bias, recipe=recipe, amax=amax)


def _inside(product: Callable[..., Tensor], plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Run the forward of experts with `product` as every matmul; each is with the weights of one expert."""
    with (
        patch.object(F, "linear", product),
        patch.object(Tensor, "__matmul__", lambda x, weight: product(x, weight.T)),
        patch.object(torch, "matmul", lambda x, weight: product(x, weight.T)),
    ):
        return plain(*args, **kwargs)
