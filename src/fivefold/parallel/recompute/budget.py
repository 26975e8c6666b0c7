"""Recompute modes of layers within a budget of bytes. No torch."""

from dataclasses import replace

from fivefold.core.errors import UserError
from fivefold.models.facts import LayerCost
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.memory import layer_bytes
from fivefold.parallel.pipeline.memory import under_way
from fivefold.parallel.pipeline.spec import PipelinePlan
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.policy import MODES, Choice, Mode, Recompute, budget_bytes, fit_recompute_budget


def within_budget(plan: ParallelPlan, step: tuple[int, int] | None) -> ParallelPlan:
    """Fit the recompute budget of a plan, if it has one, to a `step`: tokens of a padded row, and micro batches. Raises
    `UserError` if the step is not known, or if full recompute of all layers keeps more."""
    if budget_bytes(plan.layout.recompute) is None:
        return plan
    if step is None:
        raise UserError(
            f"a budget of {plan.layout.recompute} is spent for rows and micro batches that are known",
            fix="ff.parallelize(..., step=(tokens of a row, micro batches of a step)), or +selective or +full",
        )
    tokens, micro_batches = step
    shape = plan.step_shape(plan.layout.micro_batch_size, tokens, micro_batches)
    return replace(plan, recompute=fit_recompute_budget(plan.layout.recompute, layer_choices(plan, shape)))


# ---- bytes ---------------------------------------------------------------------------------------------------------


FLOPS_PER_BYTE = 200  # of an H100's matmuls, per byte of memory traffic


def layer_choices(plan: ParallelPlan, shape: StepShape) -> dict[str, dict[Mode, Choice]]:
    """Each layer of this rank under each mode of recompute, for all its micro batches in flight."""
    layers = [last - first for first, last in plan.placement.stages.splits]
    orders = plan.feature(PipelinePlan).schedule(shape.micro_batches).orders
    counts = under_way(orders[plan.placement.coords.pp], layers)
    costs = dict(zip(plan.anatomy.layers, plan.facts.layer_costs, strict=True))
    return {
        layer: {
            mode: replace(choice, kept=counts.most[stage] * choice.kept)
            for mode, choice in mode_choices(plan, layer, costs[layer], shape).items()
        }
        for stage in plan.placement.own_stages
        for layer in plan.placement.stages.layers[slice(*plan.placement.stages.splits[stage])]
    }


def mode_choices(plan: ParallelPlan, layer: str, cost: LayerCost, shape: StepShape) -> dict[Mode, Choice]:
    """A layer under each mode of recompute, in one micro batch. Its work is measured in bytes of memory traffic:
    `FLOPS_PER_BYTE` FLOPs of a matmul or of attention count as one byte."""
    of = {mode: layer_bytes(plan, layer, cost, replace(shape, recompute=Recompute(mode))) for mode in MODES}
    features = sum(each.query * (each.key_size + each.value_size) for each in cost.attention)
    flops = shape.rows * shape.tokens * (2 * cost.active + features * shape.tokens * plan.layout.cp) / plan.layout.tp
    traffic = 2.0 * of["none"].saved
    again = {"none": 0.0, "selective": traffic, "full": traffic + flops / FLOPS_PER_BYTE}
    return {mode: Choice(of[mode].kept, again[mode]) for mode in MODES}
