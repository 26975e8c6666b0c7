"""Numbers that linears in fp8 save for backward. No torch."""

from fivefold.models.anatomy import is_within
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.fp8.recipes import RECIPES, agreements
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.plan import ParallelPlan


def cast_numbers(plan: ParallelPlan, layer: str, shape: StepShape) -> float:
    """Elements per token that fp8 linears of `layer` save beyond those of the compute dtype; negative if fewer.

    If an input is cast for weight gradients, backward does not read the input itself. A compiled layer recomputes it,
    element by element, from what the preceding norm or activation saves, and casts it again by the same scale.
    (Attention saves its output in any case; over cp it is outside of graphs, and so is the norm before q, k and v.) A
    cast is saved, one byte a number, if the scale comes from other ranks (of a cast that serves both products also if
    that of the gradients does). It is also saved if linears stay outside of graphs (delayed scaling), after which an
    activation saves its output. Eager layers save the cast if it serves both products.
    """
    groups = [group for group in plan.feature(Fp8Plan).inputs if is_within(group[0].name, [layer])]
    if not groups or RECIPES[plan.layout.fp8].weight_grad is None:
        return 0.0
    recipe, found = RECIPES[plan.layout.fp8], 0.0
    first = ("output", "input_grad") if recipe.casts_once else ("output",)
    spanned = {dim for product, dim, _ in agreements(recipe, 1, 1, [1]) if product in first}
    blocks = {f"{block.row}.weight": block.heads is not None for block in plan.facts.partition.tp_blocks}
    outside = [
        block.owner for block in plan.facts.partition.tp_blocks if block.heads and plan.placement.grid.size("cp") > 1
    ]
    for linear in (group[0] for group in groups):
        is_row, of_attention = linear.name in blocks, blocks.get(linear.name, False)
        agrees = any(plan.placement.grid.size(linear.axes[dim]) > 1 for dim in spanned if dim in linear.axes)
        if shape.compiled:
            is_given = of_attention or is_within(linear.name, outside)
            is_left_out = not (is_given or (recipe.history and is_row))
            is_cast_kept = (agrees or recipe.history > 0) and (recipe.casts_once or not of_attention)
        else:
            is_left_out, is_cast_kept = recipe.casts_once and not of_attention, recipe.casts_once
        found += linear.inputs * (is_cast_kept / shape.compute_bytes - is_left_out)
    return found
