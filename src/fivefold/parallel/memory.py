"""Memory that a step needs on a rank, by kind, from the plan alone. No torch.

Memory peaks at one of a few moments (`MOMENTS`), which differ in what is there besides parameters and optimizer state.
The sums of each moment are defined once, here; the planner uses them with its own prices. Rehearsals of the real step
on the real caching allocator are the reference (docs/evidence/planned_memory.md). Not included: buffers of collectives
between ranks, work space of kernels and what the allocator keeps.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from fivefold.core.optimizers import OPTIMIZERS
from fivefold.core.schedule import Slot
from fivefold.core.state_dtypes import AT_ONCE, RESTORED
from fivefold.models.anatomy import is_within
from fivefold.models.facts import LayerCost, Matmul
from fivefold.parallel.chunks.spec import ChunkPlan
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.fp8.recipes import RECIPES, agreements
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.fsdp.unshards import WITHOUT_FSDP
from fivefold.parallel.graphs.spec import GraphPlan
from fivefold.parallel.pipeline.spec import PipelinePlan
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.policy import MODES, Choice, Mode, Recompute
from fivefold.parallel.recompute.spec import RecomputePlan

# All forwards are done, and the last loss is computed with its gradients. The last layer's backward runs; then the one
# before it, while the last one's gradients are reduced; finally the first layer's, when all gradients are there. Until
# the first backward of a step has ended, there are no gradients: three moments come once more without them.
FIRST = {
    "the first loss": "the loss",
    "the first backward begins": "a backward begins",
    "a layer later in it": "a layer later",
}
FLOPS_PER_BYTE = 200  # of an H100's matmuls, per byte of memory traffic
UPDATE = "the update"
MOMENTS = (*FIRST.values(), "a backward ends", UPDATE, *FIRST)
SMALL = 16  # saved tensors below 1 / SMALL of a layer's input stay on the device: they are many and small
PARTS = 3  # of offloaded optimizer state, on the device at once: arriving, in update, leaving
STATES = ("parameters", "optimizer state")  # can be kept in host memory
BETWEEN_STEPS = ("parameters", "gradients", "optimizer state")  # kinds that torch can tell apart in a running process
REST = "all other tensors"
PART_BYTES = 64 * 2**20  # of the parameters of a part; in a small model an eighth of them
Bytes = Any  # a number, or an array of them: the planner sums many layouts at once


@dataclass(frozen=True)
class Units:
    """Sizes of a rank's FSDP units (bytes gathered, numbers reduced). `layer`: the largest layer with its experts.
    `own`: its own unit, without them. `embedding`: if it has a unit of its own here. `root`: the model's own unit.
    `total`: all units. `matrix`: numbers of the largest parameter of a layer. `ahead`: bytes of a layer that backward
    prefetches while the one after it runs: its own unit, or 0 if this rank has it whole. Not `by_fsdp`: all parameters
    are there, copied or as stored."""

    layer: tuple[int, int]
    own: tuple[int, int]
    embedding: tuple[int, int]
    root: tuple[int, int]
    total: tuple[int, int]
    matrix: int
    ahead: int
    by_fsdp: bool = True


@dataclass(frozen=True)
class Passing:
    """Bytes of micro batches in flight.

    `saved`: what forward passes leave for backward. `at_loss`: the same, when the last stage has run forward. `later`,
    `later_at_loss`: the same, once there are gradients; 0 if no backward, or no loss, comes after the first one.
    `layer`, `stage`: the largest layer's part of `saved`, and the largest stage's, in one micro batch. `working`: what
    the backward of a layer needs besides, with everything that is recomputed. `loss`: one chunk of the loss with its
    gradients; 0 if another rank has it. `fetched`: what arrives from host memory while the layer after it runs
    backward.
    """

    saved: Bytes
    at_loss: Bytes
    later: Bytes
    later_at_loss: Bytes
    layer: Bytes
    stage: Bytes
    working: Bytes
    loss: Bytes
    fetched: Bytes = 0

    def at(self) -> dict[str, dict[str, Bytes]]:
        """Bytes by moment and kind."""
        nothing, later, has_loss = 0 * self.saved, self.later - self.layer, self.later_at_loss > 0
        comes = self.fetched
        kept = (
            self.later_at_loss, self.later + comes, (later + 2 * comes) * (later > 0), self.saved - self.stage, nothing,
            self.at_loss, self.saved + comes, self.saved - self.layer + 2 * comes,
        )  # fmt: skip
        working = (nothing, self.working, self.working, nothing, nothing, nothing, self.working, self.working)
        loss = (self.loss * has_loss, nothing, nothing, nothing, nothing, self.loss, nothing, nothing)
        return {
            moment: {"saved activations": own, "working memory": more, "loss": logits}
            for moment, own, more, logits in zip(MOMENTS, kept, working, loss, strict=True)
        }


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


def buffer_bytes(buffers: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of the routers' buffers, in fp32; `buffers`: their shapes."""
    return 4 * sum(map(prod, buffers.values()))


def _units(plan: ParallelPlan) -> Units:
    fsdp, layers = plan.feature(FsdpPlan), plan.placement.layers
    sizes = {unit.name: (fsdp.gathered_bytes(unit), fsdp.padded_sizes(unit)[1]) for unit in fsdp.units}
    of_layers = [(_sum(size for name, size in sizes.items() if _is_of(name, each)), sizes[each]) for each in layers]
    layer, own = max(of_layers, default=((0, 0), (0, 0)))
    root, embedding = sizes[""], sizes.get(plan.anatomy.embedding, (0, 0))
    matrix = max((fsdp.largest(unit) for unit in fsdp.units if is_within(f"{unit.name}.", layers)), default=0)
    grid = plan.placement.grid
    sent = (unit for unit in fsdp.units if unit.name in layers and grid.fsdp_shards(unit.over) > 1)
    ahead = max((sizes[unit.name][0] for unit in sent), default=0)
    return Units(layer, own, embedding, root, _sum(sizes.values()), matrix, ahead, fsdp.is_used)


def _resting(plan: ParallelPlan, shape: StepShape, state: Mapping[str, int]) -> dict[str, dict[str, int]]:
    is_shared = len(plan.feature(FsdpPlan).users(plan.feature(FsdpPlan).units[-1])) > 1
    placement = plan.placement
    held = (placement.held_bytes(name, shape.master_bytes) for name in placement.shards if placement.holds(name))
    largest = max(held, default=0)
    layout = plan.layout
    state = in_update(state, largest, shape, away=layout.rests_in_host, state_dtype=layout.state_dtype)
    return resting_bytes(state, _units(plan), layout.zero, shape, root_waits=is_shared)


def in_update(
    state: Mapping[str, int], largest: int, shape: StepShape, *, away: Collection[str], state_dtype: str
) -> dict[str, int]:
    """Add to `state` the memory of an update on the device: a piece of the state that is converted to the dtype of the
    weights, and the parts in transit of the kinds that are `away`, in host memory. `largest`: bytes of the largest
    parameter, which is a part of its own."""
    more = RESTORED[state_dtype] * min(AT_ONCE, largest // shape.master_bytes)
    part = part_bytes(state["parameters"])
    share = min(1.0, (max(part, largest) + (PARTS - 1) * part) / max(1, state["parameters"]))
    more += round(sum(state[what] for what in away) * share)
    return {**state, **dict.fromkeys(away, 0), UPDATE: more}


def part_bytes(parameters: int) -> int:
    """Size of a part of `parameters` bytes in all."""
    return min(PART_BYTES, parameters // 8)


def resting_bytes(
    state: Mapping[str, int], units: Units, zero: int, shape: StepShape, *, root_waits: bool
) -> dict[str, dict[str, int]]:
    """Moment -> kind -> bytes that do not depend on the tokens of a micro batch. `state`: all parameters, gradients,
    optimizer state and buffers of routers.

    Gradients exist from the end of the first backward on. ZeRO-3 has gathered the model's own unit, a layer, and in
    backward the next one without its experts (a layer that a rank has whole is copied in its turn). The embedding is
    not gathered then, because backward does not read it. ZeRO-1 and 2 have gathered all units.

    Gradients wait for their reduction in the compute dtype, and are then copied into one buffer in the dtype of the
    reduction. While a layer's activations exist, only its last matrix has a gradient, and the buffer of the experts
    before it is free again. ZeRO-1 keeps the sum of all micro batches. In the update nothing of a pass is left;
    `state[UPDATE]` is what `in_update` adds. `root_waits`: two stages of the rank add to the model's own unit; between
    them only its sum is kept.
    """
    layer, own, root, total = units.layer, units.own, units.root, units.total
    zero = zero if units.by_fsdp else WITHOUT_FSDP
    first = max(units.embedding, layer)
    at_end = 0 if first == units.embedding else layer[0]
    at_loss, in_backward = root[0] + layer[0], root[0] + layer[0] + units.ahead
    at_begin = ((0 if root_waits else root[1]) + units.matrix) * shape.compute_bytes
    a_layer_later = at_begin + own[1] * shape.reduce_bytes
    last = (root[1] + first[1]) * shape.compute_bytes + max(root[1], first[1]) * shape.reduce_bytes
    numbers = (at_loss, in_backward, in_backward, root[0] + at_end, 0, at_loss, in_backward, in_backward)
    waiting = (0, at_begin, a_layer_later, last, 0, 0, at_begin, a_layer_later)
    found, more = {}, state.get(UPDATE, 0)
    state = {kind: size for kind, size in state.items() if kind != UPDATE}
    for moment, gathered, unreduced in zip(MOMENTS, numbers, waiting, strict=True):
        is_there, is_update = moment not in FIRST, moment == UPDATE
        summed = (total[1] if zero == 1 else root[1] * root_waits) * shape.reduce_bytes * (is_there and not is_update)
        found[moment] = {
            **state,
            "gradients": state["gradients"] if is_there and (zero > 1 or is_update) else 0,
            "optimizer state": state.get("optimizer state", 0) + more * is_update,
            "gathered parameters": total[0] if zero < 3 else gathered,
            "unreduced gradients": unreduced + summed,
        }
    return found


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


def layer_choices(plan: ParallelPlan, shape: StepShape) -> dict[str, dict[Mode, Choice]]:
    """Each layer of this rank under each mode of recompute, for all its micro batches in flight."""
    layers = [last - first for first, last in plan.placement.stages.splits]
    orders = plan.feature(PipelinePlan).schedule(shape.micro_batches).orders
    counts = under_way(orders[plan.placement.coords.pp], layers)
    costs = dict(zip(plan.anatomy.layers, plan.facts.layer_costs, strict=True))
    return {
        layer: {
            mode: replace(choice, kept=counts.most[stage] * choice.kept)
            for mode, choice in mode_choices(plan, layer, costs[layer], shape).items()
        }
        for stage in plan.placement.own_stages
        for layer in plan.placement.stages.layers[slice(*plan.placement.stages.splits[stage])]
    }


def mode_choices(plan: ParallelPlan, layer: str, cost: LayerCost, shape: StepShape) -> dict[Mode, Choice]:
    """A layer under each mode of recompute, in one micro batch. Its work is measured in bytes of memory traffic:
    `FLOPS_PER_BYTE` FLOPs of a matmul or of attention count as one byte."""
    of = {mode: layer_bytes(plan, layer, cost, replace(shape, recompute=Recompute(mode))) for mode in MODES}
    features = sum(each.query * (each.key_size + each.value_size) for each in cost.attention)
    flops = shape.rows * shape.tokens * (2 * cost.active + features * shape.tokens * plan.layout.cp) / plan.layout.tp
    traffic = 2.0 * of["none"].saved
    again = {"none": 0.0, "selective": traffic, "full": traffic + flops / FLOPS_PER_BYTE}
    return {mode: Choice(of[mode].kept, again[mode]) for mode in MODES}


def layer_bytes(plan: ParallelPlan, layer: str, cost: LayerCost, shape: StepShape) -> LayerBytes:
    """Bytes of `layer`, with its `cost`. A recomputed layer keeps its input, and with selective recompute its expensive
    results; the rest of what it saves exists while its backward runs."""
    tp, splits, token = plan.layout.tp, plan.splits_sequence, shape.rows * shape.tokens * shape.compute_bytes
    made = cost.kept(shape.compute_bytes, compiled=shape.compiled)
    gathered = 0
    if _gathers_again(plan, layer, shape):
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


def _gathers_again(plan: ParallelPlan, layer: str, shape: StepShape) -> bool:
    """True if a layer gathers the inputs of all its column/row pairs again in backward."""
    blocks = (block for block in plan.facts.partition.tp_blocks if is_within(block.row, [layer]))
    entries = [entry for block in blocks for entry in block.entries]
    return bool(entries) and all(plan.feature(GraphPlan).gathers_again(layer, entry, shape) for entry in entries)


def dear_numbers(plan: ParallelPlan, layer: str, cost: LayerCost, shape: StepShape) -> float:
    """Elements per token that selective recompute saves in a layer: outputs of its linears and of attention, with one
    fp32 statistic of each query, and rows of experts. The last linear's output is saved only in fp8, because those
    linears save their own products."""
    tp, splits, partition = plan.layout.tp, plan.splits_sequence, plan.facts.partition
    in_fp8 = set() if plan.reduces_rows else {linear.name for linear in plan.feature(Fp8Plan).linears}
    inside = sum(
        each.query * (each.value_size + max(4, shape.compute_bytes) / shape.compute_bytes) for each in cost.attention
    )
    found = exchanged_numbers(plan, cost)
    if found:  # queries, too, are saved before and after the exchange
        found += sum(each.query * each.key_size for each in cost.attention) / tp
    for matmul in cost.matmuls:
        name, sizes = f"{layer}.{matmul.name}", (matmul.outputs, matmul.inputs)
        role = partition.roles.get(name)
        if role is not None and role.kind == "experts":
            found += _dear_rows(plan, name, matmul, shape)
        elif name in in_fp8 and not plan.feature(RecomputePlan).keeps(name):
            found += matmul.outputs
        elif plan.feature(RecomputePlan).keeps(name) and role is not None and role.kind == "column":
            inside += sizes[role.dim or 0]
        elif plan.feature(RecomputePlan).keeps(name) and role is not None and role.kind == "row":
            found += sizes[1 - (role.dim or 0)] / (tp if splits else 1)
        elif plan.feature(RecomputePlan).keeps(name):
            found += matmul.outputs
    return found + inside / tp


def _dear_rows(plan: ParallelPlan, name: str, matmul: Matmul, shape: StepShape) -> float:
    """Elements per token saved for the expert matrices `name`. The first ones make features. The second ones make rows
    as wide as hidden states; rows that are sent are saved when they arrive, and when they come back."""
    layout = plan.layout
    features = next((each.features for each in plan.facts.experts if is_within(name, [each.name])), None)
    if features is not None and name.endswith(features.first):
        return (matmul.outputs, matmul.inputs)[features.made - 1] * matmul.times / layout.tp
    rows = 3 if plan.placement.grid.size("ep") > 1 else 1
    return rows * shape.hidden * matmul.times / (1 if layout.expert_tp else layout.tp)


def cast_numbers(plan: ParallelPlan, layer: str, shape: StepShape) -> float:
    """Elements per token that fp8 linears of `layer` save beyond those of the compute dtype; negative if fewer.

    If an input is cast for weight gradients, backward does not read the input itself. A compiled layer recomputes it,
    element by element, from what the preceding norm or activation saves, and casts it again by the same scale.
    (Attention saves its output in any case; over cp it is outside of graphs, and so is the norm before q, k and v.) A
    cast is saved, one byte a number, if the scale comes from other ranks (of a cast that serves both products also if
    that of the gradients does). It is also saved if linears stay outside of graphs (delayed scaling), after which an
    activation saves its output. Eager layers save the cast if it serves both products.
    """
    groups = [group for group in plan.feature(Fp8Plan).inputs if is_within(group[0].name, [layer])]
    if not groups or RECIPES[plan.layout.fp8].weight_grad is None:
        return 0.0
    recipe, found = RECIPES[plan.layout.fp8], 0.0
    first = ("output", "input_grad") if recipe.casts_once else ("output",)
    spanned = {dim for product, dim, _ in agreements(recipe, 1, 1, [1]) if product in first}
    blocks = {f"{block.row}.weight": block.heads is not None for block in plan.facts.partition.tp_blocks}
    outside = [
        block.owner for block in plan.facts.partition.tp_blocks if block.heads and plan.placement.grid.size("cp") > 1
    ]
    for linear in (group[0] for group in groups):
        is_row, of_attention = linear.name in blocks, blocks.get(linear.name, False)
        agrees = any(plan.placement.grid.size(linear.axes[dim]) > 1 for dim in spanned if dim in linear.axes)
        if shape.compiled:
            is_given = of_attention or is_within(linear.name, outside)
            is_left_out = not (is_given or (recipe.history and is_row))
            is_cast_kept = (agrees or recipe.history > 0) and (recipe.casts_once or not of_attention)
        else:
            is_left_out, is_cast_kept = recipe.casts_once and not of_attention, recipe.casts_once
        found += linear.inputs * (is_cast_kept / shape.compute_bytes - is_left_out)
    return found


def chunked_numbers(plan: ParallelPlan, cost: LayerCost, *, compiled: bool) -> float:
    """Elements per token that an MLP in pieces does not save: the outputs of its first linears, and the activation's
    results from these; compiled, the latter only as the input of its last linear."""
    own = [each for each in cost.matmuls if each.name.removesuffix(".weight") in plan.feature(ChunkPlan).linears]
    if not own:
        return 0.0
    *columns, row = own
    made = sum(each.outputs for each in columns)
    return float(made + row.inputs if compiled else 2 * made)


def exchanged_numbers(plan: ParallelPlan, cost: LayerCost) -> float:
    """Elements per token that Ulysses saves in addition: keys and values once more, and the output of attention before
    it goes back to the ranks of its tokens."""
    if plan.cp_method.ulysses == 1:
        return 0.0
    heads = sum(each.query * each.value_size + each.kv * (each.key_size + each.value_size) for each in cost.attention)
    return heads / plan.layout.tp


def edge_bytes(plan: ParallelPlan, shape: StepShape) -> tuple[int, int, int]:
    """Bytes that a stage of a pipeline holds for a micro batch besides those of layers: the input, unless a compiled or
    recomputed layer saves it itself, and the output. In the last stage, for each micro batch after the first of those
    that have their loss: the gradients of the head and of its input."""
    size = shape.hidden_bytes // (plan.layout.tp if plan.splits_sequence else 1)
    keeps = shape.compiled or any(shape.recompute.wraps(layer) for layer in plan.placement.layers)
    return 0 if keeps else size, size, _of_head(plan, shape) * shape.compute_bytes + shape.hidden_bytes


def _of_head(plan: ParallelPlan, shape: StepShape) -> int:
    """Elements in the gradient of the head; 0 if it is frozen."""
    return plan.vocabulary * shape.hidden * plan.facts.parameters[plan.head_weight].is_trained


def working_numbers(plan: ParallelPlan, cost: LayerCost, shape: StepShape) -> float:
    """Elements per token that the backward of a layer has at once besides saved ones: gradients of the widest tensor
    and of its inputs, and of the hidden states; for experts, of all their rows. An MLP in pieces has that of a piece,
    and everything that its forward recomputes.

    A compiled layer in one graph has the gradients of gate, up and their product at once, and that of its output. If
    its graph ends at attention over cp, it frees the product before gate and up have gradients."""
    matmuls = [
        each for each in cost.matmuls if each.name.removesuffix(".weight") not in plan.feature(ChunkPlan).linears
    ]
    widest = max((max(each.inputs, each.outputs) * each.times for each in matmuls), default=0)
    experts = max((each.times for each in matmuls), default=1)
    made, hidden = 2 * widest, 2 * shape.hidden
    if shape.compiled and experts == 1 and plan.layout.fp8 == "none":
        ends_inside = plan.placement.grid.size("cp") > 1 or bool(plan.feature(ChunkPlan).linears)
        made, hidden = widest * (1 if ends_inside else 3), shape.hidden
    whole = max(made / plan.layout.tp, attention_numbers(plan, cost, shape))
    if not (inside := chunked_numbers(plan, cost, compiled=False)):
        return whole + hidden
    widest = max(max(each.inputs, each.outputs) for each in set(cost.matmuls) - set(matmuls))
    piece = (inside + 2 * widest) / plan.layout.tp / plan.layout.mlp_chunks
    return max(whole + hidden, piece + 3 * shape.hidden)


def attention_numbers(plan: ParallelPlan, cost: LayerCost, shape: StepShape) -> float:
    """Elements per token that the backward of attention has at once if keys and values come from other ranks. These are
    its own gradients in fp32; the received keys and values, of one rank in a ring or of all, with their gradients in
    fp32; and those gradients in transit, sent and received. In a ring the next ones are arriving."""
    ring = plan.cp_method.ring
    if ring == 1:
        return 0.0
    wide = max(4, shape.compute_bytes) / shape.compute_bytes
    queries = sum(each.query * each.key_size for each in cost.attention)
    keys = sum(each.kv * (each.key_size + each.value_size) for each in cost.attention)
    come = ring * (3 + wide) if plan.cp_method.gathers else 4 + wide
    return ((queries + keys) * wide + keys * come) / plan.layout.tp


@dataclass(frozen=True)
class UnderWay:
    """Stage of a rank -> its micro batches between their forward and their backward, when the rank has the most.
    `at_loss`: at the moments after a forward of the last stage, if this rank has it. `later`, `later_at_loss`: once a
    backward has left gradients; 0 if no such moment comes."""

    most: Mapping[int, int]
    at_loss: Mapping[int, int]
    later: Mapping[int, int]
    later_at_loss: Mapping[int, int]


def under_way(order: Sequence[Slot], layers: Sequence[int]) -> UnderWay:
    """Count micro batches in flight on a rank with slots in `order`. `layers`: of each stage of the pipeline.

    With separate slots for weight gradients, the inputs of linears and the gradients of their outputs wait for them:
    about as much as forward left.
    """
    stages = {slot.stage for slot in order}
    last = len(layers) - 1
    gives_loss = {last} if last in stages else stages
    count, is_later, full, places = 0, False, [0] * 4, [-1] * 4
    for at, slot in enumerate(order):
        count += layers[slot.stage] * (slot.kind == "F")
        if count > full[0] or (is_later and count > full[2]) or (slot.kind == "F" and slot.stage in gives_loss):
            has_loss = slot.kind == "F" and slot.stage in gives_loss
            for which, is_such in enumerate((True, has_loss, is_later, is_later and has_loss)):
                if is_such and count > full[which]:
                    places[which], full[which] = at, count
        if slot.kind in "BW":
            count -= layers[slot.stage]
            is_later = True
    return UnderWay(*(_counted(order, at, stages) for at in places))


def _counted(order: Sequence[Slot], at: int, stages: Iterable[int]) -> dict[int, int]:
    """Stage -> its micro batches between their forward and their backward during slot `at`; -1: before all slots."""
    now = dict.fromkeys(stages, 0)
    for number, slot in enumerate(order[: at + 1]):
        if slot.kind == "F":
            now[slot.stage] += 1
        elif slot.kind in "BW" and number < at:
            now[slot.stage] -= 1
    return now


def logit_bytes(plan: ParallelPlan, shape: StepShape) -> int:
    """Bytes of the loss of a chunk with its gradients: while the cross entropy has its softmax in fp32 (fp64), or while
    the gradient of the head is computed, whichever is more.

    With several chunks the head's gradient is summed in fp32. Compiled, no softmax is saved, and a gradient takes the
    memory of its logits. Hidden states exist as the output of the last layer; as saved by the norm before the head (in
    fp32, scaled, and weighted); gathered over tp; and as their gradient.
    """
    if not plan.placement.has_ends[1]:
        return 0
    compute, precise, several = shape.compute_bytes, max(4, shape.compute_bytes), len(shape.loss_chunks) > 1
    logits, weight = max(shape.loss_chunks) * plan.vocabulary, _of_head(plan, shape)
    in_place = shape.compiled or precise == compute
    softmax = logits * (compute if in_place else 2 * compute + precise)
    before = weight * precise if several else 0
    in_loss = before + softmax
    both = 1 if in_place else 2
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
