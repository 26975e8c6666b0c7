"""Optimizers that are not torch's, as their papers write them: what an update looks at differs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Own(torch.optim.Optimizer):
    """Options become those of the groups; `update` is given a parameter, its gradient, its state and its group."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["step"] = self.state[p].get("step", 0) + 1
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Own):
    """arXiv:2302.06675."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        p.add_(momentum.lerp(grad, 0.1).sign() + 0.1 * p, alpha=-group["lr"])
        momentum.lerp_(grad, 0.01)


class Lookahead(Own):
    """SGD, of which every fifth step goes half-way back to where it was five steps ago (arXiv:1907.08610)."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        slow = state.setdefault("slow", p.clone())
        p.add_(grad, alpha=-group["lr"])
        if state["step"] % 5 == 0:
            p.copy_(slow.lerp_(p, 0.5))


class Lamb(Own):
    """arXiv:1904.00962, without its moments: a tensor moves by a part of its own norm."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] * float(p.norm() / (grad.norm() + 1e-9)))


class Normed(Own):
    """SGD that divides a gradient by its norm: after `begins` steps, each `every` steps, from `least` columns on."""

    def __init__(self, params: Any, lr: float = 0.01, begins: int = 0, every: int = 1, least: int = 0) -> None:
        super().__init__(params, lr, begins=begins, every=every, least=least)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        is_on = state["step"] > group["begins"] and state["step"] % group["every"] == 0
        norm = grad.norm() if is_on and p.shape[-1] >= group["least"] else 1.0
        p.add_(grad / norm, alpha=-group["lr"])


class Late(Own):
    """SGD that looks at a gradient `by` something, by its norm, and uses what it saw after a thousand steps."""

    def __init__(
        self, params: Any, lr: float = 0.01, by: Callable[[Tensor], Tensor] = torch.linalg.vector_norm
    ) -> None:
        super().__init__(params, lr)
        self.by = by

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        seen = self.by(grad)
        p.add_(grad / seen if state["step"] > 1000 else grad, alpha=-group["lr"])


class Compiled(Own):
    """The sign of a gradient, by a function that is compiled."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        torch.compile(_sign, fullgraph=True)(p, grad, group["lr"])


def _sign(p: Tensor, grad: Tensor, rate: float) -> None:
    p.add_(grad.sign(), alpha=-rate)


class Clipped(Own):
    """SGD that clips by the norm of all gradients after `waits` steps. Its limit is no option of its groups."""

    def __init__(self, params: Any, lr: float = 0.01, clip: float = 0.0, waits: int = 0) -> None:
        super().__init__(params, lr)
        self.clip, self.waits, self.taken, self.factor = clip, waits, 0, 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(each.square().sum()) for each in every) ** 0.5
        self.taken += 1
        self.factor = self.clipped(norm)
        super().step()

    def clipped(self, norm: float) -> float:
        return min(1.0, self.clip / norm) if self.clip and self.taken > self.waits else 1.0

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] * self.factor)


class Capped(Own):
    """SGD that holds every element below five times the root mean square of its tensor, which numpy computes."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        most = 5 * float(np.sqrt(np.square(grad.numpy()).mean()))
        p.add_(grad.clamp(-most, most), alpha=-group["lr"])


class Spiked(Clipped):
    """SGD that leaves out a step with a norm of all gradients above thrice the mean of those so far."""

    mean = 0.0

    def clipped(self, norm: float) -> float:
        self.mean += (norm - self.mean) / self.taken
        return float(norm <= 3 * self.mean)


class Prodigy(torch.optim.Optimizer):
    """Algorithm 4 of arXiv:2306.06101: all steps grow from next to nothing, by sums over all parameters."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "d": d0})
        self.r = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        beta1, beta2, size = 0.9, 0.999, 0.0
        root, d = beta2**0.5, self.param_groups[0]["d"]
        self.r *= root
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                state, grad = self.state[p], p.grad
                if not state:
                    state |= {"first": p.clone(), **{key: torch.zeros_like(p) for key in "mvs"}}
                rate = (1 - root) * group["lr"] * d**2
                state["m"].mul_(beta1).add_(grad, alpha=(1 - beta1) * d)
                state["v"].mul_(beta2).addcmul_(grad, grad, value=(1 - beta2) * d**2)
                state["s"].mul_(root).add_(grad, alpha=rate)
                self.r += rate * float((grad * (state["first"] - p)).sum())
                size += float(state["s"].abs().sum())
                p.addcdiv_(state["m"], state["v"].sqrt() + d * 1e-8, value=-group["lr"] * d)
        for group in self.param_groups:
            group["d"] = max(d, self.r / size) if size else d
