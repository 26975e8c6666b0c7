"""What is done to a model's modules, of all features: a list, in the order in which `parallelize` does it. No torch."""

from collections.abc import Iterator

from fivefold.parallel.balance import spec as balance
from fivefold.parallel.chunks import spec as chunks
from fivefold.parallel.context import spec as context
from fivefold.parallel.edits import Edit
from fivefold.parallel.experts import spec as experts
from fivefold.parallel.fp8 import spec as fp8
from fivefold.parallel.fsdp import spec as fsdp
from fivefold.parallel.offload import spec as offload
from fivefold.parallel.pipeline import spec as pipeline
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute import spec as recompute
from fivefold.parallel.tensor import spec as tensor


def interventions(plan: ParallelPlan) -> tuple[Edit, ...]:
    """All of them, on this rank."""
    return tuple(edit for edits in EDITS for edit in edits(plan))


def _rows(plan: ParallelPlan) -> Iterator[Edit]:
    """Tokens of a row are counted, by models that bound them."""
    if counted := plan.facts.counted:
        yield Edit(plan.anatomy.base, "pre-hook", "rows", f"{counted.name} counts the tokens of a row")


def _documents(plan: ParallelPlan) -> Iterator[Edit]:
    """Layers that hand on no bounds of documents are given them."""
    for layer in dict.fromkeys(layer for layer, _ in plan.facts.forgetful):
        yield Edit(layer, "forward", "documents", "its attention is given the bounds of packed documents")


EDITS = (
    _rows, tensor.edits, context.edits, pipeline.edits_of_linears, chunks.edits, fp8.edits, experts.edits,
    balance.edits, _documents, pipeline.edits, recompute.edits, offload.edits, fsdp.edits,
)  # fmt: skip
