"""Edits of a model's modules, of all features, in the order in which `parallelize` applies them. No torch."""

from fivefold.parallel.adapters import spec as adapters
from fivefold.parallel.balance import spec as balance
from fivefold.parallel.context import spec as context
from fivefold.parallel.dropout import spec as dropout
from fivefold.parallel.edits import Edit
from fivefold.parallel.experts import spec as experts
from fivefold.parallel.fsdp import spec as fsdp
from fivefold.parallel.graphs import spec as graphs
from fivefold.parallel.linears import spec as linears
from fivefold.parallel.offload import spec as offload
from fivefold.parallel.pipeline import spec as pipeline
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute import spec as recompute
from fivefold.parallel.rows import spec as rows
from fivefold.parallel.tensor import spec as tensor


def edits(plan: ParallelPlan) -> tuple[Edit, ...]:
    """List all edits on this rank."""
    return tuple(edit for of_feature in EDITS for edit in of_feature(plan))


# Forwards and hooks nest in this order: later ones lie outside.
EDITS = (
    adapters.edits,  # before all: adapters are cut, sharded and multiplied like other linears
    adapters.edits_of_embedding,
    dropout.edits,  # before linears take up the branches of adapters
    tensor.edits,  # before the others, which ask for the sizes after the cut
    dropout.edits_of_embedding,  # its output over all tp ranks
    linears.edits,
    context.edits,  # before `rows`, whose positions are counted in front of this cut
    balance.edits,
    experts.edits,
    rows.edits,
    pipeline.edits,
    recompute.edits_of_modules,
    recompute.edits_in_graphs,
    graphs.edits,
    recompute.edits,
    offload.edits,
    adapters.edits_at_rest,
    fsdp.edits,
)
