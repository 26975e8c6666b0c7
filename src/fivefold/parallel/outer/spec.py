"""Collectives and memory of outer steps (DiLoCo), and models that they do not go with. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fivefold.core.errors import Violation
from fivefold.core.units import in_parts
from fivefold.parallel.collectives import Call
from fivefold.parallel.outer.keys import MORE, OUTER_NUMBERS
from fivefold.parallel.plan import ParallelPlan

BUCKET = 2**24  # numbers that are averaged at once, or one parameter


def violations(plan: ParallelPlan) -> Iterator[Violation]:
    """The loads of experts are balanced over the rows of all replicas, which then are no longer those of a gradient."""
    if plan.layout.outer_every and plan.facts.experts:
        what = f"outer.every {plan.layout.outer_every}: {plan.anatomy.model_class} has experts"
        yield Violation("outer_every", what, "leave outer.every out", more=MORE)


def averaged(plan: ParallelPlan) -> Mapping[str, int]:
    """The trained parameters of this rank, in order, and how many numbers of each it holds."""
    placement = plan.placement
    return {
        name: placement.held_bytes(name, 1)
        for name in placement.shards
        if placement.holds(name) and plan.facts.parameters[name].is_trained
    }


def buckets(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Parameters, in order, that are averaged at once: at most `BUCKET` numbers, or one parameter."""
    return in_parts(sizes, sizes.__getitem__, BUCKET)


def calls(plan: ParallelPlan, master_bytes: int) -> Iterator[Call]:
    """Collectives of an outer step, which are not among those of a step."""
    sizes = averaged(plan)
    for bucket in buckets(sizes) if plan.layout.outer_every else ():
        yield from mean_calls(sum(sizes[name] for name in bucket), plan.layout.copies_apart, master_bytes)


def mean_calls(numbers: int, copies: int, master_bytes: int) -> tuple[Call, Call]:
    """Collectives of a mean over replicas, which each sum a part of the numbers in the order of replicas."""
    size = -(-numbers // copies) * copies * master_bytes
    to_sum = Call(axis="dp_replicate", kind="all_to_all", bytes=size, phase="step")
    return to_sum, replace(to_sum, kind="all_gather")


def outer_bytes(plan: ParallelPlan, master_bytes: int) -> int:
    """Bytes of this rank's outer weights and their momentum."""
    return OUTER_NUMBERS * sum(averaged(plan).values()) * master_bytes if plan.layout.outer_every else 0
