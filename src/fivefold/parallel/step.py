"""A step of a plan, from which features derive what they send. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fivefold.parallel.collectives import Call, Phase, StepShape
from fivefold.parallel.plan import ParallelPlan


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
