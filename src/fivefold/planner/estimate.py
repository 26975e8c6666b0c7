"""`estimate`: memory and time of a layout's step on a cluster, item by item, before it runs. No torch.

Prices of single layers (`price.py`) are added up to the stages of the pipeline, and the schedule is run slot by slot
with them. Memory is that of the fullest pipeline rank, time that of the whole step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from fivefold.core.errors import UserError, refuse
from fivefold.core.optimizers import RESTORED
from fivefold.core.schedule import Kind, Slot, Timeline
from fivefold.core.units import GIB
from fivefold.hardware.cluster import Cluster
from fivefold.models.flops import Costs
from fivefold.parallel import legality
from fivefold.parallel.experts.keys import ExpertKeys
from fivefold.parallel.features import limits_of
from fivefold.parallel.layout import Layout
from fivefold.parallel.ranks import RankGrid
from fivefold.parallel.recompute.budget import mode_choices
from fivefold.parallel.recompute.policy import MODES, Recompute, budget_bytes, fit_recompute_budget
from fivefold.planner.flow import Gathers, StagesInFlight, gathers, schedule_plan, span, stages_in_flight
from fivefold.planner.parts import (
    ITEMS,
    Content,
    Numbers,
    Prices,
    RankShards,
    Seconds,
    Stages,
    nothing,
)
from fivefold.planner.price import PriceList
from fivefold.planner.rank_memory import (
    MATMULS,
    OUTSIDE,
    SAVED,
    WAITING,
    all_units,
    in_flight_bytes,
    largest_shard,
    matmul_bytes,
    moved_bytes,
    moving_bytes,
    resting_bytes,
    root_waits,
    runtime_bytes,
)
from fivefold.planner.sums import (
    Edges,
    UnitSeconds,
    Work,
    busiest,
    crowded,
    data_seconds,
    durations,
    edges_of,
    least_span,
    passes,
    transfer_seconds,
)
from fivefold.planner.timing import Interval, Traits, host_seconds, memory_interval, step_interval, traffic_seconds

# ---- recompute budgets -----------------------------------------------------------------------------------------------
# Prices are per kind of layer. Under a budget, layers of one kind may have different recompute modes. So each kind is
# priced under every mode, and each pair counts as a kind. The plan itself decides the mode of a layer
# (`parallel/recompute/policy.py`), from the bytes and the work of each mode (`parallel/recompute/budget.py`).


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts that a step adds up. `prices`, `shards` and the columns of `stages` have one entry for each kind of layer;
    under a budget, for all kinds under `none`, then `selective`, then `full`. `spent`: how each pipeline rank spends a
    budget."""

    prices: Prices
    shards: RankShards
    stages: Stages
    spent: tuple[Recompute, ...] = ()


def under_budget(price_list: PriceList, layout: Layout, tokens: int, stages: Stages, in_flight: Numbers) -> Parts:
    """Build the parts of a layout with a budget. `tokens`: of a row, padded. `in_flight`: for each stage, the most
    micro batches between forward and backward. Raises `UserError` if full recompute keeps more than the budget."""
    of_modes = [price_list.of(replace(layout, recompute=mode), tokens) for mode in MODES]
    first, counts = of_modes[0], in_flight.astype(int).tolist()
    costs = zip(first.plan.anatomy.layers, price_list.short.layer_costs, strict=True)
    choices = [mode_choices(first.plan, layer, cost, first.shape) for layer, cost in costs]
    splits, of_stage = price_list.splits(layout), stages.own.tolist()
    names = price_list.facts.anatomy.layers
    found = tuple(
        fit_recompute_budget(
            layout.recompute,
            {
                names[layer]: {
                    mode: choice.in_flight(counts[stage]) for mode, choice in choices[price_list.kinds[layer]].items()
                }
                for stage in own
                for layer in range(*splits[stage])
            },
        )
        for own in of_stage
    )
    by_layer = {layer: mode for budget in found for layer, mode in budget.by_layer.items()}
    layers = np.zeros((len(splits), len(MODES) * len(choices) + 2))
    layers[:, -2:] = stages.layers[:, -2:]
    for stage, (start, end) in enumerate(splits):
        for layer in range(start, end):
            layers[stage, MODES.index(by_layer[names[layer]]) * len(choices) + price_list.kinds[layer]] += 1
    shards = price_list.shards(layout)
    edges = first if set(by_layer.values()) == {"none"} else of_modes[-1]  # what a pipeline holds between stages
    return Parts(
        replace(edges, layers=tuple(layer for prices in of_modes for layer in prices.layers)),
        replace(shards, layers=shards.layers * len(MODES)),
        replace(stages, layers=layers),
        found,
    )


# ---- the step --------------------------------------------------------------------------------------------------------

TIGHT = 0.94  # of a device's memory: above it the allocator starts to free and reallocate (planner facts, PyTorch FSDP)
MOST_TOKENS, MOST_ROWS = 2**27, 2**24  # per row, and per step: far above any run


@dataclass(frozen=True)
class Workload:
    """Work of an optimizer step: `global_batch_size` rows of `seq_length` tokens."""

    seq_length: int
    global_batch_size: int

    def __post_init__(self) -> None:
        """Raise `UserError` for rows without tokens, a step without rows, or more of either than can be priced."""
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
        """Tokens of an optimizer step."""
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
    """Memory and time of a step of `layout`. `rows`: memory of the fullest rank, then time; the rows of each add up.

    `step_seconds`: of the whole step. `allocated`: bytes at its peak. `reserved`: with what the allocator keeps and
    what the runtime takes outside of it.
    """

    layout: Layout
    cluster: Cluster
    workload: Workload
    rows: tuple[Item, ...]
    pp_rank: int
    flops: float

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return sum(row.amount for row in self.rows if row.part == "time")

    @cached_property
    def reserved(self) -> float:
        """Bytes taken of a device."""
        return sum(row.amount for row in self.rows if row.part == "memory")

    @cached_property
    def allocated(self) -> float:
        """Bytes of tensors."""
        return sum(row.amount for row in self.rows if row.part == "memory" and row.item not in OUTSIDE)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the step, by item."""
        return {row.item: row.amount for row in self.rows if row.part == "time"}

    @property
    def step_interval(self) -> Interval:
        """80 % interval of the step's seconds."""
        return step_interval(self.seconds, self.cluster.chip.doubt)

    @property
    def reserved_interval(self) -> Interval:
        """80 % interval of the bytes taken of a device."""
        return memory_interval(self.reserved)

    @property
    def memory_gib(self) -> float:
        """GiB of tensors at the peak of a step: a run reports it as `memory/peak_gib`."""
        return self.allocated / GIB

    @property
    def fits(self) -> bool:
        """True if `reserved` is at most the memory of the device."""
        return self.reserved <= self.cluster.chip.memory_bytes

    @property
    def verdict(self) -> str:
        """fits, tight (it may run, near the limit), or does not fit."""
        share = self.reserved / self.cluster.chip.memory_bytes
        return "fits" if share <= TIGHT else "tight" if share <= 1 else "does not fit"

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens of a step over its seconds and the devices."""
        return self.workload.tokens / self.step_seconds / self.layout.world

    @property
    def mfu(self) -> float:
        """Model FLOPs, with causal attention halved and no recompute, over the peak: 0.4 is 40 %."""
        peak = self.cluster.chip.peak_tflops[self.layout.precision] * 1e12
        return self.flops / self.step_seconds / self.layout.world / peak


def estimate_layout(prices: PriceList, layout: Layout, workload: Workload) -> Estimate:
    """Estimate a layout. Raises `UserError`, with the nearest legal values, if it cannot run the model there."""
    return PricedStep(prices, resolved(prices, layout, workload), workload).estimate()


def resolved(prices: PriceList, layout: Layout, workload: Workload) -> Layout:
    """A layout with all of its degrees. Raises `UserError` if it cannot run the model there."""
    world, limits = prices.cluster.world, limits_of(prices.facts)
    # First: advice about shards does not help a model without experts.
    refuse(ExpertKeys.model_violations(layout, limits))
    refuse(layout.against_world(world, prices.cluster.text))
    layout = layout.resolve(world)
    refuse(legality.violations(layout, limits, world=world, batch=workload.global_batch_size))
    return layout


@dataclass(frozen=True)
class PricedStep:
    """One layout's step, added up lazily."""

    price_list: PriceList
    layout: Layout
    workload: Workload

    @cached_property
    def pipeline(self) -> Layout:
        """The layout's pipeline alone: many layouts share its stages and schedules."""
        own = self.layout
        return Layout(pp=own.pp, pp_schedule=own.pp_schedule, pp_virtual=own.pp_virtual, pp_split=own.pp_split)

    @cached_property
    def micro_batches(self) -> int:
        return self.layout.accumulation(self.workload.global_batch_size)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a row, padded."""
        return self.layout.padded(self.workload.seq_length)

    @cached_property
    def parts(self) -> Parts:
        """Parts that the step adds up. Raises `UserError` for a budget of recompute that `full` exceeds."""
        prices, layout = self.price_list, self.layout
        stages = prices.stages(self.pipeline)
        if budget_bytes(layout.recompute) is not None:
            return under_budget(prices, layout, self.tokens, stages, self.in_flight.most)
        return Parts(prices.of(layout, self.tokens), prices.shards(layout), stages)

    @property
    def prices(self) -> Prices:
        return self.parts.prices

    @property
    def shards(self) -> RankShards:
        return self.parts.shards

    @property
    def stages(self) -> Stages:
        return self.parts.stages

    @cached_property
    def in_flight(self) -> StagesInFlight:
        return stages_in_flight(self.pipeline, self.micro_batches, self.price_list.stages(self.pipeline).sizes)

    @cached_property
    def gathers(self) -> Gathers:
        zero, has_copies = self.shards.stage(self.layout.zero), self.layout.hpz > 0
        return gathers(self.pipeline, self.micro_batches, zero, has_copies=has_copies)

    @property
    def cluster(self) -> Cluster:
        return self.price_list.cluster

    @property
    def traits(self) -> Traits:
        return self.price_list.traits

    # ---- time --------------------------------------------------------------------------------------------------------

    @cached_property
    def work(self) -> Work:
        return Work.of([self.prices]).at(0)

    @cached_property
    def sent(self) -> UnitSeconds:
        return UnitSeconds.of([self.shards]).at(0)

    @cached_property
    def passes(self) -> tuple[Numbers, Numbers]:
        """Seconds of each stage, forward and backward, in one micro batch, with FSDP. Copies to host memory and back
        overlap them."""
        forward, backward = self.computing
        return np.maximum(forward, self.copying), np.maximum(backward, self.copying)

    @cached_property
    def computing(self) -> tuple[Numbers, Numbers]:
        """The same, without copies."""
        return passes(self.work, self.sent, self.stages, self.gathers, self.traits)

    @cached_property
    def copying(self) -> Numbers:
        """Seconds of each stage and micro batch to copy saved activations to host memory, or back."""
        moved = moved_bytes(self.work, self.stages) * self.layout.offload_activations
        return np.asarray(host_seconds(self.cluster.chip, moved))

    @cached_property
    def busiest(self) -> int:
        return int(busiest(*self.passes, self.stages))

    def _totals(self, rank: int) -> Seconds:
        """Device seconds of a pipeline rank in one micro batch, by item."""
        found, layers = nothing(), self.stages.ranks[rank] @ self.stages.layers
        for part, count in zip(self.prices.parts, layers, strict=True):
            found += (part.forward + part.backward) * count
        before, after = data_seconds(self.work, self.sent, self.stages, self.gathers, overlaps=self.traits.overlaps)
        found[ITEMS.index("data")] += self.stages.ranks[rank] @ (before + after)
        return found

    def _waits(self, rank: int) -> float:
        """Seconds that a pipeline rank's device waits for Python in one micro batch."""
        return float(self.stages.ranks[rank] @ sum(self.computing)) - float(self._totals(rank).sum())

    @cached_property
    def at_least(self) -> float:
        """Lower bound of the step's seconds; exact without a pipeline."""
        splits = self.pipeline.schedule.splits_backward
        slots = durations(*self.passes, self.work, self.stages)
        span = least_span(
            slots, self.stages, self.in_flight.left, self.micro_batches, self.transfer, splits_backward=splits
        )
        return float(span) / (self.cluster.crowding if self.layout.pp > 1 else 1) + self.after

    @cached_property
    def after(self) -> float:
        """Seconds of the busiest rank outside the passes."""
        return float(self.edges.update) + self.edge_seconds

    @cached_property
    def seconds(self) -> float:
        return self.span() + self.after

    @cached_property
    def transfer(self) -> float:
        return transfer_seconds(self.price_list, self.prices, self.layout.pp)

    @cached_property
    def grid(self) -> RankGrid:
        return self.price_list.grid(self.layout)

    def span(self) -> float:
        """Seconds from the first slot of the pipeline to the end of the last."""
        if self.layout.pp == 1:
            forward, backward = self.passes
            return float(forward[0] + backward[0]) * self.micro_batches
        of_kind = {kind: seconds[:, np.newaxis] for kind, seconds in self.durations.items()}
        alone = float(span(self.pipeline, np.array([self.micro_batches]), of_kind, np.array([self.transfer]))[0])
        return float(crowded(alone, *self.passes, self.micro_batches, self.layout.pp, self.cluster.crowding))

    @cached_property
    def durations(self) -> dict[Kind, Numbers]:
        return durations(*self.passes, self.work, self.stages)

    def timeline(self, micro_batches: int) -> Timeline:
        """The pipeline's slots, in seconds, for this many micro batches."""

        def duration(slot: Slot) -> float:
            return float(self.durations[slot.kind][slot.stage])

        return schedule_plan(self.pipeline, micro_batches).simulate(duration, transfer=self.transfer)

    def time(self, span: float) -> Iterator[Item]:
        """Items of the busiest rank, and the time it waits."""
        rank = self.busiest
        total = dict(zip(ITEMS, self._totals(rank).tolist(), strict=True)) | {"host": self._waits(rank)}
        total["host link"] = float(self.stages.ranks[rank] @ (sum(self.passes) - sum(self.computing)))
        whys = {
            "host link": "copies of saved activations that outlast compute",
            "matmuls": f"{self.micro_batches} micro batches of {self.layout.micro_batch_size} x {self.tokens} tokens",
            "host": "Python and launches beyond the device's time",
            "data": "FSDP's collectives that outlast compute",
        }
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
        """The busiest rank's part of the model."""
        return self.stages.contents[self.busiest]

    @cached_property
    def edges(self) -> Edges:
        found, units = edges_of(self.price_list, self.shards, self.content, self.layout), self.shards.of(self.content)
        if restored := RESTORED[self.layout.state_dtype]:  # temporaries of the restored state are written and read
            numbers = sum(unit.trained * count for shard, count in units for unit in shard.units)
            found = replace(found, update=found.update + traffic_seconds(self.cluster.chip, 2 * restored * numbers))
        if not (away := self.layout.rests_in_host):
            return found
        shape, each = self.shards.shape, [(unit, count) for shard, count in units for unit in shard.units]
        kinds = len(shape.optimizer.state) * ("optimizer state" in away)
        moved = sum(unit.state * count for unit, count in each) * kinds
        moved += sum(unit.held * count for unit, count in each) * shape.master_bytes * ("parameters" in away)
        copies = host_seconds(self.cluster.chip, moved)
        return replace(found, update=np.maximum(found.update, copies))

    @cached_property
    def edge_seconds(self) -> float:
        """Seconds at the ends of a step that no compute hides: the first unit's gather, the last one's reduction, sums
        of gradients over replicas beyond one backward, and the sums over all ranks."""
        backward = self.stages.ranks[self.busiest] @ self.passes[1] * self.traits.overlaps
        return float(self.edges.seconds(backward)) + self.price_list.world_seconds + self.traits.step_seconds

    # ---- memory ------------------------------------------------------------------------------------------------------

    def memory_of(self, rank: int) -> dict[str, float]:
        """Bytes of a pipeline rank by item, at its fullest moment; the last two items are not tensors."""
        found, waiting = self.tensors(rank)
        found["allocator"] = sum(found.values()) * (self.traits.slack - 1) + self.traits.kept_back * waiting
        if self.layout.offload_parameters:  # copies from host memory use blocks of their own stream
            units = all_units(self.shards, self.stages.contents[rank])
            found["allocator"] += largest_shard(units) * self.shards.shape.master_bytes
        found["runtime"] = runtime_bytes(self.cluster.chip, self.grid)
        return found

    def tensors(self, rank: int) -> tuple[dict[str, float], float]:
        """Bytes of a pipeline rank's tensors by item, at its fullest moment, and its most unreduced gradients at any
        moment."""
        content, chip = self.stages.contents[rank], self.cluster.chip
        resting = resting_bytes(
            self.price_list, self.shards, content, self.layout.zero,
            waits=root_waits(self.shards, content, self.pipeline), goes_on=self.micro_batches > 1,
            away=self.layout.rests_in_host, state_dtype=self.layout.state_dtype,
            apart=bool(self.layout.outer_every),
        )  # fmt: skip
        in_flight = in_flight_bytes(
            self.work, self.stages, self.in_flight, self.prices.logits, offloads=self.layout.offload_activations
        )
        moving = moving_bytes(chip, in_flight)
        own = {moment: {item: float(size[rank]) for item, size in items.items()} for moment, items in moving.items()}
        moments = ({**resting[moment], **own[moment]} for moment in resting)
        found = max(moments, key=lambda items: sum(items.values())) | {MATMULS: matmul_bytes(self.cluster)}
        return found, max(items[WAITING] for items in resting.values())

    @cached_property
    def fullest(self) -> tuple[int, dict[str, float]]:
        """The pipeline rank that needs the most memory, and its items."""
        found = ((rank, self.memory_of(rank)) for rank in range(self.layout.pp))
        return max(found, key=lambda items: sum(items[1].values()))

    @cached_property
    def needs(self) -> float:
        """Total bytes of the fullest rank; infinite under a budget of recompute that cannot be kept."""
        try:
            return sum(self.fullest[1].values())
        except UserError:
            if budget_bytes(self.layout.recompute) is None:
                raise
            return inf

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def estimate(self) -> Estimate:
        rank, memory = self.fullest
        why = {SAVED: f"recompute: {self.parts.spent[rank]}"} if self.parts.spent else {}
        items = [Item("memory", name, amount, why.get(name, "")) for name, amount in memory.items() if amount]
        items += self.time(self.span())
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
