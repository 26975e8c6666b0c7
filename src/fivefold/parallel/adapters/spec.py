"""Adapters beside a frozen model: what is done to modules. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.parallel.edits import Edit
from fivefold.parallel.plan import ParallelPlan


@dataclass(frozen=True)
class SendGradient(Edit):
    """A frozen embedding is sent a gradient."""

    kind = "forward"


@dataclass(frozen=True)
class RestFrozen(Edit):
    """Frozen parameters rest in the type that they are computed with, or in four bits."""

    kind = "rest"


def edits_of_embedding(plan: ParallelPlan) -> Iterator[Edit]:
    """Backward goes through the first layer as through the others."""
    if plan.placement.has_adapter:
        yield SendGradient(plan.anatomy.embedding, "adapter", "it is sent a gradient, though it is frozen")


def edits_at_rest(plan: ParallelPlan) -> Iterator[Edit]:
    """Frozen parameters have no master weights."""
    if plan.placement.has_adapter:
        yield RestFrozen("", "adapter", "what is frozen rests in the type that it is computed with, or in four bits")
