"""Collectives of the loss over a split vocabulary. No torch."""

from collections.abc import Iterator

from fivefold.parallel.collectives import Call
from fivefold.parallel.step import Step


def calls(step: Step) -> Iterator[Call]:
    """Two all-reduces for each chunk of N tokens, in fp32 (fp64): N largest logits; then N sums of exponentials and N
    logits of the targets. Judged answers need the same once before, for their log-probabilities, and a sum over cp of
    one fp64 number for each answer of a micro batch."""
    if not step.plan.placement.has_ends[1]:
        return
    head = step.plan.facts.anatomy.head
    for tokens in step.shape.loss_chunks:
        size = tokens * max(4, step.shape.compute_bytes)
        times = 2 if step.shape.answers else 1
        yield step.call("tp", "all_reduce", size, "forward", head, times=times)
        yield step.call("tp", "all_reduce", 2 * size, "forward", head, times=times)
    for number in step.shape.answers:
        yield Call(axis="cp", kind="all_reduce", bytes=8 * max(1, number), phase="forward", layer=head)
