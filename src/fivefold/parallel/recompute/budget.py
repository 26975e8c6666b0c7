"""Recompute modes of layers within a budget of bytes. No torch."""

from dataclasses import replace

from fivefold.core.errors import UserError
from fivefold.models.facts import LayerCost
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.memory import layer_bytes
from fivefold.parallel.pipeline.memory import layers_in_flight
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.policy import MODES, Choice, Mode, Recompute, budget_bytes, fit_recompute_budget

FLOPS_PER_BYTE = 200  # of an H100's matmuls, per byte of memory traffic


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


def layer_choices(plan: ParallelPlan, shape: StepShape) -> dict[str, dict[Mode, Choice]]:
    """Each layer of this rank under each mode of recompute, for all its micro batches in flight."""
    costs = dict(zip(plan.anatomy.layers, plan.facts.layer_costs, strict=True))
    choices = dict[str, dict[Mode, Choice]]()
    for layer, count in layers_in_flight(plan, shape.micro_batches).items():
        of_modes = mode_choices(plan, layer, costs[layer], shape)
        choices[layer] = {mode: choice.in_flight(count) for mode, choice in of_modes.items()}
    return choices


def mode_choices(plan: ParallelPlan, layer: str, cost: LayerCost, shape: StepShape) -> dict[Mode, Choice]:
    """A layer under each mode of recompute, in one micro batch. Its work is measured in bytes of memory traffic:
    `FLOPS_PER_BYTE` FLOPs of a matmul or of attention count as one byte."""
    modes = {mode: layer_bytes(plan, layer, cost, replace(shape, recompute=Recompute(mode))) for mode in MODES}
    kept = {mode: of_layer.kept + of_layer.host for mode, of_layer in modes.items()}
    features = sum(heads.query * (heads.key_size + heads.value_size) for heads in cost.attention)
    flops = shape.rows * shape.tokens * (2 * cost.active + features * shape.tokens * plan.layout.cp) / plan.layout.tp
    traffic = 2.0 * kept["none"]
    again = {"none": 0.0, "selective": traffic, "full": traffic + flops / FLOPS_PER_BYTE}
    return {mode: Choice(kept[mode], again[mode]) for mode in MODES}
