"""Collectives and bytes of the loss over a split vocabulary. No torch."""

from collections.abc import Iterator

from fivefold.parallel.collectives import Call, StepShape
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.step import Step

# fp32 (fp64) tensors of whole logits in a loss of the user's own: the logits, their log-softmax or the like, a gradient
# of each, and one between (measured: 4.5 for cross entropy, 5.5 with z-loss). A function may take more.
OWN_LOSS_COPIES = 5


def calls(step: Step) -> Iterator[Call]:
    """Two all-reduces for each chunk of N tokens, in fp32 (fp64): N largest logits; then N sums of exponentials and N
    logits of the targets. Judged answers need the same once before, for their log-probabilities, and a sum over cp of
    one fp64 number for each answer of a micro batch. A loss of the user's own needs one all-gather of the logits."""
    if not step.plan.placement.has_ends[1]:
        return
    head = step.plan.facts.anatomy.head
    for tokens in step.shape.loss_chunks:
        if step.shape.whole_logits:
            size = tokens * _padded_vocabulary(step.plan) * step.shape.compute_bytes
            yield step.call("tp", "all_gather", size, "forward", head)
            continue
        size = tokens * max(4, step.shape.compute_bytes)
        times = 2 if step.shape.answers else 1
        yield step.call("tp", "all_reduce", size, "forward", head, times=times)
        yield step.call("tp", "all_reduce", 2 * size, "forward", head, times=times)
    for number in step.shape.answers:
        yield Call(axis="cp", kind="all_reduce", bytes=8 * max(1, number), phase="forward", layer=head)


def _padded_vocabulary(plan: ParallelPlan) -> int:
    """Columns of gathered logits: as many from each rank as the fullest has."""
    held = plan.placement.shards[plan.head_weight].held
    return len(held) * max(stop - start for rows, *_ in held for start, stop in rows)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def logit_bytes(plan: ParallelPlan, shape: StepShape) -> int:
    """Bytes of the loss of a chunk with its gradients; 0 if another rank has it. This is the larger of two moments: the
    cross entropy has its softmax in fp32 (fp64), or the gradient of the head is computed.

    With several chunks the head's gradient is summed in fp32. Compiled, no softmax is saved, and a gradient takes the
    memory of its logits. Hidden states exist as the output of the last layer; as saved by the norm before the head (in
    fp32, scaled, and weighted); gathered over tp; and as their gradient.
    """
    if not plan.placement.has_ends[1]:
        return 0
    compute, precise, several = shape.compute_bytes, max(4, shape.compute_bytes), len(shape.loss_chunks) > 1
    logits, weight = max(shape.loss_chunks) * plan.vocabulary, _head_numbers(plan, shape)
    in_place = shape.compiled or precise == compute
    softmax = logits * (compute if in_place else 2 * compute + precise)
    if shape.whole_logits:
        softmax = 2 * logits * compute + max(shape.loss_chunks) * plan.whole_vocabulary * OWN_LOSS_COPIES * precise
    before = weight * precise if several else 0
    both = 1 if in_place else 2
    of_head = weight * compute + both * logits * compute
    of_norm = 3 + precise // compute
    hidden = shape.hidden_bytes * of_norm // plan.sequence_ranks + shape.hidden_bytes * (1 + plan.splits_sequence)
    return before + max(softmax, of_head) + hidden


def waiting_bytes(plan: ParallelPlan, shape: StepShape) -> int:
    """Bytes that the last stage keeps for each micro batch that has its loss and waits for its backward: the gradients
    of the head and of its input. The first such micro batch is counted by `logit_bytes`."""
    return _head_numbers(plan, shape) * shape.compute_bytes + shape.hidden_bytes


def _head_numbers(plan: ParallelPlan, shape: StepShape) -> int:
    """Elements in the gradient of the head; 0 if it is frozen."""
    return plan.vocabulary * shape.hidden * plan.facts.parameters[plan.head_weight].is_trained
