"""Order of the passes of a plan. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fivefold.core.errors import refuse
from fivefold.core.model_limits import ModelLimits
from fivefold.core.schedule import TYPICAL, SchedulePlan, Slot, Transfer
from fivefold.models.anatomy import is_within
from fivefold.models.facts import ModelFacts
from fivefold.parallel.collectives import Call, Phase
from fivefold.parallel.layout import Layout
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.step import Step


def limited(limits: ModelLimits, facts: ModelFacts) -> ModelLimits:
    """Add the layers of a model, and the reason why it cannot be cut."""
    return replace(limits, layers=len(facts.anatomy.layers)).refusing({"pp": _stages_refusal(facts)})


def _stages_refusal(facts: ModelFacts) -> str | None:
    """Reason why no layout can cut the model into pipeline stages; None if one can."""
    name, anatomy = facts.model_class, facts.anatomy
    if facts.carried:
        return f"in {name}, {facts.carried}, and a stage is sent no more"
    places = (*anatomy.layers, *facts.before, *facts.after, anatomy.head, anatomy.embedding)
    for parameter in facts.parameters:
        if not is_within(parameter, places):
            return f"{parameter} of {name} is in none of its layers, nor in the modules before or after them"
    if twice := set(facts.before) & set(facts.after):
        return f"{sorted(twice)[0]} of {name} runs both before and after its layers"
    return None


class PipelinePlan:
    """Order of each stage's micro batches, and their durations."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan

    def schedule(self, micro_batches: int) -> SchedulePlan:
        """Order of the passes; without a pipeline, of one stage. Raises `UserError` for a number that does not fit."""
        return _schedule(self._plan.layout, micro_batches)

    def order(self, micro_batches: int) -> Sequence[Slot]:
        """The slots of this rank."""
        return self.schedule(micro_batches).orders[self._plan.placement.coords.pp]

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
    refuse(layout.step_violations(micro_batches))
    return layout.schedule_plan(micro_batches)


def calls(step: Step) -> Iterator[Call]:
    """Sends of hidden states to the next stage and of gradients back, and the sum of a tied embedding's gradients."""
    plan, shape = step.plan, step.shape
    tokens = shape.tokens // plan.layout.tp if plan.splits_sequence else shape.tokens
    size = shape.rows * tokens * shape.hidden * shape.compute_bytes
    actions = plan.feature(PipelinePlan).schedule(shape.micro_batches).actions[plan.placement.coords.pp]
    transfers = [action for action in actions if isinstance(action, Transfer)]
    sides = {(transfer.way, transfer.of, transfer.stage): 0 for transfer in transfers}
    for transfer in transfers:
        sides[transfer.way, transfer.of, transfer.stage] += 1
    for (way, of, stage), times in sides.items():
        phase: Phase = "forward" if of == "F" else "backward"
        yield Call(axis="pp", kind=way, bytes=size, phase=phase, layer=f"stage {stage}", times=times, overlaps=True)
    if plan.tied and plan.placement.holds(plan.tied) and plan.facts.parameters[plan.tied].is_trained:
        size = plan.placement.held_bytes(plan.tied, shape.master_bytes)
        yield Call(axis="pp_ends", kind="all_reduce", bytes=size, phase="step", layer=plan.tied)


# ---- edits of modules ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStages(Edit):
    kind = "attribute"


@dataclass(frozen=True)
class Stub(Edit):
    kind = "stub"


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    stages, own = plan.placement.stages, set(plan.placement.own_stages)
    if stages.count == 1:
        return
    yield RunStages("", "pp", f"runs one stage at a time, of {', '.join(map(str, sorted(own)))}")
    for module, where in stages.stages_of_module.items():
        if not own & set(where):
            yield Stub(module, "pp", f"it runs in stage {', '.join(map(str, where))}")
        elif module == plan.anatomy.embedding and 0 not in own:
            yield Stub(module, "pp", "it runs in stage 0, and the head has its weight here")
