"""`estimate`: the memory and the time of a step of a layout on a cluster, item by item, before it runs. No torch.

Prices of single layers (`price.py`) are added up to the stages of the pipeline, and the schedule is run slot by slot
with them. Memory is that of the fullest pipeline rank. Time is that of the whole step.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from fivefold.core import legality
from fivefold.core.errors import UserError
from fivefold.core.layout import Layout
from fivefold.core.optimizers import OPTIMIZERS
from fivefold.core.recompute import budget_bytes
from fivefold.core.schedule import Kind, Slot, Timeline
from fivefold.core.state_dtypes import RESTORED
from fivefold.core.units import GIB
from fivefold.models.flops import Costs
from fivefold.parallel import memory
from fivefold.parallel.collectives import Call, StepShape
from fivefold.parallel.limits import limits_of
from fivefold.parallel.memory import Passing, Units, buffer_bytes
from fivefold.parallel.ranks import Axis, RankGrid
from fivefold.parallel.unshards import Unshards, of_slots
from fivefold.planner.budget import Parts, under_budget
from fivefold.planner.chips import Chip
from fivefold.planner.cluster import Cluster
from fivefold.planner.compute import host_seconds, traffic_seconds
from fivefold.planner.doubt import Interval, memory_interval, step_interval
from fivefold.planner.engines import Engine
from fivefold.planner.flow import Gathers, InFlight, gathers, in_flight, schedule_plan, span
from fivefold.planner.links import seconds
from fivefold.planner.price import (
    ITEMS,
    NO_UNIT,
    Content,
    LayerPrice,
    Numbers,
    PriceList,
    Prices,
    Seconds,
    Shard,
    Shards,
    Stages,
    UnitPrice,
    nothing,
)

AT_ONCE = "all at once"  # the one moment of another trainer's memory
Places = NDArray[np.int64] | int | tuple[NDArray[np.int64], ...]
ROUNDING = 1e-9  # of sums in another order
MEET = 4  # how sharply the two bounds of a crowded pipeline's time take turns: judgement
PACKED_BYTES = 15 * 2**19  # of a thread of MKL: 7.3 to 7.8 MiB of fp32 in matmuls of 256 to 1024 rows, measured
UPDATE_BYTES = 34  # of memory traffic that AdamW and the norm of gradients make for a parameter, all in fp32
TIGHT = 0.94  # of a device's memory: above it the allocator begins to free and ask again (planner facts, PyTorch FSDP)


MOST_TOKENS, MOST_ROWS = 2**27, 2**24  # of a row, and of a step: far above every run


@dataclass(frozen=True)
class Workload:
    """What an optimizer step has to do: `global_batch_size` rows of `seq_length` tokens."""

    seq_length: int
    global_batch_size: int

    def __post_init__(self) -> None:
        """Raises `UserError` for rows without tokens, a step without rows, or more of either than can be priced."""
        if self.seq_length < 1 or self.global_batch_size < 1:
            what = f"{self.global_batch_size} rows of {self.seq_length} tokens are no step"
            raise UserError(what, fix="seq_length and global_batch_size are 1 or more")
        if self.seq_length > MOST_TOKENS or self.global_batch_size > MOST_ROWS:
            raise UserError(
                f"{self.global_batch_size:,} rows of {self.seq_length:,} tokens are too large to be planned",
                fix=f"plan for at most {MOST_ROWS:,} rows of at most {MOST_TOKENS:,} tokens",
            )

    @property
    def tokens(self) -> int:
        return self.seq_length * self.global_batch_size


@dataclass(frozen=True)
class Item:
    """One row of an estimate. `part`: memory (bytes) or time (seconds of a step)."""

    part: str
    item: str
    amount: float
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step of `layout` needs. `rows`: memory of the fullest rank, then the time of a step; each adds up.

    `step_seconds` of the whole step; `allocated` bytes at its peak, `reserved` with what the allocator keeps and what
    the runtime takes outside of it.
    """

    layout: Layout
    cluster: Cluster
    workload: Workload
    rows: tuple[Item, ...]
    pp_rank: int
    flops: float

    @cached_property
    def step_seconds(self) -> float:
        return sum(row.amount for row in self.rows if row.part == "time")

    @cached_property
    def reserved(self) -> float:
        """Bytes of a device that are taken."""
        return sum(row.amount for row in self.rows if row.part == "memory")

    @cached_property
    def allocated(self) -> float:
        """Bytes of tensors."""
        return sum(row.amount for row in self.rows if row.part == "memory" and row.item not in OUTSIDE)

    @property
    def seconds(self) -> dict[str, float]:
        """Of the step, by item."""
        return {row.item: row.amount for row in self.rows if row.part == "time"}

    @property
    def step_interval(self) -> Interval:
        """Between these the seconds of a step lie in 80 % of cases."""
        return step_interval(self.seconds, self.cluster.chip.doubt)

    @property
    def reserved_interval(self) -> Interval:
        """Between these the bytes of a device that are taken lie in 80 % of cases."""
        return memory_interval(self.reserved)

    @property
    def memory_gib(self) -> float:
        """Of tensors, at the peak of a step: what `memory/peak_gib` of a run reports."""
        return self.allocated / GIB

    @property
    def fits(self) -> bool:
        return self.reserved <= self.cluster.chip.memory_bytes

    @property
    def verdict(self) -> str:
        """fits, tight (it may run, near the limit), or does not fit."""
        share = self.reserved / self.cluster.chip.memory_bytes
        return "fits" if share <= TIGHT else "tight" if share <= 1 else "does not fit"

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.workload.tokens / self.step_seconds / self.layout.world

    @property
    def mfu(self) -> float:
        """Model FLOPs, with causal attention halved and no recompute, over the peak: 0.4 is 40 %."""
        peak = self.cluster.chip.peak_tflops[self.layout.precision] * 1e12
        return self.flops / self.step_seconds / self.layout.world / peak


OUTSIDE = ("allocator", "runtime")  # what is taken beside tensors
MATMULS, WAITING, BUFFERS = "work space of matmuls", "unreduced gradients", "buffers of gloo"
GATHERED, SAVED = "gathered parameters", "saved activations"

# Processes on a CPU compute nothing while they exchange. FSDP's collectives beside a backward: kind, and moment.
LATER = ("a layer later", "a layer later in it")
EXCHANGES = {
    f"{kind} as {moment}": (kind, moment)
    for kind, moments in (
        ("a gather", ("a backward begins", "the first backward begins", *LATER)), ("a reduction", LATER)
    )
    for moment in moments
}  # fmt: skip


def estimate(prices: PriceList, layout: Layout, workload: Workload) -> Estimate:
    """Of a layout. Raises `UserError` where it cannot run the model on the cluster, with the nearest legal values."""
    world, limits = prices.cluster.world, limits_of(prices.facts)
    legality.refuse(legality.of_experts(layout, limits))  # first: where shards go does not help a model without experts
    legality.refuse(legality.of_world(layout, world, prices.cluster.text))
    layout = layout.resolve(world)
    legality.refuse(legality.violations(layout, limits, world=world, batch=workload.global_batch_size))
    return Step(prices, prices.engine.laid(layout), workload).estimate()


# ---- sums over stages and ranks, of one layout or of many at once ----------------------------------------------------
#
# The last dimension of an array counts parts (kinds of layers, embedding, head), stages, or pipeline ranks. Dimensions
# before it, if there are any, count layouts.


def data_seconds(work: "Work", sent: "Sent", stages: Stages, of: Gathers, *, overlaps: bool) -> tuple[Numbers, Numbers]:
    """Seconds of FSDP's collectives that compute cannot hide, in a forward and in a backward of each stage. Neighbours
    are taken to be alike: a layer's parameters are gathered while the one before it runs."""
    forward, backward = (work.forward, work.backward) if overlaps else (0.0, 0.0)
    ahead, both, again, after = (
        np.maximum(0.0, each) @ stages.layers.T
        for each in (
            sent.gather - forward, sent.gather + sent.reduce - backward, sent.gather - backward, sent.reduce - backward
        )
    )  # fmt: skip
    together: Numbers = np.minimum(of.backward, of.reductions)
    exposed: Numbers = together * both + (of.backward - together) * again + (of.reductions - together) * after
    return of.forward * ahead, exposed


@dataclass(frozen=True, eq=False)
class Work:
    """Of each part: seconds of a forward, of a backward, of the backward's gradients of weights, on the device; seconds
    of the host for a forward and for a backward; bytes kept until backward, and those that a backward has besides.
    `edges`: of a stage's input and output, which a pipeline holds, and of the head's gradients."""

    forward: Numbers
    backward: Numbers
    weights: Numbers
    host_forward: Numbers
    host_backward: Numbers
    kept: Numbers
    working: Numbers
    edges: Numbers

    @staticmethod
    def of(prices: Sequence[Prices]) -> "Work":
        """[one for each of prices, part]."""

        def each(value: Callable[[LayerPrice], float]) -> Numbers:
            return np.array([[value(part) for part in price.parts] for price in prices])

        return Work(
            each(lambda part: part.forward.sum()), each(lambda part: part.backward.sum()),
            each(lambda part: part.weights.sum()), each(lambda part: part.host[0]), each(lambda part: part.host[1]),
            each(lambda part: part.kept), each(lambda part: part.working),
            np.array([each.edges for each in prices], dtype=float),
        )  # fmt: skip

    def at(self, places: Places) -> "Work":
        """Those at some places."""
        return Work(*(getattr(self, each.name)[places] for each in fields(self)))


@dataclass(frozen=True, eq=False)
class Sent:
    """Of each part: seconds of one gather of its units, and of one reduction."""

    gather: Numbers
    reduce: Numbers

    @staticmethod
    def of(shards: Sequence[Shards]) -> "Sent":
        """[one for each of shards, part]. The head is in the model's own unit, which stays gathered."""
        units = [[each.units for each in (*shard.layers, shard.embedding, Shard())] for shard in shards]
        return Sent(
            np.array([[sum(unit.gather_seconds for unit in part) for part in each] for each in units]),
            np.array([[sum(unit.reduce_seconds for unit in part) for part in each] for each in units]),
        )

    def at(self, places: Places) -> "Sent":
        """Those at some places."""
        return Sent(self.gather[places], self.reduce[places])


def passes(work: Work, sent: Sent, stages: Stages, of: Gathers, engine: Engine) -> tuple[Numbers, Numbers]:
    """Seconds of a micro batch's forward and backward in each stage."""
    before, after = data_seconds(work, sent, stages, of, overlaps=engine.overlaps_data)
    return (
        met(work.forward @ stages.layers.T + before, work.host_forward @ stages.layers.T, engine.meet),
        met(work.backward @ stages.layers.T + after, work.host_backward @ stages.layers.T, engine.meet),
    )


def met(device: Numbers, host: Numbers, meet: float) -> Numbers:
    """Seconds of a slot. Python runs ahead of the device, and only where it takes longer for the whole slot does the
    device wait. The two times meet smoothly."""
    found: Numbers = (device**meet + host**meet) ** (1 / meet)
    return found


def durations(forward: Numbers, backward: Numbers, work: Work, stages: Stages) -> dict[Kind, Numbers]:
    """Seconds of each kind of slot, of each stage."""
    weights = work.weights @ stages.layers.T
    return {"F": forward, "B": backward, "I": backward - weights, "W": weights}


def busiest(forward: Numbers, backward: Numbers, stages: Stages) -> "NDArray[np.int64]":
    """The pipeline rank with the most to do: the first of those that have it."""
    work = (forward + backward) @ stages.ranks.T
    found: NDArray[np.int64] = np.argmax(work >= work.max(axis=-1, keepdims=True) * (1 - ROUNDING), axis=-1)
    return found


def least_span(
    slots: Mapping[Kind, Numbers], stages: Stages, left: Numbers, micro_batches: NDArray[np.int64] | int,
    transfer: Numbers | float, *, splits_backward: bool,
) -> Numbers:  # fmt: skip
    """No schedule is shorter. A rank waits until the first micro batch has passed the stages before its first one. It
    has all of its work. And behind its last backward, that micro batch still has to come back through those stages,
    while the rank can compute the gradients of weights that are `left`, of each stage."""
    forward, backward, weights = slots["F"], slots["B"], slots["W"]
    back = slots["I"] if splits_backward else backward
    hops = stages.first * np.expand_dims(transfer, -1)
    there, again = ((np.cumsum(each, axis=-1) - each)[..., stages.first] + hops for each in (forward, back))
    work = (forward + backward) @ stages.ranks.T * np.expand_dims(micro_batches, -1)
    found: Numbers = np.max(there + np.maximum(work, work - left * weights @ stages.ranks.T + again), axis=-1)
    return found


def passing(
    engine: Engine, work: Work, stages: Stages, of: InFlight, logits: Numbers | float, *, offloads: bool = False
) -> Passing:  # fmt: skip
    """Of each pipeline rank: what micro batches under way take. `logits`: of the loss. `offloads`: activations."""
    each = work.kept @ stages.layers.T
    if offloads:
        each = each - moved_bytes(work, stages)
    if engine.moments:
        each[..., 1:] += work.edges[..., :1]
        each[..., :-1] += work.edges[..., 1:2]
    has_head, of_head = np.array([content.has_head for content in stages.contents]), work.edges[..., 2:]

    def added(numbers: Numbers) -> Numbers:
        found: Numbers = (each * numbers) @ stages.ranks.T
        return found + of_head * np.maximum(0, numbers[..., -1:] - 1) * has_head if engine.moments else found

    return Passing(
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
    """Of each stage and micro batch, what its layers save, but for the last one, which is taken to be the largest."""
    layers, kept = stages.layers[:, :-2], work.kept[..., :-2]
    largest: Numbers = np.max(np.where(layers > 0, np.expand_dims(kept, -2), 0.0), axis=-1)
    found: Numbers = kept @ layers.T - largest
    return found


def _most(parts: Numbers, stages: Stages, has: "NDArray[np.bool_] | None" = None) -> Numbers:
    """Of each pipeline rank, the most of any part that it has. `has`: of fewer parts."""
    found: Numbers = np.max(np.where(stages.has if has is None else has, np.expand_dims(parts, -2), 0.0), axis=-1)
    return found


def moving_bytes(engine: Engine, chip: Chip, of: Passing) -> dict[str, dict[str, Numbers]]:
    """Moment -> item -> bytes of each pipeline rank; of another trainer all moments at once."""
    if engine.moments:
        found = of.at()
        beside = {moment: found[each] | {"working memory": 0 * of.working} for moment, (_, each) in EXCHANGES.items()}
        return found | beside if chip.is_host else found
    return {AT_ONCE: {SAVED: of.saved, "working memory": of.working, "loss": of.loss}}


def crowded(
    span: Numbers | float, forward: Numbers, backward: Numbers, micro_batches: NDArray[np.int64] | int, pp: int,
    crowding: float,
) -> Numbers | float:  # fmt: skip
    """`span` of a pipeline whose devices share cores (`Cluster.crowding`): one that waits leaves its part to others. No
    step is shorter than with a core for each device, nor than all work on all cores."""
    if crowding == 1:
        return span
    work = (forward + backward).sum(axis=-1) * micro_batches / pp
    found: Numbers = (work**MEET + (span / crowding) ** MEET) ** (1 / MEET)
    return found


@dataclass(frozen=True)
class Edges:
    """What a pipeline rank does once a step, in seconds. `update`: the optimizer. `ends`: the first unit's gather and
    the last one's reduction. `replicas`, `last`: all-reduces over replicas, of all units and of the last. `reductions`:
    one of each unit. `sums`: gradients that ranks hold in part."""

    update: Numbers | float
    ends: Numbers | float
    replicas: Numbers | float
    last: Numbers | float
    reductions: Numbers | float
    sums: Numbers | float

    def at(self, places: Places) -> "Edges":
        """Those at some places."""
        return Edges(*(getattr(self, each.name)[places] for each in fields(self)))

    def seconds(self, backward: Numbers | float) -> Numbers:
        """What no compute hides, beside the update. `backward`: seconds of it that hide sums over replicas."""
        hidden = np.maximum(0.0, backward - self.reductions)
        found: Numbers = self.ends + np.maximum(self.last, self.replicas - hidden) + self.sums
        return found


@dataclass(frozen=True)
class Step:
    """One layout's step, added up as far as it is asked."""

    price_list: PriceList
    layout: Layout
    workload: Workload

    @cached_property
    def pipeline(self) -> Layout:
        """The layout's pipeline alone, under which stages and schedules are shared by many layouts."""
        own = self.layout
        return Layout(pp=own.pp, pp_schedule=own.pp_schedule, pp_virtual=own.pp_virtual, pp_split=own.pp_split)

    @cached_property
    def micro_batches(self) -> int:
        return self.layout.accumulation(self.workload.global_batch_size)

    @cached_property
    def tokens(self) -> int:
        """Of a row, padded."""
        return self.layout.padded(self.workload.seq_length)

    @cached_property
    def parts(self) -> Parts:
        """What is added up. Raises `UserError` for a budget of recompute that `full` exceeds."""
        prices, layout = self.price_list, self.layout
        stages = prices.stages(self.pipeline)
        if budget_bytes(layout.recompute) is not None:
            return under_budget(prices, layout, self.tokens, stages, self.in_flight.most)
        return Parts(prices.of(layout, self.tokens), prices.shards(layout), stages)

    @property
    def prices(self) -> Prices:
        return self.parts.prices

    @property
    def shards(self) -> Shards:
        return self.parts.shards

    @property
    def stages(self) -> Stages:
        return self.parts.stages

    @cached_property
    def in_flight(self) -> InFlight:
        return in_flight(self.pipeline, self.micro_batches, self.price_list.stages(self.pipeline).sizes)

    @cached_property
    def gathers(self) -> Gathers:
        return gathers(self.pipeline, self.micro_batches, self.layout.zero)

    @property
    def cluster(self) -> Cluster:
        return self.price_list.cluster

    @property
    def engine(self) -> Engine:
        return self.price_list.engine

    # ---- time --------------------------------------------------------------------------------------------------------

    @cached_property
    def work(self) -> Work:
        return Work.of([self.prices]).at(0)

    @cached_property
    def sent(self) -> Sent:
        return Sent.of([self.shards]).at(0)

    @cached_property
    def passes(self) -> tuple[Numbers, Numbers]:
        """Seconds of each stage: forward and backward, in one micro batch, with FSDP. Copies to host memory and back
        run beside them."""
        forward, backward = self.computing
        return np.maximum(forward, self.copying), np.maximum(backward, self.copying)

    @cached_property
    def computing(self) -> tuple[Numbers, Numbers]:
        """The same, without copies."""
        return passes(self.work, self.sent, self.stages, self.gathers, self.engine)

    @cached_property
    def copying(self) -> Numbers:
        """Seconds of each stage and micro batch to copy saved activations to host memory, or back."""
        moved = moved_bytes(self.work, self.stages) * self.layout.offload_activations
        return np.asarray(host_seconds(self.cluster.chip, moved))

    @cached_property
    def busiest(self) -> int:
        """The pipeline rank with the most to do."""
        return int(busiest(*self.passes, self.stages))

    def _totals(self, rank: int) -> Seconds:
        """Of a pipeline rank's device in one micro batch, by item."""
        found, layers = nothing(), self.stages.ranks[rank] @ self.stages.layers
        for part, count in zip(self.prices.parts, layers, strict=True):
            found += (part.forward + part.backward) * count
        before, after = data_seconds(
            self.work, self.sent, self.stages, self.gathers, overlaps=self.engine.overlaps_data
        )
        found[ITEMS.index("data")] += self.stages.ranks[rank] @ (before + after)
        return found

    def _waits(self, rank: int) -> float:
        """Seconds that a pipeline rank's device waits for Python in one micro batch."""
        return float(self.stages.ranks[rank] @ sum(self.computing)) - float(self._totals(rank).sum())

    @cached_property
    def at_least(self) -> float:
        """No step is shorter. Without a pipeline, none is longer."""
        splits = self.pipeline.schedule.splits_backward
        slots = durations(*self.passes, self.work, self.stages)
        span = least_span(
            slots, self.stages, self.in_flight.left, self.micro_batches, self.transfer, splits_backward=splits
        )
        return float(span) / (self.cluster.crowding if self.layout.pp > 1 else 1) + self.after

    @cached_property
    def after(self) -> float:
        """Seconds of the busiest rank beside the passes."""
        return float(self.edges.update) + self.edge_seconds

    @cached_property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.span() + self.after

    @cached_property
    def transfer(self) -> float:
        """Seconds of hidden states from one pipeline rank to the next."""
        return transfer_seconds(self.price_list, self.prices, self.layout.pp)

    @property
    def transfer_call(self) -> Call:
        """One send between pipeline ranks."""
        return transfer_call(self.prices)

    @cached_property
    def grid(self) -> RankGrid:
        return self.price_list.grid(self.layout)

    def span(self) -> float:
        """Seconds from the first slot of the pipeline to the end of the last."""
        if self.layout.pp == 1:
            forward, backward = self.passes
            return float(forward[0] + backward[0]) * self.micro_batches
        of_kind = {kind: each[:, np.newaxis] for kind, each in self.durations.items()}
        alone = float(span(self.pipeline, np.array([self.micro_batches]), of_kind, np.array([self.transfer]))[0])
        return float(crowded(alone, *self.passes, self.micro_batches, self.layout.pp, self.cluster.crowding))

    @cached_property
    def durations(self) -> dict[Kind, Numbers]:
        """Seconds of a slot of each kind, by stage."""
        return durations(*self.passes, self.work, self.stages)

    def timeline(self, micro_batches: int) -> Timeline:
        """The pipeline's slots, in seconds, with so many micro batches."""

        def duration(slot: Slot) -> float:
            return float(self.durations[slot.kind][slot.stage])

        return schedule_plan(self.pipeline, micro_batches).simulate(duration, transfer=self.transfer)

    def time(self, span: float) -> Iterator[Item]:
        """The items of the busiest rank, and what it waits."""
        rank = self.busiest
        total = dict(zip(ITEMS, self._totals(rank).tolist(), strict=True)) | {"host": self._waits(rank)}
        total["host link"] = float(self.stages.ranks[rank] @ (sum(self.passes) - sum(self.computing)))
        whys = {
            "host link": "copies of saved activations that outlast compute",
            "matmuls": f"{self.micro_batches} micro batches of {self.layout.micro_batch_size} x {self.tokens} tokens",
            "host": "Python and launches beyond the device's time", "data": "FSDP's collectives that outlast compute",
        }  # fmt: skip
        for name, amount in total.items():
            if amount > 0:
                yield Item("time", name, amount * self.micro_batches, whys.get(name, ""))
        if self.layout.pp > 1:
            bubble = span - sum(total.values()) * self.micro_batches
            why = f"pipeline rank {rank} waits for others" + ", which leave it their cores" * (bubble < 0)
            yield Item("time", "bubble", bubble, why)
        held = sum(unit.trained * count for shard, count in self.shards.of(self.content) for unit in shard.units)
        yield Item("time", "optimizer", float(self.edges.update), f"{held:,} parameters")
        why = "first gather, last reduction, sums over ranks"
        yield Item("time", "edges of the step", self.edge_seconds, why)

    @property
    def content(self) -> Content:
        """What the busiest rank has of the model."""
        return self.stages.contents[self.busiest]

    @cached_property
    def edges(self) -> Edges:
        found, units = edges_of(self.price_list, self.shards, self.content, self.layout), self.shards.of(self.content)
        if restored := RESTORED[self.layout.state_dtype]:  # what is made on the way is written and read
            numbers = sum(unit.trained * count for shard, count in units for unit in shard.units)
            found = replace(found, update=found.update + traffic_seconds(self.cluster.chip, 2 * restored * numbers))
        if not (away := self.layout.rests_in_host):
            return found
        shape, each = self.shards.shape, [(unit, count) for shard, count in units for unit in shard.units]
        kinds = len(OPTIMIZERS[shape.optimizer].state) * ("optimizer state" in away)
        moved = sum(unit.state * count for unit, count in each) * kinds
        moved += sum(unit.held * count for unit, count in each) * shape.master_bytes * ("parameters" in away)
        copies = host_seconds(self.cluster.chip, moved)
        return replace(found, update=np.maximum(found.update, copies))

    @cached_property
    def edge_seconds(self) -> float:
        """What no compute hides at the ends of a step: the first unit's gather, the last one's reduction, sums of
        gradients over replicas beyond one backward, and the sums over all ranks."""
        backward = self.stages.ranks[self.busiest] @ self.passes[1] * self.engine.overlaps_sums
        return float(self.edges.seconds(backward)) + self.price_list.world_seconds + self.engine.step_seconds

    def calls(self, rank: int) -> Iterator[Call]:
        """The collectives of a pipeline rank that are priced, but for those between pipeline ranks: those of its parts
        in all micro batches, of its units as often as FSDP gathers and reduces them, and those once a step."""
        content, own = self.stages.contents[rank], tuple(np.flatnonzero(self.stages.ranks[rank]).tolist())
        times, of_rank = self._unshards(rank, own), self.shards.of(content)
        shards = (*self.shards.layers, self.shards.embedding, Shard())
        for stage in own:
            counts = self.stages.layers[stage].astype(int).tolist()
            for part, shard, count in zip(self.prices.parts, shards, counts, strict=True):
                yield from (replace(call, times=call.times * count * self.micro_batches) for call in part.calls)
                yield from (call for unit in shard.units for call in self._counted(unit, times[str(stage)], count))
        yield from (call for unit in of_rank[-1][0].units for call in self._counted(unit, times[""], 1))
        yield from sum_calls(of_rank)
        if (tied := tied_call(self.shards, content, self.layout)) is not None:
            yield tied
        yield from self.price_list.world_calls

    def _counted(self, unit: UnitPrice, times: Unshards, count: int) -> Iterator[Call]:
        """The collectives of `count` units alike in a step."""
        of_kind = {
            "all_gather": times.forward + times.backward, "reduce_scatter": times.reductions,
            "all_reduce": int(self.layout.dp_replicate > 1),
        }  # fmt: skip
        yield from (replace(call, times=of_kind[kind] * count) for kind, call in unit.calls.items())

    def _unshards(self, rank: int, own: Sequence[int]) -> dict[str, Unshards]:
        """Of a unit of each stage of a rank, and of the model's own, which stages at the model's ends use."""
        content = self.stages.contents[rank]
        ends = {own[0]} if content.has_embedding and self.shards.tied else set[int]()
        ends |= {own[-1]} if content.has_head else set()
        users = {str(stage): frozenset((stage,)) for stage in own} | {"": frozenset(ends)}
        order = schedule_plan(self.pipeline, self.micro_batches).orders[rank]
        return of_slots(order, users, self.micro_batches, own, self.layout.zero)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def memory_of(self, rank: int) -> dict[str, float]:
        """Bytes of a pipeline rank by item, at the moment when it is fullest; the last two are not tensors."""
        content, chip = self.stages.contents[rank], self.cluster.chip
        waits = root_waits(self.shards, content, self.pipeline)
        resting = resting_bytes(
            self.price_list, self.shards, content, self.layout.zero, waits=waits,
            away=self.layout.rests_in_host, state_dtype=self.layout.state_dtype,
        )  # fmt: skip
        under_way = passing(
            self.engine, self.work, self.stages, self.in_flight, self.prices.logits,
            offloads=self.layout.offload_activations,
        )  # fmt: skip
        moving = moving_bytes(self.engine, chip, under_way)
        own = {moment: {item: float(size[rank]) for item, size in items.items()} for moment, items in moving.items()}
        moments = ({**resting[moment], **own[moment]} for moment in resting)
        found = max(moments, key=lambda items: sum(items.values()))
        found |= {MATMULS: matmul_bytes(self.engine, self.cluster)}
        waiting = max(items[WAITING] for items in resting.values())
        found["allocator"] = sum(found.values()) * (self.engine.slack - 1) + self.engine.kept_back * waiting
        if self.layout.offload_parameters:  # what comes from host memory has blocks of its own, those of its stream
            of_rank = self.shards.of(content)
            found["allocator"] += (
                largest_shard(unit for shard, _ in of_rank for unit in shard.units) * self.shards.shape.master_bytes
            )
        found["runtime"] = runtime_bytes(chip, self.grid)
        return found

    @cached_property
    def fullest(self) -> tuple[int, dict[str, float]]:
        """The pipeline rank that needs the most memory, and what for."""
        found = ((rank, self.memory_of(rank)) for rank in range(self.layout.pp))
        return max(found, key=lambda each: sum(each[1].values()))

    @cached_property
    def needs(self) -> float:
        """Bytes of the fullest rank, all in all; infinite under a budget of recompute that cannot be kept."""
        try:
            return sum(self.fullest[1].values())
        except UserError:
            if budget_bytes(self.layout.recompute) is None:
                raise
            return inf

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def estimate(self, span: float | None = None) -> Estimate:
        rank, memory = self.fullest
        why = {SAVED: f"recompute: {self.parts.spent[rank]}"} if self.parts.spent else {}
        items = [Item("memory", name, amount, why.get(name, "")) for name, amount in memory.items() if amount]
        items += self.time(self.span() if span is None else span)
        costs = Costs.of(self.price_list.facts)
        length = self.workload.seq_length
        flops = self.workload.global_batch_size * (costs.per_token * length + costs.per_squared_length * length**2)
        return Estimate(
            layout=self.layout,
            cluster=self.cluster,
            workload=self.workload,
            rows=tuple(items),
            pp_rank=rank,
            flops=flops,
        )


def resting_bytes(
    price_list: PriceList, shards: Shards, content: Content, zero: int, *, waits: bool,
    away: frozenset[str] = frozenset(), state_dtype: str = "fp32",
) -> Mapping[str, Mapping[str, float]]:  # fmt: skip
    """Moment -> item -> bytes of a pipeline rank that do not depend on the micro batch. `waits`: see `root_waits`.
    `away`: what rests in host memory. `state_dtype`: of the optimizer's state."""
    shape, of_rank = shards.shape, shards.of(content)
    units = [unit for shard, count in of_rank for unit in shard.units for _ in range(count)]
    held, trained = sum(unit.held for unit in units), sum(unit.trained for unit in units)
    kinds = len(OPTIMIZERS[shape.optimizer].state)
    state = {
        "parameters": held * shape.master_bytes,
        "gradients": trained * shape.master_bytes,
        "optimizer state": sum(unit.state for unit in units) * kinds,
        "router buffers": buffer_bytes(price_list.facts.router_buffers),
    }
    if away or state_dtype != "fp32":
        largest = largest_shard(units) * shape.master_bytes
        state = memory.in_update(state, largest, shape, away=away, state_dtype=state_dtype)
    if price_list.engine.moments:
        sizes = _units(shards, content)
        moments: Mapping[str, Mapping[str, float]] = memory.resting_bytes(state, sizes, zero, shape, root_waits=waits)
        if not price_list.cluster.chip.is_host:
            return moments
        in_layers = (unit for kind, _ in content.kinds for unit in shards.layers[kind].units if unit.is_sent)
        sent = max(in_layers, key=lambda unit: unit.gathered, default=NO_UNIT)
        return {**moments, **_exchanges(moments, sizes, sent, zero, shape)}
    gathered, waiting = unit_bytes([(unit.gathered, unit.reduced) for unit in units], zero, shape)
    found: dict[str, float] = {**state, GATHERED: gathered, WAITING: waiting}
    if price_list.engine.reduces_in_place:
        found["gradients"] = 0
    if price_list.engine.spares:
        found["spare gradients"] = spare_bytes(shards, content)
    return {AT_ONCE: found}


def largest_shard(units: Iterable[UnitPrice]) -> int:
    """Numbers of the largest part of a parameter on a rank."""
    return max((-(-unit.largest // unit.shards) for unit in units), default=0)


def _exchanges(
    moments: Mapping[str, Mapping[str, float]], units: Units, sent: UnitPrice, zero: int, shape: StepShape
) -> dict[str, dict[str, float]]:
    """What is there while FSDP sends a unit of a layer beside a backward. `sent`: the largest that it sends.

    gloo gathers into a buffer as large as what is gathered, and then copies it. It reduces a copy of all gradients, and
    its thread may let go of the copy only after the next gather has begun.
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
            GATHERED: units.root[0] + gathered if zero == 3 else at_work[GATHERED],
            BUFFERS: buffers,
        }
    return found


def root_waits(shards: Shards, content: Content, pipeline: Layout) -> bool:
    """Whether the model's own unit is not reduced after every backward: two stages give to it."""
    return bool(shards.tied) and content.has_embedding and content.has_head and pipeline.pp > 1


def _units(shards: Shards, content: Content) -> Units:
    def size(units: Iterable[tuple[UnitPrice, int]]) -> tuple[int, int]:
        pairs = tuple(units)
        return sum(unit.gathered * count for unit, count in pairs), sum(unit.reduced * count for unit, count in pairs)

    units = [shards.layers[kind].units for kind, _ in content.kinds]
    of_layers = [(size((unit, 1) for unit in each), size([(each[-1], 1)])) for each in units]
    layer, own = max(of_layers, default=((0, 0), (0, 0)))
    embedding = shards.embedding.units if content.has_embedding else ()
    return Units(
        layer=layer,
        own=own,
        embedding=size((unit, 1) for unit in embedding),
        root=size((unit, 1) for unit in shards.rest((content.has_embedding, content.has_head)).units),
        total=size((unit, count) for shard, count in shards.of(content) for unit in shard.units),
        matrix=max((unit.largest for each in units for unit in each), default=0),
        ahead=max((each[-1].gathered for each in units if each[-1].is_sent), default=0),
    )


def unit_bytes(sizes: Sequence[tuple[int, int]], zero: int, shape: StepShape) -> tuple[int, int]:
    """Bytes of another trainer's gathered parameters, and of gradients before they are reduced. `sizes`: of each unit
    the bytes that it gathers and the numbers that it reduces; the model's own unit is the last.

    ZeRO-3 has gathered the model's own unit and two more: the unit that runs and the next. ZeRO-1 and 2 have gathered
    all units. ZeRO-1 keeps every unreduced gradient until the last micro batch; ZeRO-2 and 3 those of one unit.
    """
    *inner, (root, _) = sizes
    largest = sorted((size for size, _ in inner), reverse=True)[:2]
    everything = sum(size for size, _ in sizes)
    gathered = everything if zero < 3 else root + sum(largest)
    reduced = [size for _, size in sizes]
    waiting = sum(reduced) * shape.reduce_bytes if zero == 1 else max(reduced) * shape.compute_bytes
    return gathered, waiting


def spare_bytes(shards: Shards, content: Content) -> int:
    """One gradient in the compute type for each shape of a weight on a pipeline rank."""
    units = [unit for kind, _ in content.kinds for unit in shards.layers[kind].units]
    if content.has_head:
        units += shards.rest((content.has_embedding, True)).units
    return sum(unit.gathered for unit in units)


def edges_of(price_list: PriceList, shards: Shards, content: Content, layout: Layout) -> Edges:
    """Of a pipeline rank."""
    cluster, of_rank = price_list.cluster, shards.of(content)
    units = [(unit, count) for shard, count in of_rank for unit in shard.units]
    replicas = price_list.span(Axis(layout.dp_replicate, layout.dp_shard * layout.cp * layout.tp))
    over = [
        (seconds(cluster, replicas, unit.calls["all_reduce"]) if "all_reduce" in unit.calls else 0.0, count)
        for unit, count in units
    ]
    sums = sum(seconds(cluster, price_list.span(shards.grid.axes[call.axis]), call) for call in sum_calls(of_rank))
    if (call := tied_call(shards, content, layout)) is not None:
        sums += seconds(cluster, price_list.span(Axis(2, layout.world // layout.pp * (layout.pp - 1))), call)
    held = sum(unit.trained * count for unit, count in units)
    return Edges(
        update=traffic_seconds(cluster.chip, UPDATE_BYTES * held),
        ends=max((unit.gather_seconds + unit.reduce_seconds for unit, _ in units), default=0.0),
        replicas=sum(took * count for took, count in over),
        last=max((took for took, _ in over), default=0.0),
        reductions=sum(unit.reduce_seconds * count for unit, count in units),
        sums=sums,
    )


def tied_call(shards: Shards, content: Content, layout: Layout) -> Call | None:
    """The sum of a tied embedding's gradients, where it is on two pipeline ranks and this is one of them."""
    if not shards.tied or layout.pp == 1 or content.has_embedding == content.has_head:
        return None
    return Call(axis="pp_ends", kind="all_reduce", bytes=shards.tied, phase="step")


def sum_calls(of_rank: Iterable[tuple[Shard, int]]) -> Iterator[Call]:
    """The sums of gradients that a rank holds in part, once a step."""
    sums = Counter[str]()
    for shard, count in of_rank:
        for axis, size in shard.sums.items():
            sums[axis] += size * count
    for axis, size in sums.items():
        if size:
            yield Call(axis=axis, kind="all_reduce", bytes=size, phase="step")


def transfer_call(prices: Prices) -> Call:
    """Hidden states from one pipeline rank to the next."""
    size = prices.shape.hidden_bytes // (prices.plan.layout.tp if prices.plan.splits_sequence else 1)
    return Call(axis="pp", kind="send", bytes=size, phase="forward")


def transfer_seconds(price_list: PriceList, prices: Prices, pp: int) -> float:
    """Of hidden states from one pipeline rank to the next."""
    span = price_list.span(Axis(pp, price_list.cluster.world // pp))
    return seconds(price_list.cluster, span, transfer_call(prices)) if pp > 1 else 0.0


def matmul_bytes(engine: Engine, cluster: Cluster) -> int:
    """What cuBLAS has for itself, in memory that the allocator counts: once for forward, once for backward.
    (`CUBLAS_WORKSPACE_CONFIG`: torch asks for 32 MiB from Hopper on, for 8.125 before it.) On a CPU, what MKL packs
    matrices into, and keeps, for each thread."""
    chip = cluster.chip
    if not engine.moments:
        return 0
    if chip.is_host:
        return cluster.threads * PACKED_BYTES
    return 2 * (32 * 2**20 if chip.capability >= (9, 0) else 8320 * 2**10)


def runtime_bytes(chip: Chip, grid: RankGrid) -> float:
    """The context, and a communicator for the world and for each axis of several ranks."""
    communicators = sum(axis.size > 1 for axis in grid.axes.values()) + (grid.world > 1)
    return (chip.context_gib + communicators * chip.communicator_gib) * GIB
