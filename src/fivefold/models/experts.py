"""The experts of every model: dropless, tokens sorted by expert, one grouped matmul for all of them.

`transformers` calls `experts_forward` in place of its own loop (see `register`), with the experts' weights as the
model keeps them: one tensor for all, [E, outputs, inputs] or transposed, with biases or not. Which experts a token goes
to, and with which weights, is the model's own router's business.

Legend: N tokens, K experts per token, S = N * K rows sorted by expert, E experts, D hidden size, I and O inputs and
outputs of an expert's matmul (`ops/linear.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models import hf_internals
from fivefold.models.facts import ORDERS, Block, ExpertFeatures, Order
from fivefold.ops.linear import PLAIN, GroupedAdapter, Linears

NAME = "fivefold"

Compute = Callable[
    [Tensor, Tensor], Tensor
]  # rows [S, D] sorted by expert, counts [E] -> what the experts make of them


def register() -> None:
    """Offer this function to `transformers` under `NAME`. Calling it again changes nothing."""
    hf_internals.register_experts(NAME, experts_forward)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # rows per expert depend on the data
def experts_forward(module: nn.Module, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """The experts function of the models, in the signature of `transformers`: [N, D]."""
    return routed(hidden_ND, index_NK, weights_NK, number_of_experts(module), lambda x, c: expert_mlp(module, x, c))


def routed(hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor, experts: int, compute: Compute) -> Tensor:
    """Send each token to its K experts and sum their results, weighted. Experts are 0 to E - 1. A pick of E is a
    dropped one: it adds nothing to the output and nothing to any gradient."""
    count, top_k = index_NK.shape
    order_S, counts_E = sort_by_expert(index_NK, experts)
    # Rows are K times the hidden states: no name holds them longer than something needs them.
    rows_SD = Permute.apply(hidden_ND.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1), order_S)  # type: ignore[no-untyped-call]
    if len(counts_E) > experts:  # those that are dropped stand last
        dropped = int(counts_E[experts])
        made_SD = F.pad(compute(rows_SD[: len(rows_SD) - dropped], counts_E[:experts]), (0, 0, 0, dropped))
    else:
        made_SD = compute(rows_SD, counts_E)
    del rows_SD
    back_NKD = Permute.apply(made_SD, inverse(order_S)).unflatten(0, (count, top_k))  # type: ignore[no-untyped-call]
    del made_SD
    return (back_NKD * weights_NK.unsqueeze(-1)).sum(1).to(hidden_ND.dtype)  # type: ignore[no-any-return]


def sort_by_expert(index_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Which of the N * K rows stands at each place once they are sorted by expert, int64 [S]; rows per expert [E],
    and, where picks are dropped, one number more: how many."""
    flat = index_NK.reshape(-1)
    return flat.argsort(stable=True), torch.bincount(flat, minlength=experts)


def inverse(order: Tensor) -> Tensor:
    """The order that undoes `order`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


class Permute(torch.autograd.Function):
    """Rows in another order; backward puts them back, without adding anything up."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, order_S: Tensor) -> Tensor:
        ctx.back = inverse(order_S)
        return rows_SD[order_S]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.back], None


# ---- what an expert computes -----------------------------------------------------------------------------------------


def router_buffers(model: nn.Module) -> list[str]:
    """The persistent buffers of routers, which are trained without a gradient (DeepSeek's `e_score_correction_bias`).
    Every other buffer is computed by the model itself."""
    stored = model.state_dict(keep_vars=True)
    beside = tuple(f"{n.rpartition('.')[0]}." for n, module in model.named_modules() if hf_internals.is_experts(module))
    return [name for name, _ in model.named_buffers() if name in stored and beside and name.startswith(beside)]


def number_of_experts(module: nn.Module) -> int:
    """How many experts this module holds: after expert parallelism has cut it, those of this rank."""
    return next(module.parameters()).shape[0]


def expert_mlp(
    module: Any, x_SD: Tensor, counts_E: Tensor, *, biased_from: int = 0, linears: Linears = PLAIN
) -> Tensor:
    """The experts of `module` on rows sorted by expert: two grouped matmuls, as `linears` multiply, with the module's
    own gate and activation between them. Under `expert_tp` the module has some features of every expert: the result is
    a partial sum, and `down_proj_bias` covers some outputs only, from number `biased_from` on."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    made = _linear(module, first, x_SD, counts_E, linears)
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    made = _linear(module, "down_proj", made, counts_E, linears, biased_from)
    return module.post_expert_norm(made) if module.has_post_expert_norm else made


def _linear(module: Any, name: str, x_SI: Tensor, counts_E: Tensor, linears: Linears, biased_from: int = 0) -> Tensor:
    out_SO = linears.grouped(
        x_SI, getattr(module, name), counts_E, is_transposed=module.is_transposed, adapter=_adapter(module, name)
    )
    if not module.has_bias:
        return out_SO
    bias: Tensor = getattr(module, f"{name}_bias")
    bias_EO = F.pad(bias, (biased_from, out_SO.shape[1] - biased_from - bias.shape[1]))
    return out_SO + bias_EO.repeat_interleave(counts_E, dim=0, output_size=len(x_SI))


def _adapter(module: Any, name: str) -> GroupedAdapter | None:
    """What is beside the matrices `name` of the experts (`models/adapter.py`)."""
    if not hasattr(module, "lora_A") or not hasattr(module.lora_A, name):
        return None
    return GroupedAdapter(getattr(module.lora_A, name), getattr(module.lora_B, name), module.lora_scale)


# ---- which inputs make a feature -------------------------------------------------------------------------------------

_FEATURES, _PARTS, _ROWS = 7, ((0, 4), (4, 7)), 64  # of what `_order` tries


def expert_features(module: Any) -> ExpertFeatures:
    """Where the inner features of the experts `module` lie in its parameters.

    The gate decides which columns make a feature. Its `_apply_gate` is tried on a few numbers, and an order that is not
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

    An order fits if the activation gives the same for a part of the features alone as for that part among all: with
    gate and up after each other, feature 2 of 7 is made of the inputs 2 and 9.
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
