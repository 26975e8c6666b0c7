"""AdamW, torch's own and fused: it updates each element by its own gradient, and so parts as it would the whole."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config import OptimizerSection
from fivefold.core.optimizers import OPTIMIZERS
from fivefold.parallel.dtensor import local
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import Unmoved, UpdateRule, Weights


class _AdamW(UpdateRule):
    facts = OPTIMIZERS["adamw"]

    def build(self, model: nn.Module, options: OptimizerSection, but: Collection[str] = ()) -> torch.optim.AdamW:
        """Over every parameter of `model` `but` those. Norms and biases (one dimension, seen whole, per expert) do not
        decay."""
        shards = state_of(model).plan.shards
        parameters = {name: p for name, p in model.named_parameters() if name not in set(but)}
        decayed = [p for name, p in parameters.items() if shards[name].dims > 1]
        others = [p for name, p in parameters.items() if shards[name].dims <= 1]
        return _over(decayed, others, options, options.learning_rate, fused=True)

    def reference(self, weights: Weights, options: OptimizerSection, rate: float) -> list[torch.optim.Optimizer]:
        return [_over([*weights.blocks, *weights.matrices], weights.vectors, options, rate)]

    def overdue(self, part: Unmoved) -> str | None:
        if "exp_avg" not in part.state:
            return "has no optimizer state" if part.gradient else None
        return "did not take the update of its moments" if _shows(part) else None


RULE = _AdamW()


def _over(
    decayed: Sequence[Tensor], others: Sequence[Tensor], options: OptimizerSection, rate: float, **more: Any
) -> torch.optim.AdamW:
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=rate, betas=options.betas, eps=options.eps, **more)


def _shows(part: Unmoved) -> bool:
    """Whether the last update is larger somewhere than what two roundings of the weight can swallow."""
    weight, rate, count = part.weight, float(part.group["lr"]), float(part.state["step"])
    beta1, beta2 = part.group["betas"]
    first, second = (local(part.state[kind]).to(weight.device).double() for kind in ("exp_avg", "exp_avg_sq"))
    root = (second / (1 - beta2**count)).sqrt() + part.group["eps"]
    update, decay = first / (1 - beta1**count) / root, part.group["weight_decay"] * weight.double()
    limits = torch.finfo(weight.dtype)
    swallowed = 4 * limits.eps * (weight.double().abs() + rate * update.abs()) + limits.tiny
    return bool(torch.any(rate * (update + decay).abs() > swallowed))
