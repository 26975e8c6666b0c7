"""Elements that linears in fp8 save for backward. No torch."""

from dataclasses import replace

from fivefold.models.anatomy import is_within
from fivefold.parallel.fp8.recipes import RECIPES, agreements
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.step import LayerNumbers, LayerStep


def layer_numbers(step: LayerStep, numbers: LayerNumbers) -> LayerNumbers:
    """Replace saved inputs of linears by their casts."""
    return replace(numbers, saved=numbers.saved + cast_numbers(step))


def cast_numbers(step: LayerStep) -> float:
    """Elements per token that fp8 linears of a layer save beyond those of the compute dtype; negative if fewer.

    If an input is cast for weight gradients, backward does not read the input itself. A compiled layer recomputes it,
    element by element, from what the preceding norm or activation saves, and casts it again by the same scale. There
    are exceptions:

    - Attention saves its output in any case. Over cp it is outside of graphs, and so is the norm before q, k and v.
    - A cast is saved, one byte a number, if the scale comes from other ranks. If the cast serves both products, it is
      saved also if the scale of the gradients comes from them.
    - A cast is saved if linears stay outside of graphs (delayed scaling). An activation before them saves its output.
    - Eager layers save the cast if it serves both products.
    """
    plan, shape = step.plan, step.shape
    groups = [group for group in plan.feature(Fp8Plan).inputs if is_within(group[0].name, [step.name])]
    if not groups or RECIPES[plan.layout.fp8].weight_grad is None:
        return 0.0
    recipe, total, blocks, grid = RECIPES[plan.layout.fp8], 0.0, plan.facts.partition.tp_blocks, plan.placement.grid
    products = ("output", "input_grad") if recipe.casts_once else ("output",)
    spanned = {dim for product, dim, _ in agreements(recipe, 1, 1, [1]) if product in products}
    rows = {f"{block.row}.weight": block.heads is not None for block in blocks}
    outside = [block.owner for block in blocks if block.heads and grid.size("cp") > 1]
    for linear in (group[0] for group in groups):
        is_row, of_attention = linear.name in rows, rows.get(linear.name, False)
        agrees = any(grid.size(linear.axes[dim]) > 1 for dim in spanned if dim in linear.axes)
        if shape.compiled:
            is_saved_anyway = of_attention or is_within(linear.name, outside)
            is_left_out = not (is_saved_anyway or (recipe.history and is_row))
            is_cast_kept = (agrees or recipe.history > 0) and (recipe.casts_once or not of_attention)
        else:
            is_left_out, is_cast_kept = recipe.casts_once and not of_attention, recipe.casts_once
        total += linear.inputs * (is_cast_kept / shape.compute_bytes - is_left_out)
    return total
