"""Bytes of a pipeline rank, by moment of a step and by item: those of micro batches in flight, and those at rest. No
torch.

Moments are those of `parallel/step.py`. On a CPU, FSDP's collectives during a backward are additional moments.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from fivefold.core.optimizers import restored_bytes
from fivefold.core.units import GIB
from fivefold.hardware.chip import Chip
from fivefold.hardware.cluster import Cluster
from fivefold.parallel.balance.spec import buffer_bytes
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.fsdp.memory import Units, bytes_of_units, node_of_levels
from fivefold.parallel.layout import Layout
from fivefold.parallel.offload.spec import in_update
from fivefold.parallel.outer.keys import OUTER_NUMBERS
from fivefold.parallel.pipeline.memory import InFlightBytes
from fivefold.parallel.ranks import RankGrid
from fivefold.planner.flow import StagesInFlight
from fivefold.planner.parts import NO_UNIT, Content, Numbers, RankShards, Stages, UnitPrice
from fivefold.planner.price import PriceList
from fivefold.planner.sums import Work

PACKED_BYTES = 15 * 2**19  # per thread of MKL: 7.3 to 7.8 MiB of fp32 in matmuls of 256 to 1024 rows, measured
OUTSIDE = ("allocator", "runtime")  # items that are not tensors
MATMULS, WAITING, BUFFERS = "work space of matmuls", "unreduced gradients", "buffers of gloo"
GATHERED, SAVED = "gathered parameters", "saved activations"

# Processes on a CPU compute nothing during an exchange. FSDP's collectives during a backward: kind, and moment.
LATER = ("a layer later", "a layer later in it")
EXCHANGES = {
    f"{kind} as {moment}": (kind, moment)
    for kind, moments in (
        ("a gather", ("a backward begins", "the first backward begins", *LATER)),
        ("a reduction", LATER),
    )
    for moment in moments
}


def in_flight_bytes(
    work: Work, stages: Stages, of: StagesInFlight, logits: Numbers | float, *, offloads: bool = False
) -> InFlightBytes:
    """Bytes of micro batches in flight, for each pipeline rank. `logits`: of the loss. `offloads`: of activations."""
    each = work.kept @ stages.layers.T
    if offloads:
        each = each - moved_bytes(work, stages)
    each[..., 1:] += work.edges[..., :1]
    each[..., :-1] += work.edges[..., 1:2]
    has_head, of_head = np.array([content.has_head for content in stages.contents]), work.edges[..., 2:]

    def added(numbers: Numbers) -> Numbers:
        heads = of_head * np.maximum(0, numbers[..., -1:] - 1) * has_head
        found: Numbers = (each * numbers) @ stages.ranks.T + heads
        return found

    return InFlightBytes(
        saved=added(of.most),
        at_loss=added(of.at_loss),
        later=added(of.later),
        later_at_loss=added(of.later_at_loss),
        layer=_most(work.kept, stages),
        stage=each[..., stages.own].max(axis=-1),
        working=_most(work.working, stages),
        loss=np.expand_dims(logits, -1) * has_head,
        fetched=offloads * _most(work.kept[..., :-2], stages, stages.has[:, :-2]),
    )


def moved_bytes(work: Work, stages: Stages) -> Numbers:
    """Offloaded bytes of each stage and micro batch: all that layers save, except the last, taken as the largest."""
    layers, kept = stages.layers[:, :-2], work.kept[..., :-2]
    largest: Numbers = np.max(np.where(layers > 0, np.expand_dims(kept, -2), 0.0), axis=-1)
    found: Numbers = kept @ layers.T - largest
    return found


def _most(parts: Numbers, stages: Stages, has: "NDArray[np.bool_] | None" = None) -> Numbers:
    """Largest part on each pipeline rank. `has`: restricts the parts."""
    found: Numbers = np.max(np.where(stages.has if has is None else has, np.expand_dims(parts, -2), 0.0), axis=-1)
    return found


def moving_bytes(chip: Chip, of: InFlightBytes) -> dict[str, dict[str, Numbers]]:
    """Moment -> item -> bytes of each pipeline rank."""
    found = of.at()
    if not chip.is_host:
        return found
    computes_nothing = {"working memory": 0 * of.working}
    return found | {moment: found[exchange] | computes_nothing for moment, (_, exchange) in EXCHANGES.items()}


def resting_bytes(
    price_list: PriceList, shards: RankShards, content: Content, zero: int, *, waits: bool,
    goes_on: bool = True, away: frozenset[str] = frozenset(), state_dtype: str = "fp32", apart: bool = False,
) -> Mapping[str, Mapping[str, float]]:  # fmt: skip
    """Moment -> item -> bytes of a pipeline rank that do not depend on the micro batch. `waits`: see `root_waits`.
    `goes_on`: see `bytes_of_units`. `away`: items that rest in host memory. `state_dtype`: of the optimizer's
    state. `apart`: replicas train apart."""
    shape, sizes = shards.shape, _units(shards, content)
    state = state_bytes(price_list, shards, content, away=away, state_dtype=state_dtype, apart=apart)
    moments: Mapping[str, Mapping[str, float]] = bytes_of_units(
        state, sizes, shards.stage(zero), shape, root_waits=waits, goes_on=goes_on
    )
    if not price_list.cluster.chip.is_host:
        return moments
    in_layers = (unit for kind, _ in content.kinds for unit in shards.layers[kind].units if unit.is_sent)
    sent = max(in_layers, key=lambda unit: unit.gathered, default=NO_UNIT)
    return {**moments, **_exchanges(moments, sizes, sent, shards.stage(zero), shape)}


def state_bytes(
    price_list: PriceList, shards: RankShards, content: Content, *, away: frozenset[str], state_dtype: str, apart: bool
) -> dict[str, int]:
    """Item -> bytes that last from step to step, and those of gradients. Arguments: see `resting_bytes`."""
    shape, units = shards.shape, all_units(shards, content)
    held, trained = sum(unit.held for unit in units), sum(unit.trained for unit in units)
    kinds = len(shape.optimizer.state)
    state = {
        "parameters": (held + OUTER_NUMBERS * trained * apart) * shape.master_bytes,
        "gradients": trained * shape.master_bytes,
        "optimizer state": sum(unit.state for unit in units) * kinds,
        "router buffers": buffer_bytes(price_list.facts.router_buffers),
    }
    if away or state_dtype != "fp32":
        largest = largest_shard(units) * shape.master_bytes
        restored = restored_bytes(state_dtype, largest // shape.master_bytes)
        return in_update(state, largest, restored, away=away)
    return state


def all_units(shards: RankShards, content: Content) -> list[UnitPrice]:
    """The units of a pipeline rank; the model's own unit is the last."""
    return [unit for shard, count in shards.of(content) for unit in shard.units for _ in range(count)]


def largest_shard(units: Iterable[UnitPrice]) -> int:
    """Numbers of the largest shard of a parameter on a rank."""
    return max((-(-unit.largest // unit.shards) for unit in units), default=0)


def _exchanges(
    moments: Mapping[str, Mapping[str, float]], units: Units, sent: UnitPrice, zero: int, shape: StepShape
) -> dict[str, dict[str, float]]:
    """Bytes while FSDP sends a layer's unit during a backward. `sent`: the largest that it sends.

    gloo gathers into a buffer as large as the result, and then copies it. It reduces a copy of all gradients, and its
    thread may release the copy only after the next gather has begun.
    """
    compute, reduce, own = shape.compute_bytes, shape.reduce_bytes, units.ahead
    found: dict[str, dict[str, float]] = {}
    for moment, (kind, beside) in EXCHANGES.items():
        at_work, is_later = moments[beside], beside in LATER
        if kind == "a gather":
            gathered, waiting = max(units.layer[0], 2 * own), units.own[1] * is_later * bool(own)
            buffers = (sent.gathered + waiting * reduce) * (zero == 3)
        else:
            gathered, waiting = units.layer[0] - sent.gathered + own, sent.reduced
            buffers = (sent.reduced + sent.trained) * reduce
        computing = units.matrix * compute + units.own[1] * reduce * is_later
        found[moment] = {
            **at_work,
            WAITING: at_work[WAITING] - computing + waiting * reduce,
            GATHERED: units.root[0] + gathered + units.copies if zero == 3 else at_work[GATHERED],
            BUFFERS: buffers,
        }
    return found


def root_waits(shards: RankShards, content: Content, pipeline: Layout) -> bool:
    """True if the model's own unit is not reduced after every backward, because two stages contribute to it."""
    return bool(shards.tied) and content.has_embedding and content.has_head and pipeline.pp > 1


def _units(shards: RankShards, content: Content) -> Units:
    def size(units: Iterable[tuple[UnitPrice, int]]) -> tuple[int, int]:
        pairs = tuple(units)
        return sum(unit.gathered * count for unit, count in pairs), sum(unit.reduced * count for unit, count in pairs)

    units = [shards.layers[kind].units for kind, _ in content.kinds]
    of_layers = [(size((unit, 1) for unit in group), size([(group[-1], 1)])) for group in units]
    layer, own = max(of_layers, default=((0, 0), (0, 0)))
    embedding = shards.embedding.units if content.has_embedding else ()
    return Units(
        layer=layer,
        own=own,
        embedding=size((unit, 1) for unit in embedding),
        root=size((unit, 1) for unit in shards.rest((content.has_embedding, content.has_head)).units),
        total=size((unit, count) for shard, count in shards.of(content) for unit in shard.units),
        matrix=max((unit.largest for group in units for unit in group), default=0),
        ahead=max((group[-1].gathered for group in units if group[-1].is_sent), default=0),
        copies=sum(unit.copied * count for shard, count in shards.of(content) for unit in shard.units),
        sent=max((call.bytes for group in units for call in group[-1].calls["gather"]), default=0),
        node=node_of_levels(shards.grid),
        codes_gradients=shards.grid.layout.reductions != "none",
        by_fsdp=shards.by_fsdp,
    )


def matmul_bytes(cluster: Cluster) -> int:
    """Work space of matmuls. On a GPU, cuBLAS's, in memory that the allocator counts: once for forward, once for
    backward. (`CUBLAS_WORKSPACE_CONFIG`: torch asks for 32 MiB from Hopper on, for 8.125 before it.) On a CPU, the
    buffers that MKL packs matrices into, and keeps, for each thread."""
    chip = cluster.chip
    if chip.is_host:
        return cluster.threads * PACKED_BYTES
    return 2 * (32 * 2**20 if chip.capability >= (9, 0) else 8320 * 2**10)


def runtime_bytes(chip: Chip, grid: RankGrid) -> float:
    """Bytes of the context, and of a communicator for the world and for each axis of several ranks."""
    communicators = sum(axis.size > 1 for axis in grid.axes.values()) + (grid.world > 1)
    return (chip.context_gib + communicators * chip.communicator_gib) * GIB
