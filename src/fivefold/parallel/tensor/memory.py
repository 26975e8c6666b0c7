"""Numbers that tensor parallelism saves of a layer. No torch."""

from fivefold.models.anatomy import is_within
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.graphs.spec import GraphPlan
from fivefold.parallel.plan import ParallelPlan


def gathers_all_again(plan: ParallelPlan, layer: str, shape: StepShape) -> bool:
    """True if a layer gathers the inputs of all its column/row pairs again in backward."""
    blocks = (block for block in plan.facts.partition.tp_blocks if is_within(block.row, [layer]))
    entries = [entry for block in blocks for entry in block.entries]
    return bool(entries) and all(plan.feature(GraphPlan).gathers_again(layer, entry, shape) for entry in entries)
