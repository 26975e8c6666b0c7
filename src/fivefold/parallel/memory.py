"""Memory that a step needs on a rank, by kind, from the plan alone. No torch.

Memory peaks at one of a few moments (`MOMENTS`), which differ in what is there besides parameters and optimizer state.
The sums of each moment are defined once, here; the planner uses them with its own prices. Rehearsals of the real step
on the real caching allocator are the reference (docs/evidence/planned_memory.md). Not included: buffers of collectives
between ranks, work space of kernels and what the allocator keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fivefold.core.optimizers import OPTIMIZERS
from fivefold.models.facts import LayerCost
from fivefold.parallel.balance.spec import buffer_bytes
from fivefold.parallel.chunks.spec import chunked_numbers
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.context.spec import exchanged_numbers
from fivefold.parallel.fp8.memory import cast_numbers
from fivefold.parallel.fsdp.memory import resting_bytes, units_of
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.graphs.spec import working_numbers
from fivefold.parallel.loss.spec import logit_bytes
from fivefold.parallel.moments import MOMENTS
from fivefold.parallel.offload.spec import in_update
from fivefold.parallel.pipeline.memory import Passing, edge_bytes, under_way
from fivefold.parallel.pipeline.spec import PipelinePlan
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.memory import dear_numbers
from fivefold.parallel.tensor.memory import gathers_all_again

STATES = ("parameters", "optimizer state")  # can be kept in host memory
BETWEEN_STEPS = ("parameters", "gradients", "optimizer state")  # kinds that torch can tell apart in a running process
REST = "all other tensors"


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of this rank. `optimizer`: its state. `saved`: by layer, what forward passes leave for backward. `host`: by
    kind, what lies in host memory. `logits`: of one chunk of the loss, with its gradients. `buffers`: of routers.
    `moments`: moment -> kind in words -> bytes."""

    parameters: int
    gradients: int
    optimizer: int
    host: Mapping[str, int]
    saved: Mapping[str, int]
    logits: int
    buffers: int
    moments: Mapping[str, Mapping[str, int]]

    @cached_property
    def fullest(self) -> str:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def by_kind(self) -> Mapping[str, int]:
        """Bytes of each kind, in words, at the fullest moment."""
        return self.moments[self.fullest]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def step_bytes(plan: ParallelPlan, shape: StepShape) -> StepBytes:
    """Compute the bytes of one optimizer step."""
    own = [name for name in plan.placement.shards if plan.placement.holds(name)]
    held = {name: plan.placement.held_bytes(name, plan.placement.rests_in(name, shape.master_bytes)) for name in own}
    trained = {name: size for name, size in held.items() if plan.facts.parameters[name].is_trained}
    optimizer, matrices = OPTIMIZERS[shape.optimizer], set(plan.placement.block_matrices)
    state = {
        "parameters": sum(held.values()),
        "gradients": sum(trained.values()),
        "optimizer state": sum(
            plan.placement.state_bytes(name, shape.master_bytes)
            for kind in optimizer.state
            for name in trained
            if optimizer.keeps(kind, is_matrix=name in matrices)
        ),
        "router buffers": buffer_bytes(plan.placement.buffers),
    }
    saved, passing, away = _passing(plan, shape)
    resting, moving = _resting(plan, shape, state), passing.at()
    return StepBytes(
        parameters=state["parameters"],
        gradients=state["gradients"],
        optimizer=state["optimizer state"],
        host={
            **{what: state[what] * (what in plan.layout.rests_in_host) for what in STATES},
            "saved activations": away,
        },
        saved=saved,
        logits=passing.loss,
        buffers=state["router buffers"],
        moments={moment: {**resting[moment], **moving[moment]} for moment in MOMENTS},
    )


def _resting(plan: ParallelPlan, shape: StepShape, state: Mapping[str, int]) -> dict[str, dict[str, int]]:
    is_shared = len(plan.feature(FsdpPlan).users(plan.feature(FsdpPlan).units[-1])) > 1
    placement = plan.placement
    held = (placement.held_bytes(name, shape.master_bytes) for name in placement.shards if placement.holds(name))
    largest = max(held, default=0)
    layout = plan.layout
    state = in_update(state, largest, shape, away=layout.rests_in_host, state_dtype=layout.state_dtype)
    return resting_bytes(state, units_of(plan), layout.zero, shape, root_waits=is_shared)


def _passing(plan: ParallelPlan, shape: StepShape) -> tuple[dict[str, int], Passing, int]:
    """Bytes by layer that its micro batches in flight keep for backward; all bytes in flight; and those in host memory:
    of all but the last layer of a stage. With full recompute a layer keeps only its input."""
    layers = [last - first for first, last in plan.placement.stages.splits]
    orders = plan.feature(PipelinePlan).schedule(shape.micro_batches).orders
    counts = under_way(orders[plan.placement.coords.pp], layers)
    costs = dict(zip(plan.anatomy.layers, plan.facts.layer_costs, strict=True))
    kept, saved, stages, working = dict[str, int](), dict[str, int](), dict[int, int](), [0]
    away, fetched, moves = 0, 0, plan.layout.offload_activations
    for stage in plan.placement.own_stages:
        own = plan.placement.stages.layers[slice(*plan.placement.stages.splits[stage])]
        for layer in own:
            of_layer = layer_bytes(plan, layer, costs[layer], shape)
            kept[layer], more = of_layer.kept, of_layer.working
            if moves and layer != own[-1]:
                away += counts.most[stage] * kept[layer]
                fetched, kept[layer] = max(fetched, kept[layer]), 0
            saved[layer] = counts.most[stage] * kept[layer]
            working.append(more)
        edges = edge_bytes(plan, shape)
        between = edges[0] * (stage > 0) + edges[1] * (stage < plan.placement.stages.count - 1)
        saved[own[0]] += counts.most[stage] * between
        stages[stage] = sum(kept[layer] for layer in own) + between

    def added(numbers: Mapping[int, int]) -> int:
        of_heads = edge_bytes(plan, shape)[2] * max(0, numbers.get(plan.placement.stages.count - 1, 0) - 1)
        return sum(size * numbers[stage] for stage, size in stages.items()) + of_heads

    found = Passing(
        saved=added(counts.most),
        at_loss=added(counts.at_loss),
        later=added(counts.later),
        later_at_loss=added(counts.later_at_loss),
        layer=max(kept.values(), default=0),
        stage=max(stages.values(), default=0),
        working=max(working),
        loss=logit_bytes(plan, shape),
        fetched=fetched,
    )
    return saved, found, away


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a layer in one micro batch: `saved` by forward, `kept` of these until backward, and the `working` memory
    of its backward besides."""

    saved: int
    kept: int
    working: int


def layer_bytes(plan: ParallelPlan, layer: str, cost: LayerCost, shape: StepShape) -> LayerBytes:
    """Bytes of `layer`, with its `cost`. A recomputed layer keeps its input, and with selective recompute its expensive
    results; the rest of what it saves exists while its backward runs."""
    tp, splits, token = plan.layout.tp, plan.splits_sequence, shape.rows * shape.tokens * shape.compute_bytes
    made = cost.kept(shape.compute_bytes, compiled=shape.compiled)
    gathered = 0
    if gathers_all_again(plan, layer, shape):
        # This rank's part is recomputed from what the norm before it saves; gathered, it exists in backward.
        made, gathered = replace(made, entered=0.0), shape.hidden
    numbers = made.on_rank(tp, sequence_parallel=splits, expert_tp=plan.layout.expert_tp)
    if inside := chunked_numbers(plan, cost, compiled=shape.compiled):
        numbers -= inside / tp + shape.hidden * (1 - 1 / (tp if splits else 1))  # its pieces save their input
    numbers += cast_numbers(plan, layer, shape)
    saved = round((numbers + exchanged_numbers(plan, cost)) * token)
    entered = shape.hidden_bytes // (tp if splits else 1)
    working, dear = round((working_numbers(plan, cost, shape) + gathered) * token), 0
    if not shape.recompute.wraps(layer):
        return LayerBytes(saved, saved, working)
    if shape.recompute.keeps(layer):
        dear = round(dear_numbers(plan, layer, cost, shape) * token)
    again = saved - dear - entered * shape.compiled  # a compiled norm reads the input itself, and saves no cast of it
    return LayerBytes(saved, entered + dear, working + max(0, again))
