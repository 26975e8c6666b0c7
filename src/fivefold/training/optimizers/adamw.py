"""AdamW: torch's own, fused. Its update is elementwise, so a shard is updated as the whole would be.

If its moments are kept in bf16 or 8 bits (`states.py`), the same kernel updates them piece by piece.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as functional_adamw

from fivefold.config import OptimizerSection
from fivefold.core.optimizers import OPTIMIZERS
from fivefold.parallel.dtensor import local
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import Unmoved, UpdateRule, Weights
from fivefold.training.optimizers.states import KeptState, begin, kept_states, rows_of


class _AdamW(UpdateRule):
    facts = OPTIMIZERS["adamw"]

    def build(self, model: nn.Module, options: OptimizerSection, but: Collection[str] = ()) -> torch.optim.AdamW:
        """AdamW over every trained parameter of `model` except those in `but`. Norms and biases (one dimension in the
        whole parameter, per expert) do not decay."""
        placement = state_of(model).placement
        shards = placement.shards
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and name not in set(but)}
        decayed = [p for name, p in parameters.items() if shards[name].dims > 1]
        others = [p for name, p in parameters.items() if shards[name].dims <= 1]
        is_plain = placement.layout.state_dtype == "fp32"
        kind = torch.optim.AdamW if is_plain else partial(_AdamWOfKeptStates, kept_states(model))
        return _over(decayed, others, options, options.learning_rate, kind, fused=True)

    def reference(self, weights: Weights, options: OptimizerSection, rate: float) -> list[torch.optim.Optimizer]:
        return [_over([*weights.blocks, *weights.matrices], weights.vectors, options, rate)]

    def overdue(self, part: Unmoved) -> str | None:
        if "exp_avg" not in part.state:
            return "has no optimizer state" if part.gradient else None
        return "did not take the update of its moments" if _shows(part) else None


RULE = _AdamW()
MOMENTS = ("exp_avg", "exp_avg_sq")


class _AdamWOfKeptStates(torch.optim.AdamW):
    """AdamW with moments kept in a smaller type; everything else is torch's."""

    def __init__(self, kept: Mapping[Tensor, KeptState], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept = kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        kept, state = self.kept[parameter], self.state[parameter]
        begin(state, kept, parameter, MOMENTS)
        before = state["step"].clone()
        state["step"] += 1
        weight, gradient = rows_of(local(parameter)), rows_of(local(grad))
        for rows in kept.pieces(parameter):
            first, second = (kept.read(state, kind, rows, weight.dtype) for kind in MOMENTS)
            beta1, beta2 = group["betas"]
            functional_adamw(
                [weight[rows]], [gradient[rows]], [first], [second], [], [before.clone()], fused=True, amsgrad=False,
                beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                maximize=False,
            )  # fmt: skip
            for kind, values in zip(MOMENTS, (first, second), strict=True):
                kept.write(state, kind, rows, values)


def _over(
    decayed: Sequence[Tensor], others: Sequence[Tensor], options: OptimizerSection, rate: float,
    kind: Callable[..., torch.optim.AdamW] = torch.optim.AdamW, **more: Any,
) -> torch.optim.AdamW:  # fmt: skip
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    filled = [group for group in groups if group["params"]] or groups[:1]  # an empty group if nothing is trained
    return kind(filled, lr=rate, betas=options.betas, eps=options.eps, **more)


def _shows(part: Unmoved) -> bool:
    """True if the last update is larger somewhere than two roundings of the weight can swallow."""
    weight, rate, count = part.weight, float(part.group["lr"]), float(part.state["step"])
    beta1, beta2 = part.group["betas"]
    first, second = (local(part.state[kind]).to(weight.device).double() for kind in ("exp_avg", "exp_avg_sq"))
    root = (second / (1 - beta2**count)).sqrt() + part.group["eps"]
    update, decay = first / (1 - beta1**count) / root, part.group["weight_decay"] * weight.double()
    limits = torch.finfo(weight.dtype)
    swallowed = 4 * limits.eps * (weight.double().abs() + rate * update.abs()) + limits.tiny
    return bool(torch.any(rate * (update + decay).abs() > swallowed))
