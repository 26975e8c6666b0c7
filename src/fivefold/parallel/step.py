"""A step of a plan, and a layer in it, from which features derive what they send and what they keep. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fivefold.models.facts import LayerCost
from fivefold.parallel.collectives import Call, Phase, StepShape
from fivefold.parallel.plan import ParallelPlan

# ---- moments at which the memory of a rank may peak ------------------------------------------------------------------

# All forwards are done, and the last loss is computed with its gradients. The last layer's backward runs; then the one
# before it, while the last one's gradients are reduced; finally the first layer's, when all gradients are there. Until
# the first backward of a step has ended, there are no gradients: three moments come once more without them.
FIRST = {
    "the first loss": "the loss",
    "the first backward begins": "a backward begins",
    "a layer later in it": "a layer later",
}
UPDATE = "the update"
MOMENTS = (*FIRST.values(), "a backward ends", UPDATE, *FIRST)
Bytes = Any  # a number, or an array of them: the planner sums many layouts at once


@dataclass(frozen=True)
class Step:
    """A step of a plan, with the answers that several of its calls need."""

    plan: ParallelPlan
    shape: StepShape

    def layer_of(self, module: str) -> str:
        """Layer of this rank that a module is in; "" if none."""
        parts = module.split(".")
        outer = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
        return next((name for name in outer if name in self._layers), "")

    @cached_property
    def _layers(self) -> frozenset[str]:
        return frozenset(self.plan.placement.layers)

    def call(
        self, axis: str, kind: str, size: int, phase: Phase, layer: str, *, times: int = 1, overlaps: bool = False
    ) -> Call:
        """Describe a call that every micro batch makes `times` times."""
        times *= self.shape.micro_batches
        return Call(axis=axis, kind=kind, bytes=size, phase=phase, layer=layer, times=times, overlaps=overlaps)

    def forwards(
        self, axis: str, kind: str, size: int, site: str, *, layer: str | None = None, is_last: bool = False,
        is_kept: bool = False, overlaps: bool = False,
    ) -> Iterator[Call]:  # fmt: skip
        """Yield a call that every forward of the module `site` makes. A second forward counts as backward.
        `is_last`, `is_kept`: see `StepShape.forwards`."""
        layer = self.layer_of(site) if layer is None else layer
        yield self.call(axis, kind, size, "forward", layer, overlaps=overlaps)
        if again := self.shape.forwards(site, is_last=is_last, is_kept=is_kept) - 1:
            yield self.call(axis, kind, size, "backward", layer, times=again, overlaps=overlaps)


@dataclass(frozen=True)
class LayerStep:
    """A layer of a plan in one micro batch. `cost`: of the layer."""

    plan: ParallelPlan
    name: str
    cost: LayerCost
    shape: StepShape

    def bytes_of(self, numbers: float) -> int:
        return round(numbers * (self.shape.rows * self.shape.tokens * self.shape.compute_bytes))


@dataclass(frozen=True)
class LayerNumbers:
    """Elements per token of a layer on one rank, to which each feature adds its own.

    `saved`: left by forward for backward. `exchanged`: the part of them that is sent or received around attention.
    Backward has the others besides. `gradients`: of the widest tensors. `hidden`: of hidden states. `gathered`: inputs
    that are gathered again.
    """

    saved: float = 0.0
    exchanged: float = 0.0
    gradients: float = 0.0
    hidden: float = 0.0
    gathered: float = 0.0

    @property
    def working(self) -> float:
        """Elements per token that backward has at once, besides saved ones."""
        return self.gradients + self.hidden + self.gathered


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a layer in one micro batch. `kept`: on the device, from forward to backward. `host`: likewise, in host
    memory. `working`: needed by its backward besides."""

    kept: int
    working: int
    host: int = 0
