"""What a step needs of a rank's memory, by kind, from the plan alone. No torch.

A step is full at one of a few moments (`MOMENTS`), which differ in what lies there besides parameters and the state of
the optimizer: what each adds up to is said once, here, and the planner adds up its own prices with it. Rehearsals of
the real step on the real caching allocator are what it is held against (docs/planned_memory.md). It leaves out buffers
of collectives between ranks, work space of kernels and what the allocator keeps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from fivefold.core.optimizers import OPTIMIZERS
from fivefold.core.schedule import Slot
from fivefold.models.anatomy import is_within
from fivefold.models.facts import LayerCost
from fivefold.parallel.collectives import StepShape

if TYPE_CHECKING:
    from fivefold.parallel.plan import ParallelPlan

# Forward passes are done, and the loss of the last one is computed with its gradients. The last layer's backward runs;
# then the one before it, while the last one's gradients are reduced. The first layer's, and all gradients are there.
MOMENTS = ("the loss", "a backward begins", "a layer later", "a backward ends")
Bytes = Any  # a number, or an array of them: the planner adds up many layouts at once


@dataclass(frozen=True)
class Units:
    """Numbers of a rank's FSDP units, as (gathered, reduced): of the largest layer with its experts; of its own unit,
    without them; of the embedding, where it has a unit of its own here; of the model's own unit; of all. `matrix`: of
    the largest parameter of a layer."""

    layer: tuple[int, int]
    own: tuple[int, int]
    embedding: tuple[int, int]
    root: tuple[int, int]
    total: tuple[int, int]
    matrix: int


@dataclass(frozen=True)
class Passing:
    """Bytes of micro batches under way.

    `saved`: what forward passes leave for backward. `at_loss`: the same, when the last stage has run forward. `layer`,
    `stage`: the largest layer's part of `saved`, and the largest stage's, in one micro batch. `working`: what the
    backward of a layer has besides, with all that recompute makes again. `loss`: one chunk of the loss with its
    gradients; 0 where another rank has it.
    """

    saved: Bytes
    at_loss: Bytes
    layer: Bytes
    stage: Bytes
    working: Bytes
    loss: Bytes

    def at(self) -> dict[str, dict[str, Bytes]]:
        """Of each moment, by kind."""
        kept = (self.at_loss, self.saved, self.saved - self.layer, self.saved - self.stage)
        nothing = 0 * self.saved
        working = (nothing, self.working, self.working, nothing)
        loss = (self.loss, nothing, nothing, nothing)
        return {
            moment: {"saved activations": own, "working memory": more, "loss": logits}
            for moment, own, more, logits in zip(MOMENTS, kept, working, loss, strict=True)
        }


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of this rank. `optimizer`: its state. `saved`: by layer, what forward passes leave for backward. `logits`:
    of one chunk of the loss, with its gradients. `buffers`: of routers. `moments`: moment -> kind in words -> bytes."""

    parameters: int
    gradients: int
    optimizer: int
    saved: Mapping[str, int]
    logits: int
    buffers: int
    moments: Mapping[str, Mapping[str, int]]

    @cached_property
    def fullest(self) -> str:
        """The moment at which most is there."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def by_kind(self) -> Mapping[str, int]:
        """At the fullest moment, each kind in words with its bytes."""
        return self.moments[self.fullest]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def step_bytes(plan: "ParallelPlan", shape: StepShape) -> StepBytes:
    """Of one optimizer step."""
    held = {name: plan.held_bytes(name, shape.master_bytes) for name in plan.shards if plan.holds(name)}
    trained = {name: size for name, size in held.items() if plan.facts.parameters[name].is_trained}
    optimizer, matrices = OPTIMIZERS[shape.optimizer], set(plan.block_matrices)
    state = {
        "parameters": sum(held.values()),
        "gradients": sum(trained.values()),
        "optimizer state": sum(
            size
            for kind in optimizer.state
            for name, size in trained.items()
            if optimizer.keeps(kind, is_matrix=name in matrices)
        ),
        "router buffers": buffer_bytes(plan.buffers),
    }
    saved, passing = _passing(plan, shape)
    resting, moving = _resting(plan, shape, state), passing.at()
    return StepBytes(
        parameters=state["parameters"],
        gradients=state["gradients"],
        optimizer=state["optimizer state"],
        saved=saved,
        logits=passing.loss,
        buffers=state["router buffers"],
        moments={moment: {**resting[moment], **moving[moment]} for moment in MOMENTS},
    )


def buffer_bytes(buffers: Mapping[str, tuple[int, ...]]) -> int:
    """Of the routers' buffers, in fp32; `buffers`: their shapes."""
    return 4 * sum(map(prod, buffers.values()))


def _units(plan: "ParallelPlan") -> Units:
    sizes = {unit.name: plan.padded_sizes(unit) for unit in plan.units}
    of_layers = [
        (_sum(size for name, size in sizes.items() if _is_of(name, layer)), sizes[layer]) for layer in plan.layers
    ]
    layer, own = max(of_layers, default=((0, 0), (0, 0)))
    root, embedding = sizes[""], sizes.get(plan.anatomy.embedding, (0, 0))
    matrix = max((plan.largest(unit) for unit in plan.units if is_within(f"{unit.name}.", plan.layers)), default=0)
    return Units(layer, own, embedding, root, _sum(sizes.values()), matrix)


def _resting(plan: "ParallelPlan", shape: StepShape, state: Mapping[str, int]) -> dict[str, dict[str, int]]:
    is_shared = len(plan.users(plan.units[-1])) > 1
    return resting_bytes(state, _units(plan), plan.layout.zero, shape, root_waits=is_shared)


def resting_bytes(
    state: Mapping[str, int], units: Units, zero: int, shape: StepShape, *, root_waits: bool
) -> dict[str, dict[str, int]]:
    """Moment -> kind -> bytes of what does not depend on the tokens of a micro batch. `state`: parameters, gradients,
    optimizer state and buffers of routers, all of them.

    Gradients are there from the end of the first backward on. ZeRO-3 has gathered the model's own unit, a layer, and
    in backward the next one beside it, without its experts; but not the embedding, which a backward does not read.
    ZeRO-1 and 2 have gathered all units. Gradients wait for their reduction in the compute type, and are then copied
    into one buffer in the type in which they are reduced. While a layer's activations are there, only its last matrix
    has a gradient, and the buffer of the experts before it is free again. ZeRO-1 keeps the sum of all micro batches.
    `root_waits`: two stages of the rank give to the model's own unit; between them only its sum is kept.
    """
    layer, own, root, total = units.layer, units.own, units.root, units.total
    first = max(units.embedding, layer)
    at_end = 0 if first == units.embedding else layer[0]
    in_backward, of_root = root[0] + layer[0] + own[0], 0 if root_waits else root[1]
    numbers = (root[0] + layer[0], in_backward, in_backward, root[0] + at_end)
    waiting = (
        0, (of_root + units.matrix) * shape.compute_bytes,
        (of_root + units.matrix) * shape.compute_bytes + own[1] * shape.reduce_bytes,
        (root[1] + first[1]) * shape.compute_bytes + max(root[1], first[1]) * shape.reduce_bytes,
    )  # fmt: skip
    found = {}
    for moment, gathered, unreduced in zip(MOMENTS, numbers, waiting, strict=True):
        is_there = shape.micro_batches > 1 or moment == MOMENTS[-1]
        summed = (total[1] if zero == 1 else root[1] * root_waits) * shape.reduce_bytes * is_there
        found[moment] = {
            **state,
            "gradients": state["gradients"] if is_there and zero > 1 else 0,
            "gathered parameters": (total[0] if zero < 3 else gathered) * shape.compute_bytes,
            "unreduced gradients": unreduced + summed,
        }
    return found


def _passing(plan: "ParallelPlan", shape: StepShape) -> tuple[dict[str, int], Passing]:
    """By layer, what its micro batches in flight keep for backward; and all that is under way. With recompute a layer
    keeps only its input."""
    order, end = plan.schedule(shape.micro_batches).orders[plan.coords.pp], plan.stages.count - 1
    layers = [last - first for first, last in plan.stages.splits]
    in_flight, at_loss = under_way(order, layers), under_way(order, layers, end if plan.has_ends[1] else None)
    costs = dict(zip(plan.anatomy.layers, plan.facts.layer_costs, strict=True))
    kept, saved, stages, working = dict[str, int](), dict[str, int](), dict[int, int](), [0]
    for stage in plan.own_stages:
        own = plan.stages.layers[slice(*plan.stages.splits[stage])]
        for layer in own:
            of_layer = layer_bytes(plan, costs[layer], shape, is_again=shape.recompute.wraps(layer))
            kept[layer], more = of_layer.kept, of_layer.working
            saved[layer] = in_flight[stage] * kept[layer]
            working.append(more)
        edges = edge_bytes(plan, shape)
        between = edges[0] * (stage > 0) + edges[1] * (stage < plan.stages.count - 1)
        saved[own[0]] += in_flight[stage] * between
        stages[stage] = sum(kept[layer] for layer in own) + between
    last = max(kept.values(), default=0)
    found = Passing(
        saved=sum(saved.values()),
        at_loss=sum(size * at_loss[stage] for stage, size in stages.items()),
        layer=last,
        stage=max(stages.values(), default=0),
        working=max(working),
        loss=logit_bytes(plan, shape),
    )
    return saved, found


@dataclass(frozen=True)
class LayerBytes:
    """Of a layer in one micro batch: what forward makes, what of it stays until backward, and what its backward has
    besides."""

    saved: int
    kept: int
    working: int


def layer_bytes(plan: "ParallelPlan", cost: LayerCost, shape: StepShape, *, is_again: bool) -> LayerBytes:
    """`is_again`: it keeps only its input, and is computed again in backward."""
    tp, splits, token = plan.layout.tp, plan.splits_sequence, shape.rows * shape.tokens * shape.compute_bytes
    made = cost.kept(shape.compute_bytes, compiled=shape.compiled)
    numbers = made.on_rank(tp, sequence_parallel=splits, expert_tp=plan.layout.expert_tp)
    saved = round((numbers + exchanged_numbers(plan, cost)) * token)
    entered = shape.hidden_bytes // (tp if splits else 1)
    working = round(working_numbers(plan, cost, shape) * token)
    return LayerBytes(saved, entered if is_again else saved, working + (saved if is_again else 0))


def exchanged_numbers(plan: "ParallelPlan", cost: LayerCost) -> float:
    """Numbers of a token that Ulysses keeps besides: keys and values once more, and what attention gives before it goes
    back to the ranks of its tokens."""
    if plan.cp_method.ulysses == 1:
        return 0.0
    heads = sum(each.query * each.value_size + each.kv * (each.key_size + each.value_size) for each in cost.attention)
    return heads / plan.layout.tp


def edge_bytes(plan: "ParallelPlan", shape: StepShape) -> tuple[int, int]:
    """What a pipeline holds of a micro batch in a stage, beside what layers keep: the input, which a layer keeps itself
    where it is compiled or computed again, and the output."""
    size = shape.hidden_bytes // (plan.layout.tp if plan.splits_sequence else 1)
    keeps = shape.compiled or any(shape.recompute.wraps(layer) for layer in plan.anatomy.layers)
    return 0 if keeps else size, size


def working_numbers(plan: "ParallelPlan", cost: LayerCost, shape: StepShape) -> float:
    """Numbers of a token that the backward of a layer has at once beside what forward saved: gradients of the widest
    tensor and of what it was made of, and of the hidden states."""
    widest = max(max(each.inputs, each.outputs) * each.times for each in cost.matmuls)
    return 2 * widest / plan.layout.tp + 2 * shape.hidden


MORE = {"F": 1, "I": 0, "B": -1, "W": -1}  # micro batches in flight after a slot


def under_way(order: Sequence[Slot], layers: Sequence[int], stage: int | None = None) -> dict[int, int]:
    """Stage of a rank whose slots come in `order` -> its micro batches in flight, between their forward and their
    backward, when the rank has the most. `layers`: of each stage of the pipeline. `stage`: only moments at which this
    one has run forward count.

    Where gradients of weights come apart, the inputs of linears and the gradients of their outputs wait for them: about
    as much as forward left.
    """
    now = dict.fromkeys((slot.stage for slot in order), 0)
    most, full, layers_now = dict(now), 0, 0
    for slot in order:
        more = MORE[slot.kind]
        now[slot.stage] += more
        layers_now += more * layers[slot.stage]
        if slot.kind == "F" and stage in (None, slot.stage) and layers_now > full:
            most, full = dict(now), layers_now
    return most


def logit_bytes(plan: "ParallelPlan", shape: StepShape) -> int:
    """The loss of a chunk with its gradients: while the cross entropy has its softmax in fp32 (fp64), or while the
    gradient of the head is computed, whichever is more.

    Several chunks: the head's gradient is summed up in fp32, and that of the chunk before is still there, as is the
    gradient of its logits. Of the hidden states there are what the last layer gave; what the norm before the head
    keeps, which is them in fp32, scaled, and weighted; these gathered over tp; and their gradient.
    """
    if not plan.has_ends[1]:
        return 0
    compute, precise, several = shape.compute_bytes, max(4, shape.compute_bytes), len(shape.loss_chunks) > 1
    logits, weight = max(shape.loss_chunks) * plan.vocabulary, plan.vocabulary * shape.hidden
    softmax = logits * (2 * compute + precise if precise > compute else compute)
    before = weight * (precise + compute) if several else 0
    in_loss = before + softmax + (logits * compute if several else 0)
    both = 1 if precise == compute else 2  # in fp32 the gradient takes the memory of the logits
    in_head = before + weight * compute + both * logits * compute
    tp, splits = plan.layout.tp, plan.splits_sequence
    of_norm = 3 + precise // compute
    return (
        max(in_loss, in_head)
        + shape.hidden_bytes * of_norm // (tp if splits else 1)
        + shape.hidden_bytes * (1 + splits)
    )


def _sum(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    pairs = tuple(sizes)
    return sum(gathered for gathered, _ in pairs), sum(reduced for _, reduced in pairs)


def _is_of(unit: str, layer: str) -> bool:
    return unit == layer or is_within(unit, [layer])
