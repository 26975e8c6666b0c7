"""What rests in host memory. No torch."""

from collections.abc import Iterator

from fivefold.parallel.edits import Edit
from fivefold.parallel.plan import ParallelPlan


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """What layers save lies in host memory."""
    for layer in plan.placement.layers if plan.layout.offload_activations else ():
        yield Edit(layer, "forward", "offload", "what it saves for backward lies in host memory")
