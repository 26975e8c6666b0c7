"""Bytes of the micro batches that a pipeline has in flight. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fivefold.core.schedule import Slot
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.pipeline.spec import PipelinePlan
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.step import MOMENTS, Bytes, LayerBytes


@dataclass(frozen=True)
class InFlightBytes:
    """Bytes of micro batches in flight.

    `saved`: left by forward passes for backward. `at_loss`: the same, when the last stage has run forward. `later`,
    `later_at_loss`: the same, once there are gradients; 0 if no backward, or no loss, comes after the first one.
    `layer`, `stage`: the largest layer's part of `saved`, and the largest stage's, in one micro batch. `working`:
    needed by the backward of a layer besides, with everything that is recomputed. `loss`: one chunk of the loss with
    its gradients; 0 if another rank has it. `fetched`: bytes that arrive from host memory while the layer after them
    runs backward.
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
        saved = (
            self.later_at_loss, self.later + comes, (later + 2 * comes) * (later > 0), self.saved - self.stage, nothing,
            self.at_loss, self.saved + comes, self.saved - self.layer + 2 * comes,
        )  # fmt: skip
        working = (nothing, self.working, self.working, nothing, nothing, nothing, self.working, self.working)
        loss = (self.loss * has_loss, nothing, nothing, nothing, nothing, self.loss, nothing, nothing)
        return {
            moment: {"saved activations": kept, "working memory": more, "loss": logits}
            for moment, kept, more, logits in zip(MOMENTS, saved, working, loss, strict=True)
        }


def in_flight_bytes(
    plan: ParallelPlan, shape: StepShape, layers: Mapping[str, LayerBytes], *, loss: int, waiting: int
) -> InFlightBytes:
    """Add up micro batches in flight. `layers`: those of this rank. `loss`: one chunk of the loss. `waiting`: kept by
    the last stage for each micro batch after the first one that has its loss."""
    counts, last = rank_in_flight(plan, shape.micro_batches), plan.placement.stages.count - 1
    stages = {
        stage: sum(layers[layer].kept for layer in plan.placement.stages.layers_of_stage(stage))
        + _between(plan, shape, stage)
        for stage in plan.placement.own_stages
    }

    def added(numbers: Mapping[int, int]) -> int:
        of_heads = waiting * max(0, numbers.get(last, 0) - 1)
        return sum(size * numbers[stage] for stage, size in stages.items()) + of_heads

    return InFlightBytes(
        saved=added(counts.most),
        at_loss=added(counts.at_loss),
        later=added(counts.later),
        later_at_loss=added(counts.later_at_loss),
        layer=max((layer.kept for layer in layers.values()), default=0),
        stage=max(stages.values(), default=0),
        working=max((layer.working for layer in layers.values()), default=0),
        loss=loss,
        fetched=max((layer.host for layer in layers.values()), default=0),
    )


def saved_bytes(plan: ParallelPlan, shape: StepShape, layers: Mapping[str, LayerBytes]) -> dict[str, int]:
    """Layer -> bytes on the device in flight until backward; a stage's first layer has its input and output too."""
    counts, stages = rank_in_flight(plan, shape.micro_batches).most, plan.placement.stages
    saved = {layer: count * layers[layer].kept for layer, count in layers_in_flight(plan, shape.micro_batches).items()}
    for stage in plan.placement.own_stages:
        saved[stages.layers_of_stage(stage)[0]] += counts[stage] * _between(plan, shape, stage)
    return saved


def _between(plan: ParallelPlan, shape: StepShape, stage: int) -> int:
    """Bytes that a stage holds for a micro batch besides those of its layers: its input and its output."""
    entered, left = edge_bytes(plan, shape)
    return entered * (stage > 0) + left * (stage < plan.placement.stages.count - 1)


def edge_bytes(plan: ParallelPlan, shape: StepShape) -> tuple[int, int]:
    """Bytes of the input of a stage, unless a compiled or recomputed layer saves it itself, and of its output."""
    size = shape.hidden_bytes // plan.sequence_ranks
    keeps = shape.compiled or any(shape.recompute.wraps(layer) for layer in plan.placement.layers)
    return 0 if keeps else size, size


@dataclass(frozen=True)
class InFlight:
    """Stage of a rank -> its micro batches between their forward and their backward, when the rank has the most.
    `at_loss`: at the moments after a forward of the last stage, if this rank has it. `later`, `later_at_loss`: once a
    backward has left gradients; 0 if no such moment comes."""

    most: Mapping[int, int]
    at_loss: Mapping[int, int]
    later: Mapping[int, int]
    later_at_loss: Mapping[int, int]


def layers_in_flight(plan: ParallelPlan, micro_batches: int) -> dict[str, int]:
    """Layer of this rank -> its micro batches in flight, when the rank has the most."""
    counts, stages = rank_in_flight(plan, micro_batches).most, plan.placement.stages
    return {layer: counts[stage] for stage in plan.placement.own_stages for layer in stages.layers_of_stage(stage)}


def rank_in_flight(plan: ParallelPlan, micro_batches: int) -> InFlight:
    """Count micro batches in flight on this rank."""
    layers = [last - first for first, last in plan.placement.stages.splits]
    return in_flight(plan.feature(PipelinePlan).order(micro_batches), layers)


def in_flight(order: Sequence[Slot], layers: Sequence[int]) -> InFlight:
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
    return InFlight(*(_counted(order, at, stages) for at in places))


def _counted(order: Sequence[Slot], at: int, stages: Iterable[int]) -> dict[int, int]:
    """Stage -> its micro batches between their forward and their backward during slot `at`; -1: before all slots."""
    now = dict.fromkeys(stages, 0)
    for number, slot in enumerate(order[: at + 1]):
        if slot.kind == "F":
            now[slot.stage] += 1
        elif slot.kind in "BW" and number < at:
            now[slot.stage] -= 1
    return now
