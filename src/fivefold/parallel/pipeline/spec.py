"""The order of the passes of a plan. No torch."""

from functools import cached_property, lru_cache

from fivefold.core import legality
from fivefold.core.layout import Layout
from fivefold.core.schedule import TYPICAL, SchedulePlan, Slot
from fivefold.parallel.plan import ParallelPlan


class PipelinePlan:
    """When each stage runs which micro batch, and for how long."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan

    def schedule(self, micro_batches: int) -> SchedulePlan:
        """The order of the passes; without a pipeline, of one stage. Raises `UserError` where it does not take so many
        micro batches."""
        return _schedule(self._plan.layout, micro_batches)

    def slot_duration(self, slot: Slot) -> float:
        """Duration of a slot from the cost of its stage. The forward of a stage of mean cost takes 1."""
        costs = self._stage_costs
        return TYPICAL[slot.kind] * costs[slot.stage] * len(costs) / sum(costs)

    @cached_property
    def _stage_costs(self) -> tuple[int, ...]:
        of_layers = [cost.active for cost in self._plan.facts.layer_costs]
        costs = [sum(of_layers[first:last]) for first, last in self._plan.placement.stages.splits]
        return (*costs[:-1], costs[-1] + self._plan.facts.head_cost)


@lru_cache(maxsize=16)
def _schedule(layout: Layout, micro_batches: int) -> SchedulePlan:
    legality.refuse(legality.of_micro_batches(layout, micro_batches))
    return SchedulePlan.of(layout, micro_batches)
