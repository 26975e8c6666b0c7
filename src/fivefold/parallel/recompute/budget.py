"""Recompute modes of layers within a budget of bytes. No torch."""

from dataclasses import replace

from fivefold.parallel.memory import layer_choices
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.policy import budget_bytes, fit_recompute_budget


def within_budget(plan: ParallelPlan, tokens: int, micro_batches: int) -> ParallelPlan:
    """Spend the recompute budget of a plan, for rows of `tokens` tokens, padded, and so many micro batches in a step.
    Raises `UserError` if full recompute of all layers keeps more."""
    if budget_bytes(plan.layout.recompute) is None:
        return plan
    shape = plan.step_shape(plan.layout.micro_batch_size, tokens, micro_batches)
    return replace(plan, recompute=fit_recompute_budget(plan.layout.recompute, layer_choices(plan, shape)))
