"""The experts of every model: dropless, tokens sorted by expert, one grouped matmul for all of them.

`transformers` calls `experts_forward` in place of its own loop (see `register_experts`), with the experts' weights as
the model keeps them: one tensor for all, [E, outputs, inputs] or transposed, with or without biases. The model's own
router picks the experts of a token and their weights.

Legend: N tokens, K experts per token, S = N * K rows sorted by expert, E experts, D hidden size, I and O inputs and
outputs of an expert's matmul (`ops/linear.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models import hf_internals
from fivefold.models.facts import ORDERS, Block, ExpertFeatures, Order
from fivefold.ops.linear import PLAIN, Linears

EXPERTS = "fivefold"  # as `transformers` knows them

Compute = Callable[[Tensor, Tensor], Tensor]  # rows [S, D] sorted by expert, counts [E] -> outputs of the counted rows


def register_experts() -> None:
    """Offer this function to `transformers` under `EXPERTS`. Calling it again changes nothing."""
    hf_internals.register_experts(EXPERTS, experts_forward)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # rows per expert depend on the data
def experts_forward(module: nn.Module, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """The experts function of the models, in the signature of `transformers`: [N, D]."""
    return routed(hidden_ND, index_NK, weights_NK, number_of_experts(module), lambda x, c: expert_mlp(module, x, c))


def routed(
    hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor, experts: int, compute: Compute,
    kernels: "RowKernels | None" = None,
) -> Tensor:  # fmt: skip
    """Send each token to its K experts and sum their results, weighted: [N, D]. Experts are 0 to E - 1.

    A pick of E is a dropped one: it adds nothing to the output and nothing to any gradient. Rows of dropped picks come
    last, and `compute` leaves them out. `kernels`: None runs operator by operator.
    """
    order_S, counts_E = sort_by_expert(index_NK, experts)
    back_NK, kernels = inverse(order_S).view_as(index_NK), kernels or EAGER
    # Rows are K times the hidden states: no local name keeps them alive longer than necessary.
    made_SD = compute(_Spread.apply(hidden_ND, order_S, back_NK, kernels), counts_E)  # type: ignore[no-untyped-call]
    if dropped := len(order_S) - len(made_SD):
        made_SD = F.pad(made_SD, (0, 0, 0, dropped))
    return _Weighted.apply(made_SD, weights_NK, order_S, back_NK, hidden_ND.dtype, kernels)  # type: ignore[no-any-return,no-untyped-call]


def sort_by_expert(index_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The source row (of N * K) at each place after sorting by expert, int64 [S]; and the rows per expert, int64 [E].
    Dropped picks come last and are not counted. The host does not wait for the device."""
    sorted_S, order_S = index_NK.reshape(-1).sort(stable=True)
    firsts = torch.searchsorted(sorted_S, torch.arange(experts + 1, dtype=sorted_S.dtype, device=sorted_S.device))
    return order_S, firsts.diff()


def inverse(order: Tensor) -> Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


class Permute(torch.autograd.Function):
    """Permute rows; the inverse `back` permutes their gradients back, without any summation."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, order_S: Tensor, back_S: Tensor) -> Tensor:
        ctx.back = back_S
        return rows_SD[order_S]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.back], None, None


class _Spread(torch.autograd.Function):
    """Tokens [N, D] -> a row for each of their picks, sorted by expert [S, D]; gradients are summed by token."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, order_S: Tensor, back_NK: Tensor, kernels: "RowKernels") -> Tensor:
        ctx.back, ctx.kernels = back_NK, kernels
        return hidden_ND[order_S // back_NK.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.kernels.sum_picks(grads[0], ctx.back), None, None, None


class _Weighted(torch.autograd.Function):
    """Rows sorted by expert [S, D], times the weights of their picks, summed by token [N, D] in the type of the
    weights; no product of all rows is materialised in it."""

    @staticmethod
    def forward(
        ctx: Any, made_SD: Tensor, weights_NK: Tensor, order_S: Tensor, back_NK: Tensor, dtype: torch.dtype,
        kernels: "RowKernels",
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(made_SD, weights_NK)
        ctx.places, ctx.kernels = (order_S, back_NK), kernels
        return kernels.sum_weighted(made_SD.detach(), weights_NK.detach(), back_NK, dtype)  # one graph, also for none

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        made_SD, weights_NK = ctx.saved_tensors
        return (*ctx.kernels.weighted_gradients(grads[0], made_SD, weights_NK, *ctx.places), None, None, None, None)


# ---- sums over picks and their gradients -----------------------------------------------------------------------------


def _sum_picks(rows_SD: Tensor, back_NK: Tensor) -> Tensor:
    return rows_SD[back_NK].sum(1)


def _sum_weighted(made_SD: Tensor, weights_NK: Tensor, back_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """The weighted sum of the K rows of each token, pick by pick: [N, D] of `dtype`."""
    first, *others = zip(back_NK.unbind(1), weights_NK.unsqueeze(-1).unbind(1), strict=True)
    total_ND = made_SD[first[0]] * first[1]
    for back_N, weights_N1 in others:
        total_ND += made_SD[back_N] * weights_N1
    return total_ND.to(dtype)


def _weighted_gradients(
    grad_ND: Tensor, made_SD: Tensor, weights_NK: Tensor, order_S: Tensor, back_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `_sum_weighted` for the rows [S, D] and the weights [N, K]."""
    precise_ND = grad_ND.to(weights_NK.dtype)
    of_weights = torch.stack([(precise_ND * made_SD[back_N]).sum(-1) for back_N in back_NK.unbind(1)], 1)
    of_rows = grad_ND.to(made_SD.dtype)[order_S // back_NK.shape[1]]
    return of_rows.mul_(weights_NK.flatten()[order_S].unsqueeze(-1)), of_weights  # multiplied in the wider type


@dataclass(frozen=True)
class RowKernels:
    """Sums over the picks of a token and their gradients: by operator, or compiled to read each row once."""

    sum_picks: Callable[..., Tensor] = _sum_picks
    sum_weighted: Callable[..., Tensor] = _sum_weighted
    weighted_gradients: Callable[..., tuple[Tensor, Tensor]] = _weighted_gradients

    def built(self, build: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> "RowKernels":
        """The same kernels, each as `build(name, function)` returns it."""
        own = (self.sum_picks, self.sum_weighted, self.weighted_gradients)
        return RowKernels(*(build("rows of experts", forward) for forward in own))


EAGER = RowKernels()


# ---- the computation of an expert ------------------------------------------------------------------------------------


def router_buffers(model: nn.Module) -> list[str]:
    """The persistent buffers of routers, which are trained without a gradient (DeepSeek's `e_score_correction_bias`).
    The model computes every other buffer itself."""
    stored = model.state_dict(keep_vars=True)
    beside = tuple(f"{n.rpartition('.')[0]}." for n, module in model.named_modules() if hf_internals.is_experts(module))
    return [name for name, _ in model.named_buffers() if name in stored and beside and name.startswith(beside)]


def number_of_experts(module: nn.Module) -> int:
    """The number of experts in this module; under expert parallelism, those of this rank."""
    return next(module.parameters()).shape[0]


def expert_mlp(
    module: Any, x_SD: Tensor, counts_E: Tensor, *, biased_from: int = 0, linears: Linears = PLAIN
) -> Tensor:
    """Apply the experts of `module` to rows sorted by expert: two grouped matmuls by `linears`, with the module's own
    gate and activation between them. `module.branches`, by the names of matrices, add to these products. Under
    `expert_tp` the module has some features of every expert: the result is a partial sum, and `down_proj_bias` covers
    some outputs only, from number `biased_from` on."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    made = _linear(module, first, x_SD, counts_E, linears)
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    made = _linear(module, "down_proj", made, counts_E, linears, biased_from)
    return module.post_expert_norm(made) if module.has_post_expert_norm else made


def _linear(module: Any, name: str, x_SI: Tensor, counts_E: Tensor, linears: Linears, biased_from: int = 0) -> Tensor:
    branch = getattr(module, "branches", {}).get(name)
    more_SO = branch(linears, x_SI, counts_E) if branch else None
    out_SO = linears.grouped(x_SI, getattr(module, name), counts_E, is_transposed=module.is_transposed)
    if more_SO is not None:
        out_SO = out_SO + more_SO
    if not module.has_bias:
        return out_SO
    bias: Tensor = getattr(module, f"{name}_bias")
    bias_EO = F.pad(bias, (biased_from, out_SO.shape[1] - biased_from - bias.shape[1]))
    return out_SO + bias_EO.repeat_interleave(counts_E, dim=0, output_size=len(x_SI))


# ---- the inputs of a feature -----------------------------------------------------------------------------------------

_FEATURES, _PARTS, _ROWS = 7, ((0, 4), (4, 7)), 64  # sizes of the trial in `_order`


def expert_features(module: Any) -> ExpertFeatures:
    """Locate the inner features of the experts `module` in its parameters.

    The gate decides which columns form a feature. Its `_apply_gate` is tried on a few numbers, and an order that is not
    in `ORDERS` is refused.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    made, read = (2, 1) if module.is_transposed else (1, 2)
    unknown = {leaf for leaf, _ in module.named_parameters()} - {
        first, f"{first}_bias", "down_proj", "down_proj_bias",
    }  # fmt: skip
    if unknown or module.has_post_expert_norm:
        what = sorted(unknown)[0] if unknown else "its norm"
        return ExpertFeatures(first, made, read, "", f"{what} acts on what all features of an expert have made")
    order, refusal = _order(module)
    return ExpertFeatures(first, made, read, order, refusal)


def _order(module: Any) -> tuple[str, str | None]:
    """(name of the order in which the activation of `module` reads its inputs, None), or ("", why no order fits).

    An order fits if the activation of some features alone equals that part of the activation of all: with gate and up
    concatenated, feature 2 of 7 is computed from the inputs 2 and 9.
    """
    activate, inputs = (module._apply_gate, 2) if module.has_gate else (module.act_fn, 1)
    x = 3 * torch.randn(_ROWS, inputs * _FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        whole = activate(x)
        for name, (per_feature, order) in ORDERS.items():
            if per_feature == inputs and all(_agrees(activate, order, x, whole, part) for part in _PARTS):
                return name, None
    except Exception as error:  # the model's own code
        return "", f"its activation cannot be tried ({type(error).__name__}: {error})"
    return "", f"it is not known in which order its activation reads the inputs of a feature ({inputs} for each)"


def _agrees(activate: Callable[[Tensor], Tensor], order: Order, x: Tensor, whole: Tensor, part: Block) -> bool:
    mine = torch.cat([x[:, start:stop] for start, stop in order(part, _FEATURES)], dim=1)
    expected, found = whole[:, slice(*part)], activate(mine)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
