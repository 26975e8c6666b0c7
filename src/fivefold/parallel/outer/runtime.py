"""Outer steps of a live model (DiLoCo, arXiv:2311.08105).

Between two outer steps every replica trains its own weights on its own rows. An outer step takes the mean over the
replicas of how far each has come, outer weights minus its weights, as the gradient of SGD with Nesterov momentum on the
outer weights, and every replica goes on from these, with the same bits. The optimizer state of a replica stays its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.parallel.dtensor import local
from fivefold.parallel.nodes.levels import mean_in_order
from fivefold.parallel.outer.spec import averaged, buckets
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.state import LivePart, ParallelState

MOMENTUM = "outer_momentum"  # kind of a checkpoint's tensors, beside `weight`, which are the outer weights
_APART = "replica"  # prefix of the kinds of one replica


@dataclass
class OuterSteps(LivePart):
    """The outer steps of one model on this rank. Every model has them; without `outer.every` there are none.

    `weights`: this rank's part of the outer weights, by parameter, once begun. `have_met`: every replica has them now.
    """

    plan: ParallelPlan
    group: dist.ProcessGroup | None  # of the replicas
    weights: dict[str, Tensor] = field(default_factory=dict)
    have_met: bool = False
    _parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    _optimizer: torch.optim.SGD | None = None

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        return cls(state.plan, state.mesh.groups.get("dp_replicate"))

    @property
    def is_on(self) -> bool:
        return self.plan.layout.outer_every > 0

    def is_due(self, step: int) -> bool:
        """True if an outer step follows `step`, counted from 1."""
        return self.is_on and step % self.plan.layout.outer_every == 0

    def begin(self, model: nn.Module, *, learning_rate: float, momentum: float, nesterov: bool) -> None:
        """Take the weights of the model, which are the same on all replicas, for the outer weights."""
        if not self.is_on:
            return
        named = dict(model.named_parameters())
        self._parameters = {name: named[name] for name in averaged(self.plan)}
        self.weights = {name: local(parameter).clone() for name, parameter in self._parameters.items()}
        self._optimizer = torch.optim.SGD(
            self.weights.values(), lr=learning_rate, momentum=momentum, nesterov=nesterov and momentum > 0
        )
        for weight in self.weights.values() if momentum else ():  # allocated before the first outer step
            self._optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self) -> None:
        """Take an outer step. Every rank calls this after the same step."""
        assert self._optimizer is not None and self.group is not None, "outer steps are begun"
        for names in buckets({name: weight.numel() for name, weight in self.weights.items()}):
            weights = [self.weights[name] for name in names]
            moved = [weight - local(self._parameters[name]) for name, weight in zip(names, weights, strict=True)]
            mean = mean_in_order(torch.cat([part.flatten() for part in moved]), self.group)
            parts = torch.split(mean, [weight.numel() for weight in weights])
            for weight, part in zip(weights, parts, strict=True):
                weight.grad = part.view_as(weight)
            self._optimizer.step()  # of those with a gradient
            self._optimizer.zero_grad(set_to_none=True)
        self._take_up()

    def _take_up(self) -> None:
        for name, parameter in self._parameters.items():
            local(parameter).copy_(self.weights[name])

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        """Prefix of the kinds of tensors and numbers that are this replica's own; empty if replicas are the same."""
        return f"{_APART}{self.plan.placement.coords.dp_replicate}/" if self.is_on else ""

    @staticmethod
    def is_of_replica(kind: str) -> bool:
        """True if a kind of a checkpoint's tensors is one replica's own."""
        return kind.startswith(_APART) and "/" in kind

    def own(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """This replica's numbers of a parameter, by kind. Those of no replica are of all, as in older checkpoints."""
        return {
            kind.removeprefix(self.prefix): number
            for kind, number in numbers.items()
            if kind.startswith(self.prefix) or not self.is_of_replica(kind)
        }

    def kept(self, name: str) -> Mapping[str, Tensor]:
        """This rank's part of what the replicas have in common of a parameter, by kind."""
        if name not in self.weights:
            return {}
        state = self._optimizer.state[self.weights[name]] if self._optimizer else {}
        momentum = state.get("momentum_buffer")
        return {"weight": self.weights[name], **({} if momentum is None else {MOMENTUM: momentum})}

    @torch.no_grad()
    def put(self, name: str, kind: str, region: tuple[slice, ...], values: Tensor) -> None:
        """Take this rank's `region` of a parameter from a checkpoint, by kind."""
        self.kept(name)[kind][region].copy_(values)
