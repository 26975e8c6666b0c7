"""An optimizer of a user's own, run by its path: Lion (arXiv:2302.06675) with a smooth sign and a correction by a count
that is a Python number."""

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Its momentum, `m`, has a name that no optimizer of the library has."""

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"], state["m"] = 0, torch.zeros_like(p)
                state["count"] += 1
                update = state["m"] * beta1 + p.grad * (1 - beta1)
                p.mul_(1 - rate * group["weight_decay"])
                p.add_(torch.tanh(100 * update / (1 - beta1 ** state["count"])), alpha=-rate)
                state["m"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
