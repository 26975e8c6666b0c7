"""Bytes of FSDP: parameters that it gathers, and gradients that wait to be reduced. No torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fivefold.models.anatomy import is_within
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.fsdp.unshards import WITHOUT_FSDP
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.ranks import RankGrid
from fivefold.parallel.step import FIRST, MOMENTS, UPDATE


@dataclass(frozen=True)
class Units:
    """Sizes of a rank's FSDP units (bytes gathered, numbers reduced). `layer`: the largest layer with its experts.
    `own`: its own unit, without them. `embedding`: if it has a unit of its own here. `root`: the model's own unit.
    `total`: all units. `matrix`: numbers of the largest parameter of a layer. `ahead`: bytes of a layer that backward
    prefetches while the one after it runs: its own unit, or 0 if this rank has it whole. `sent`: of the gather of that.
    `copies`: bytes of secondary copies. `node`: ranks of a node, if collectives have two levels; else 0.
    `codes_gradients`: reductions send eight bits. Not `by_fsdp`: all parameters are there, copied or as stored."""

    layer: tuple[int, int]
    own: tuple[int, int]
    embedding: tuple[int, int]
    root: tuple[int, int]
    total: tuple[int, int]
    matrix: int
    ahead: int
    copies: int = 0
    sent: int = 0
    node: int = 0
    codes_gradients: bool = False
    by_fsdp: bool = True


def rank_resting_bytes(plan: ParallelPlan, shape: StepShape, state: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """`bytes_of_units` of the rank of a plan."""
    fsdp = plan.feature(FsdpPlan)
    root_waits = len(fsdp.users(fsdp.units[-1])) > 1
    goes_on = shape.micro_batches > 1
    return bytes_of_units(state, _units(plan), plan.layout.zero, shape, root_waits=root_waits, goes_on=goes_on)


def _units(plan: ParallelPlan) -> Units:
    fsdp, layers = plan.feature(FsdpPlan), plan.placement.layers
    sizes = {unit.name: (fsdp.gathered_bytes(unit), fsdp.padded_sizes(unit)[1]) for unit in fsdp.units}
    of_layers = [
        (_sum(size for name, size in sizes.items() if name == layer or is_within(name, [layer])), sizes[layer])
        for layer in layers
    ]
    largest, own = max(of_layers, default=((0, 0), (0, 0)))
    sent = [unit for unit in fsdp.units if unit.name in layers and plan.placement.grid.fsdp_shards(unit.over) > 1]
    return Units(
        layer=largest,
        own=own,
        embedding=sizes.get(plan.anatomy.embedding, (0, 0)),
        root=sizes[""],
        total=_sum(sizes.values()),
        matrix=max((fsdp.largest(unit) for unit in fsdp.units if is_within(f"{unit.name}.", layers)), default=0),
        ahead=max((sizes[unit.name][0] for unit in sent), default=0),
        copies=sum(map(fsdp.copy_bytes, fsdp.units)),
        sent=max((fsdp.sent_bytes(unit) for unit in sent), default=0),
        node=node_of_levels(plan.placement.grid),
        codes_gradients=any(map(fsdp.reduces_coded, fsdp.units)),
        by_fsdp=fsdp.is_used,
    )


def node_of_levels(grid: RankGrid) -> int:
    """Ranks of a node, if FSDP's collectives have two levels; else 0."""
    return grid.size("node") if grid.layout.hierarchical else 0


def _sum(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    pairs = tuple(sizes)
    return sum(gathered for gathered, _ in pairs), sum(reduced for _, reduced in pairs)


def bytes_of_units(
    state: Mapping[str, int], units: Units, zero: int, shape: StepShape, *, root_waits: bool,
    goes_on: bool = True,
) -> dict[str, dict[str, int]]:  # fmt: skip
    """Compute moment -> kind -> bytes that do not depend on the tokens of a micro batch. `state`: all parameters,
    gradients, optimizer state and buffers of routers; `state[UPDATE]` is what the update needs besides.

    Gradients exist from the end of the first backward on. ZeRO-3 has gathered the model's own unit, a layer, and in
    backward the next one without its experts (a layer that a rank has whole is copied in its turn). The embedding is
    not gathered then, because backward does not read it. ZeRO-1 and 2 have gathered all units. Secondary copies of all
    units are there from a forward on; the last backward of a step frees them one by one.

    Gradients wait for their reduction in the compute dtype, and are then copied into one buffer in the dtype of the
    reduction. While a layer's activations exist, only its last matrix has a gradient, and the buffer of the experts
    before it is free again. ZeRO-1 keeps the sum of all micro batches. In the update nothing of a pass is left.
    `root_waits`: two stages of the rank add to the model's own unit; between them only its sum is kept. `goes_on`: the
    step has other micro batches after the first.
    """
    layer, own, root, total = units.layer, units.own, units.root, units.total
    zero = zero if units.by_fsdp else WITHOUT_FSDP
    first = max(units.embedding, layer)
    at_end = 0 if first == units.embedding else layer[0]
    at_loss, in_backward = root[0] + layer[0], root[0] + layer[0] + units.ahead
    at_begin = ((0 if root_waits else root[1]) + units.matrix) * shape.compute_bytes
    a_layer_later = at_begin + own[1] * shape.reduce_bytes
    last = (root[1] + first[1]) * shape.compute_bytes + max(root[1], first[1]) * shape.reduce_bytes
    at_loss, in_backward = at_loss + units.copies, in_backward + units.copies
    in_backward += units.sent * (units.sent < units.ahead)  # the code of a gather
    if units.node:  # what `levels.py` puts in order, and exchanges between nodes
        in_backward += units.sent + units.sent // units.node
        a_layer_later += (own[1] + 2 * own[1] // units.node) * shape.reduce_bytes
        last += (max(root[1], first[1]) + 2 * max(root[1], first[1]) // units.node) * shape.reduce_bytes
    if units.codes_gradients:  # one byte a number sent and one received; in one level what was received, decoded, too
        for_each = 2 if units.node else 2 + max(4, shape.reduce_bytes)
        a_layer_later += own[1] * for_each // max(1, units.node)
        last += max(root[1], first[1]) * for_each // max(1, units.node)
    at_end += root[0] + units.copies * goes_on
    numbers = (at_loss, in_backward, in_backward, at_end, 0, at_loss, in_backward, in_backward)
    waiting = (0, at_begin, a_layer_later, last, 0, 0, at_begin, a_layer_later)
    moments, more = {}, state.get(UPDATE, 0)
    state = {kind: size for kind, size in state.items() if kind != UPDATE}
    for moment, gathered, unreduced in zip(MOMENTS, numbers, waiting, strict=True):
        is_there, is_update = moment not in FIRST, moment == UPDATE
        summed = (total[1] if zero == 1 else root[1] * root_waits) * shape.reduce_bytes * (is_there and not is_update)
        moments[moment] = {
            **state,
            "gradients": state["gradients"] if is_there and (zero > 1 or is_update) else 0,
            "optimizer state": state.get("optimizer state", 0) + more * is_update,
            "gathered parameters": total[0] if zero < 3 else gathered,
            "unreduced gradients": unreduced + summed,
        }
    return moments
