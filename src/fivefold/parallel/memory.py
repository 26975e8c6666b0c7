"""Memory that a step needs on a rank, by kind, from the plan alone. No torch.

Peak memory occurs at one of a few points of the step (`step.py`), which differ in what exists besides parameters and
optimizer state. Each feature adds its bytes in its own folder; the planner uses the same functions with its own prices.
Rehearsals of the real step on the real caching allocator are the reference (docs/evidence/planned_memory.md). Not
included: buffers of collectives between ranks, work space of kernels and what the allocator keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fivefold.core.optimizers import restored_bytes
from fivefold.models.facts import LayerCost
from fivefold.parallel import features
from fivefold.parallel.balance.spec import buffer_bytes
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.fsdp.memory import rank_resting_bytes
from fivefold.parallel.loss.spec import logit_bytes, waiting_bytes
from fivefold.parallel.offload.spec import host_bytes, in_update
from fivefold.parallel.outer.spec import outer_bytes
from fivefold.parallel.pipeline.memory import in_flight_bytes, layers_in_flight, saved_bytes
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.step import MOMENTS, LayerBytes, LayerNumbers, LayerStep

BETWEEN_STEPS = ("parameters", "gradients", "optimizer state")  # kinds that torch can tell apart in a running process
REST = "all other tensors"


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of this rank. `optimizer`: its state. `saved`: by layer, left by forward passes for backward. `host`: by
    kind, in host memory. `logits`: of one chunk of the loss, with its gradients. `buffers`: of routers. `moments`:
    moment -> kind in words -> bytes."""

    parameters: int
    gradients: int
    optimizer: int
    host: Mapping[str, int]
    saved: Mapping[str, int]
    logits: int
    buffers: int
    moments: Mapping[str, Mapping[str, int]]

    @cached_property
    def fullest(self) -> str:
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def by_kind(self) -> Mapping[str, int]:
        """Bytes of each kind, in words, at the fullest moment."""
        return self.moments[self.fullest]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def step_bytes(plan: ParallelPlan, shape: StepShape) -> StepBytes:
    state, costs = _state(plan, shape), dict(zip(plan.anatomy.layers, plan.facts.layer_costs, strict=True))
    layers = {layer: layer_bytes(plan, layer, costs[layer], shape) for layer in plan.placement.layers}
    in_flight = in_flight_bytes(plan, shape, layers, loss=logit_bytes(plan, shape), waiting=waiting_bytes(plan, shape))
    counts = layers_in_flight(plan, shape.micro_batches)
    moved = sum(counts[layer] * of_layer.host for layer, of_layer in layers.items())
    resting, moving = rank_resting_bytes(plan, shape, _with_update(plan, shape, state)), in_flight.at()
    return StepBytes(
        parameters=state["parameters"],
        gradients=state["gradients"],
        optimizer=state["optimizer state"],
        host={**host_bytes(plan, state), "saved activations": moved},
        saved=saved_bytes(plan, shape, layers),
        logits=in_flight.loss,
        buffers=state["router buffers"],
        moments={moment: {**resting[moment], **moving[moment]} for moment in MOMENTS},
    )


def _state(plan: ParallelPlan, shape: StepShape) -> dict[str, int]:
    """Kind -> bytes that last from step to step, and those of gradients."""
    placement, optimizer, matrices = plan.placement, shape.optimizer, set(plan.placement.block_matrices)
    names = [name for name in placement.shards if placement.holds(name)]
    held = {name: placement.held_bytes(name, placement.rests_in(name, shape.master_bytes)) for name in names}
    trained = {name: size for name, size in held.items() if plan.facts.parameters[name].is_trained}
    return {
        "parameters": sum(held.values()) + outer_bytes(plan, shape.master_bytes),
        "gradients": sum(trained.values()),
        "optimizer state": sum(
            placement.state_bytes(name, shape.master_bytes)
            for kind in optimizer.state
            for name in trained
            if optimizer.keeps(kind, is_matrix=name in matrices)
        ),
        "router buffers": buffer_bytes(placement.buffers),
    }


def _with_update(plan: ParallelPlan, shape: StepShape, state: Mapping[str, int]) -> dict[str, int]:
    """Add the memory of an update to `state`, without the kinds that rest in host memory."""
    placement, layout = plan.placement, plan.layout
    held = (placement.held_bytes(name, shape.master_bytes) for name in placement.shards if placement.holds(name))
    largest = max(held, default=0)
    restored = restored_bytes(layout.state_dtype, largest // shape.master_bytes)
    return in_update(state, largest, restored, away=layout.rests_in_host)


def layer_bytes(plan: ParallelPlan, layer: str, cost: LayerCost, shape: StepShape) -> LayerBytes:
    step = LayerStep(plan, layer, cost, shape)
    numbers = layer_numbers(step)
    of_layer = LayerBytes(kept=step.bytes_of(numbers.saved), working=step.bytes_of(numbers.working))
    for change in features.KEPT:
        of_layer = change(step, numbers, of_layer)
    return of_layer


def layer_numbers(step: LayerStep) -> LayerNumbers:
    numbers = LayerNumbers()
    for add in features.NUMBERS:
        numbers = add(step, numbers)
    return numbers
