"""Bytes of the micro batches that a pipeline has in flight. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fivefold.core.schedule import Slot
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.loss.spec import head_numbers
from fivefold.parallel.moments import MOMENTS, Bytes
from fivefold.parallel.plan import ParallelPlan


@dataclass(frozen=True)
class Passing:
    """Bytes of micro batches in flight.

    `saved`: what forward passes leave for backward. `at_loss`: the same, when the last stage has run forward. `later`,
    `later_at_loss`: the same, once there are gradients; 0 if no backward, or no loss, comes after the first one.
    `layer`, `stage`: the largest layer's part of `saved`, and the largest stage's, in one micro batch. `working`: what
    the backward of a layer needs besides, with everything that is recomputed. `loss`: one chunk of the loss with its
    gradients; 0 if another rank has it. `fetched`: what arrives from host memory while the layer after it runs
    backward.
    """

    saved: Bytes
    at_loss: Bytes
    later: Bytes
    later_at_loss: Bytes
    layer: Bytes
    stage: Bytes
    working: Bytes
    loss: Bytes
    fetched: Bytes = 0

    def at(self) -> dict[str, dict[str, Bytes]]:
        """Bytes by moment and kind."""
        nothing, later, has_loss = 0 * self.saved, self.later - self.layer, self.later_at_loss > 0
        comes = self.fetched
        kept = (
            self.later_at_loss, self.later + comes, (later + 2 * comes) * (later > 0), self.saved - self.stage, nothing,
            self.at_loss, self.saved + comes, self.saved - self.layer + 2 * comes,
        )  # fmt: skip
        working = (nothing, self.working, self.working, nothing, nothing, nothing, self.working, self.working)
        loss = (self.loss * has_loss, nothing, nothing, nothing, nothing, self.loss, nothing, nothing)
        return {
            moment: {"saved activations": own, "working memory": more, "loss": logits}
            for moment, own, more, logits in zip(MOMENTS, kept, working, loss, strict=True)
        }


def edge_bytes(plan: ParallelPlan, shape: StepShape) -> tuple[int, int, int]:
    """Bytes that a stage of a pipeline holds for a micro batch besides those of layers: the input, unless a compiled or
    recomputed layer saves it itself, and the output. In the last stage, for each micro batch after the first of those
    that have their loss: the gradients of the head and of its input."""
    size = shape.hidden_bytes // (plan.layout.tp if plan.splits_sequence else 1)
    keeps = shape.compiled or any(shape.recompute.wraps(layer) for layer in plan.placement.layers)
    return 0 if keeps else size, size, head_numbers(plan, shape) * shape.compute_bytes + shape.hidden_bytes


@dataclass(frozen=True)
class UnderWay:
    """Stage of a rank -> its micro batches between their forward and their backward, when the rank has the most.
    `at_loss`: at the moments after a forward of the last stage, if this rank has it. `later`, `later_at_loss`: once a
    backward has left gradients; 0 if no such moment comes."""

    most: Mapping[int, int]
    at_loss: Mapping[int, int]
    later: Mapping[int, int]
    later_at_loss: Mapping[int, int]


def under_way(order: Sequence[Slot], layers: Sequence[int]) -> UnderWay:
    """Count micro batches in flight on a rank with slots in `order`. `layers`: of each stage of the pipeline.

    With separate slots for weight gradients, the inputs of linears and the gradients of their outputs wait for them:
    about as much as forward left.
    """
    stages = {slot.stage for slot in order}
    last = len(layers) - 1
    gives_loss = {last} if last in stages else stages
    count, is_later, full, places = 0, False, [0] * 4, [-1] * 4
    for at, slot in enumerate(order):
        count += layers[slot.stage] * (slot.kind == "F")
        if count > full[0] or (is_later and count > full[2]) or (slot.kind == "F" and slot.stage in gives_loss):
            has_loss = slot.kind == "F" and slot.stage in gives_loss
            for which, is_such in enumerate((True, has_loss, is_later, is_later and has_loss)):
                if is_such and count > full[which]:
                    places[which], full[which] = at, count
        if slot.kind in "BW":
            count -= layers[slot.stage]
            is_later = True
    return UnderWay(*(_counted(order, at, stages) for at in places))


def _counted(order: Sequence[Slot], at: int, stages: Iterable[int]) -> dict[int, int]:
    """Stage -> its micro batches between their forward and their backward during slot `at`; -1: before all slots."""
    now = dict.fromkeys(stages, 0)
    for number, slot in enumerate(order[: at + 1]):
        if slot.kind == "F":
            now[slot.stage] += 1
        elif slot.kind in "BW" and number < at:
            now[slot.stage] -= 1
    return now
