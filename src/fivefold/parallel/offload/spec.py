"""Offload of saved activations to host memory. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.parallel.edits import Edit
from fivefold.parallel.plan import ParallelPlan


@dataclass(frozen=True)
class OffloadActivations(Edit):
    """Keep the tensors that a layer saves for backward in host memory. `is_first`, `is_last`: of a stage."""

    kind = "forward"
    is_first: bool
    is_last: bool


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """Keep the tensors that layers save in host memory."""
    firsts, lasts = plan.placement.stage_ends
    for layer in plan.placement.layers if plan.layout.offload_activations else ():
        why = "what it saves for backward lies in host memory"
        yield OffloadActivations(layer, "offload", why, layer in firsts, layer in lasts)
