"""Recompute modes of layers within a budget of bytes. No torch."""

from dataclasses import replace

from fivefold.core.errors import UserError
from fivefold.parallel.memory import layer_choices
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.policy import budget_bytes, fit_recompute_budget


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
