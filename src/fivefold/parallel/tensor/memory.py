"""Elements that a tensor-parallel rank saves of a layer. No torch."""

from dataclasses import replace

from fivefold.models.anatomy import is_within
from fivefold.parallel.graphs.spec import GraphPlan
from fivefold.parallel.step import LayerNumbers, LayerStep


def layer_numbers(step: LayerStep, numbers: LayerNumbers) -> LayerNumbers:
    """Add the elements that the modules of a layer save on one of the tp ranks, which may be the only one.

    If backward gathers the inputs of all column/row pairs again, forward saves none of them: backward recomputes this
    rank's tokens from what the preceding norm saves, and has the gathered input.
    """
    layout, made = step.plan.layout, step.cost.kept(step.shape.compute_bytes, compiled=step.shape.compiled)
    gathered = 0
    if _gathers_all_again(step):
        made, gathered = replace(made, entered=0.0), step.shape.hidden
    saved = made.on_rank(layout.tp, sequence_parallel=step.plan.splits_sequence, expert_tp=layout.expert_tp)
    return replace(numbers, saved=numbers.saved + saved, gathered=numbers.gathered + gathered)


def _gathers_all_again(step: LayerStep) -> bool:
    """True if backward gathers the inputs of all column/row pairs of a layer again."""
    plan, graphs = step.plan, step.plan.feature(GraphPlan)
    blocks = (block for block in plan.facts.partition.tp_blocks if is_within(block.row, [step.name]))
    entries = [entry for block in blocks for entry in block.entries]
    return bool(entries) and all(graphs.gathers_again(step.name, entry, step.shape) for entry in entries)
