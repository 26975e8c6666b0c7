"""Every collective of an optimizer step on one rank, call by call, from the plan alone. No torch.

Each feature lists what it sends (`calls` in its `spec.py`; `features.py` has their order). Tests compare the sums of
these calls with the recorded collectives of a run. A planner needs the calls one by one: the bytes of each, its ranks,
and whether compute can hide it.
"""

from collections.abc import Callable, Iterator

from fivefold.parallel import features
from fivefold.parallel.collectives import Call, StepShape
from fivefold.parallel.fp8 import spec as fp8
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.step import Step


def calls(plan: ParallelPlan, shape: StepShape) -> tuple[Call, ...]:
    """List every collective of one optimizer step on this rank. An axis of one rank sends nothing."""
    return tuple(_calls(plan, shape, *features.AROUND_LAYERS, *features.IN_LAYERS, _of_world, *features.OF_UPDATE))


def layer_calls(plan: ParallelPlan, shape: StepShape) -> Iterator[Call]:
    """Yield the `calls` of layers and of the model's ends, and those that go with them once a step."""
    return _calls(plan, shape, *features.IN_LAYERS)


def _calls(plan: ParallelPlan, shape: StepShape, *parts: Callable[[Step], Iterator[Call]]) -> Iterator[Call]:
    step = Step(plan, shape)
    for part in parts:
        yield from (call for call in part(step) if plan.placement.grid.size(call.axis) > 1)


def _of_world(step: Step) -> Iterator[Call]:
    """All-reduces over the world. Before the passes: token counts. After them: the loss and the gradient norm. Pairs of
    answers add their counts before, and the means of each metric after; `fp8.scale_bytes` adds scales. Replicas that
    train apart have a norm each."""
    pairs = (8, 8 + 16 * step.shape.metrics) if step.shape.answers else ()
    for size in (40, *pairs, *fp8.scale_bytes(step), 8 + 8 * step.plan.layout.copies_apart):
        yield Call(axis="world", kind="all_reduce", bytes=size, phase="step")
