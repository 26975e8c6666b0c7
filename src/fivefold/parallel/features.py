"""Limits, rules, edits, calls and bytes of all features, each list in its order: the one place of them. No torch.

A feature is a folder beside this file. Its `spec.py` has the functions that are listed here: rules of a plan, edits of
modules, collectives, and bytes. The `runtime.py` beside it runs them.

Tests compare the sums of `calls` with the recorded collectives of a run. A planner needs the calls one by one: the
bytes of each, its ranks, and whether compute can hide it.
"""

from collections.abc import Callable, Iterator

from fivefold.core.model_limits import ModelLimits
from fivefold.models.facts import ModelFacts
from fivefold.parallel.adapters import spec as adapters
from fivefold.parallel.balance import spec as balance
from fivefold.parallel.collectives import Call, StepShape
from fivefold.parallel.context import spec as context
from fivefold.parallel.dropout import spec as dropout
from fivefold.parallel.experts import spec as experts
from fivefold.parallel.fp8 import spec as fp8
from fivefold.parallel.fsdp import spec as fsdp
from fivefold.parallel.graphs import spec as graphs
from fivefold.parallel.linears import spec as linears
from fivefold.parallel.loss import spec as loss
from fivefold.parallel.matrices import spec as matrices
from fivefold.parallel.offload import spec as offload
from fivefold.parallel.outer import spec as outer
from fivefold.parallel.pipeline import spec as pipeline
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.recompute import spec as recompute
from fivefold.parallel.rows import spec as rows
from fivefold.parallel.step import Step
from fivefold.parallel.tensor import spec as tensor

# What a traced model allows: each adds the limits of its feature, which `legality` asks for.
LIMITED = (tensor.limited, context.limited, pipeline.limited, experts.limited)

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

# Collectives of a step, in its order: those over the world (`_of_world`) stand between the last two.
AROUND_LAYERS = (fsdp.calls, pipeline.calls)
IN_LAYERS = (tensor.calls, fp8.calls, loss.calls, context.calls, experts.calls, balance.calls)
OF_UPDATE = (matrices.calls,)

# What they add to the elements of a layer, and what then becomes of its bytes.
NUMBERS = (
    tensor.layer_numbers,  # before the others, which change what the modules of a rank save
    graphs.layer_numbers,
    fp8.layer_numbers,
    context.layer_numbers,
    dropout.layer_numbers,
)
KEPT = (recompute.kept_bytes, offload.kept_bytes)


def limits_of(facts: ModelFacts) -> ModelLimits:
    limits = ModelLimits(name=facts.model_class)
    for limited in LIMITED:
        limits = limited(limits, facts)
    return limits


def edits(plan: ParallelPlan) -> tuple[Edit, ...]:
    return tuple(edit for of_feature in EDITS for edit in of_feature(plan))


def calls(plan: ParallelPlan, shape: StepShape) -> tuple[Call, ...]:
    """List every collective of one optimizer step on this rank. An axis of one rank sends nothing."""
    return tuple(_calls(plan, shape, *AROUND_LAYERS, *IN_LAYERS, _of_world, *OF_UPDATE))


def layer_calls(plan: ParallelPlan, shape: StepShape) -> Iterator[Call]:
    """Yield the `calls` of layers and of the model's ends, and those that go with them once a step."""
    return _calls(plan, shape, *IN_LAYERS)


def _calls(plan: ParallelPlan, shape: StepShape, *parts: Callable[[Step], Iterator[Call]]) -> Iterator[Call]:
    step = Step(plan, shape)
    for part in parts:
        yield from (call for call in part(step) if plan.placement.grid.size(call.axis) > 1)


def _of_world(step: Step) -> Iterator[Call]:
    """All-reduces over the world. Before the passes: token counts. After them: the loss and the gradient norm. Pairs of
    answers add their counts before, and the means of each metric after; `fp8.scale_bytes` adds scales. Replicas that
    train apart have a norm each."""
    pairs = (8, 8 + 16 * step.shape.metrics) if step.shape.answers else ()
    for size in (40, *pairs, *fp8.scale_bytes(step), 8 + 8 * step.plan.layout.copies_apart):
        yield Call(axis="world", kind="all_reduce", bytes=size, phase="step")
