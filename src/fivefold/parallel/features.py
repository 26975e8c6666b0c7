"""Rules, edits, calls and bytes of all features, each in its order: the one place that names them all. No torch.

A feature is a folder beside this file. Its `spec.py` has the functions that are listed here: rules of a plan, edits of
modules, collectives, and bytes. `apply.py` has what is built of them.
"""

from fivefold.parallel.adapters import spec as adapters
from fivefold.parallel.balance import spec as balance
from fivefold.parallel.context import spec as context
from fivefold.parallel.dropout import spec as dropout
from fivefold.parallel.edits import Edit
from fivefold.parallel.experts import spec as experts
from fivefold.parallel.fp8 import memory as fp8_memory
from fivefold.parallel.fp8 import spec as fp8
from fivefold.parallel.fsdp import spec as fsdp
from fivefold.parallel.graphs import spec as graphs
from fivefold.parallel.linears import spec as linears
from fivefold.parallel.loss import spec as loss
from fivefold.parallel.matrices import spec as matrices
from fivefold.parallel.offload import spec as offload
from fivefold.parallel.outer import spec as outer
from fivefold.parallel.pipeline import spec as pipeline
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute import memory as recompute_memory
from fivefold.parallel.recompute import spec as recompute
from fivefold.parallel.rows import spec as rows
from fivefold.parallel.tensor import memory as tensor_memory
from fivefold.parallel.tensor import spec as tensor

# Rules that need the plan. Those of a layout by itself are in the `keys.py` of each feature.
RULES = (
    fp8.violations, adapters.violations, dropout.violations, outer.violations, fsdp.violations,
)  # fmt: skip

# Edits of modules. Forwards and hooks nest in this order: later ones lie outside.
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

# Collectives of a step, in its order: `OF_WORLD` of `calls.py` stand between the last two.
AROUND_LAYERS = (fsdp.calls, pipeline.calls)
IN_LAYERS = (tensor.calls, fp8.calls, loss.calls, context.calls, experts.calls, balance.calls)
OF_UPDATE = (matrices.calls,)

# What they add to the elements of a layer, and what then becomes of its bytes.
NUMBERS = (
    tensor_memory.layer_numbers,  # before the others, which change what the modules of a rank save
    graphs.layer_numbers,
    fp8_memory.layer_numbers,
    context.layer_numbers,
    dropout.layer_numbers,
)
KEPT = (recompute_memory.kept_bytes, offload.kept_bytes)


def edits(plan: ParallelPlan) -> tuple[Edit, ...]:
    """List all edits on this rank."""
    return tuple(edit for of_feature in EDITS for edit in of_feature(plan))
