"""`estimate`: the memory and the time of a step of a layout on a cluster, item by item, before it runs. No torch.

Prices of single layers (`price.py`) are added up to the stages of the pipeline, and the schedule is run slot by slot
with them. Memory is that of the fullest pipeline rank. Time is that of the whole step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from fivefold.core import legality
from fivefold.core.layout import Layout
from fivefold.core.optimizers import OPTIMIZERS
from fivefold.core.schedule import SchedulePlan, Slot, Timeline
from fivefold.models.flops import Costs
from fivefold.parallel.collectives import Call
from fivefold.parallel.limits import limits_of
from fivefold.parallel.memory import under_way, unit_bytes
from fivefold.parallel.ranks import RankGrid
from fivefold.parallel.unshards import Unshards, of_slots
from fivefold.planner.chips import Chip
from fivefold.planner.cluster import Cluster
from fivefold.planner.compute import traffic_seconds
from fivefold.planner.engines import Engine
from fivefold.planner.links import seconds
from fivefold.planner.price import ITEMS, LayerPrice, PriceList, Prices, Seconds, Stage, UnitPrice, nothing

UPDATE_BYTES = 34  # of memory traffic that AdamW and the norm of gradients make for a parameter, all in fp32
TIGHT = 0.94  # of a device's memory: above it the allocator begins to free and ask again (planner facts, PyTorch FSDP)


@dataclass(frozen=True)
class Workload:
    """What an optimizer step has to do: `global_batch_size` rows of `seq_length` tokens."""

    seq_length: int
    global_batch_size: int

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
    def memory_gib(self) -> float:
        """Of tensors, at the peak of a step: what `memory/peak_gib` of a run reports."""
        return self.allocated / 2**30

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


def estimate(prices: PriceList, layout: Layout, workload: Workload) -> Estimate:
    """Of a layout. Raises `UserError` where it cannot run the model on the cluster, with the nearest legal values."""
    world = prices.cluster.world
    layout = layout.resolve(world)
    limits = limits_of(prices.facts)
    legality.refuse(legality.violations(layout, limits, world=world, batch=workload.global_batch_size))
    return Step(prices, layout, workload).estimate()


@lru_cache(maxsize=4096)
def _schedule(layout: Layout, micro_batches: int) -> SchedulePlan:
    return SchedulePlan.of(layout, micro_batches)


def _saturated(layout: Layout, micro_batches: int) -> int:
    """As many micro batches as show what a pipeline rank ever holds at once, and how often it gathers: beyond 3 pp they
    only repeat. In rounds of pp they stay whole rounds."""
    enough = 3 * layout.pp + 2 * layout.schedule.multiple(layout.pp)
    if micro_batches <= enough:
        return micro_batches
    return enough - enough % layout.schedule.multiple(layout.pp)


@lru_cache(maxsize=16384)
def _in_flight(layout: Layout, micro_batches: int, rank: int) -> dict[int, int]:
    return under_way(_schedule(layout, _saturated(layout, micro_batches)).orders[rank])


@lru_cache(maxsize=16384)
def _unshards(layout: Layout, micro_batches: int, rank: int) -> dict[str, Unshards]:
    """Counts for one micro batch, of a unit that one stage uses and of the model's own, as (times of a step) / m."""
    count = _saturated(layout, micro_batches)
    plan = _schedule(layout, count)
    own = tuple(stage for stage in range(plan.stages) if plan.rank_of(stage) == rank)
    users = {"layer": frozenset(own[:1]), "": frozenset(own[-1:])}
    return of_slots(plan.orders[rank], users, count, own, layout.zero)


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
        return Layout(
            pp=own.pp, pp_schedule=own.pp_schedule, pp_virtual=own.pp_virtual, pp_split=own.pp_split, zero=own.zero
        )

    @cached_property
    def micro_batches(self) -> int:
        return self.layout.accumulation(self.workload.global_batch_size)

    @cached_property
    def tokens(self) -> int:
        """Of a row, padded."""
        multiple = self.layout.row_multiple
        return -(-self.workload.seq_length // multiple) * multiple

    @cached_property
    def prices(self) -> Prices:
        return self.price_list.of(self.layout, self.tokens)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.price_list.stages(self.pipeline)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(number for number in range(len(self.stages)) if _rank_of(self.pipeline, number) == rank)

    @property
    def cluster(self) -> Cluster:
        return self.price_list.cluster

    @property
    def engine(self) -> Engine:
        return self.price_list.engine

    @property
    def is_tied(self) -> bool:
        return self.price_list.facts.anatomy.tied

    # ---- what a stage is made of -------------------------------------------------------------------------------------

    def parts(self, stage: Stage) -> Iterator[tuple[LayerPrice, int]]:
        """The prices of a stage, and how often each counts."""
        for kind, count in stage.kinds:
            yield self.prices.layers[kind], count
        if stage.has_embedding:
            yield self.prices.embedding, 1
        if stage.has_head:
            yield self.prices.head, 1

    def units(self, rank: int) -> Iterator[tuple[UnitPrice, int]]:
        """The FSDP units of a pipeline rank; the model's own is the last. A tied embedding is part of it, and on both
        ends of a pipeline."""
        own = [self.stages[stage] for stage in self.stages_of(rank)]
        for price, count in (part for stage in own for part in self.parts(stage)):
            yield from ((unit, count) for unit in price.units)
        if any(stage.has_head or (stage.has_embedding and self.is_tied) for stage in own):
            yield self.prices.root, 1

    # ---- time --------------------------------------------------------------------------------------------------------

    @cached_property
    def passes(self) -> tuple[tuple[Seconds, Seconds, Seconds], ...]:
        """Of each stage: forward, backward, and of the backward that for weights, in one micro batch, with FSDP."""
        found = []
        for number, stage in enumerate(self.stages):
            forward, backward, weights = nothing(), nothing(), nothing()
            counts = _unshards(self.pipeline, self.micro_batches, _rank_of(self.pipeline, number))["layer"]
            times = tuple(each / _saturated(self.pipeline, self.micro_batches) for each in _counts(counts))
            for price, count in self.parts(stage):
                forward += price.forward * count
                backward += price.backward * count
                weights += price.weights * count
                before, after = self._exposed(price, times)
                forward[_DATA] += before * count
                backward[_DATA] += after * count
            found.append((forward, backward, weights))
        return tuple(found)

    def _exposed(self, price: LayerPrice, times: tuple[float, ...]) -> tuple[float, float]:
        """Seconds of FSDP's collectives that compute cannot hide, in a forward and in a backward of a layer. Neighbours
        are taken to be alike: a layer's parameters are gathered while the one before it runs."""
        gather, reduce = (
            sum(getattr(unit, kind) for unit in price.units) for kind in ("gather_seconds", "reduce_seconds")
        )
        forward, backward = (price.forward.sum(), price.backward.sum()) if self.engine.overlaps_data else (0.0, 0.0)
        first, again, reductions = times
        together = min(again, reductions)
        after = together * max(0.0, gather + reduce - backward)
        after += (again - together) * max(0.0, gather - backward) + (reductions - together) * max(
            0.0, reduce - backward
        )
        return first * max(0.0, gather - forward), after

    def _totals(self, rank: int) -> Seconds:
        """Of a pipeline rank in one micro batch, by item."""
        total = nothing()
        for stage in self.stages_of(rank):
            total += self.passes[stage][0] + self.passes[stage][1]
        return total

    @cached_property
    def busiest(self) -> tuple[int, Seconds]:
        """The pipeline rank with the most to do, and what."""
        return max(((rank, self._totals(rank)) for rank in range(self.layout.pp)), key=lambda each: each[1].sum())

    @cached_property
    def at_least(self) -> float:
        """No step is shorter: the busiest rank works without a gap."""
        return float(self.micro_batches * self.busiest[1].sum())

    @cached_property
    def transfer(self) -> float:
        """Seconds of hidden states from one pipeline rank to the next."""
        if self.layout.pp == 1:
            return 0.0
        shape, tp = self.prices.shape, self.layout.tp if self.layout.sequence_parallel else 1
        call = Call(axis="pp", kind="send", bytes=shape.hidden_bytes // tp, phase="forward")
        return seconds(self.cluster, self.price_list.span(self.grid, "pp"), call)

    @cached_property
    def grid(self) -> RankGrid:
        return RankGrid(
            self.layout, embedding_ranks=(0, self.layout.pp - 1) if self.layout.pp > 1 and self.is_tied else ()
        )

    def span(self) -> float:
        """Seconds from the first slot of the pipeline to the end of the last."""
        return self.at_least if self.layout.pp == 1 else self.timeline(self.micro_batches).span

    def timeline(self, micro_batches: int) -> Timeline:
        """The pipeline's slots, in seconds, with so many micro batches."""
        durations = [
            {"F": float(f.sum()), "B": float(b.sum()), "I": float(b.sum() - w.sum()), "W": float(w.sum())}
            for f, b, w in self.passes
        ]

        def duration(slot: Slot) -> float:
            return durations[slot.stage][slot.kind]

        return _schedule(self.pipeline, micro_batches).simulate(duration, transfer=self.transfer)

    def time(self, span: float) -> Iterator[Item]:
        """The items of the busiest rank, and what it waits."""
        rank, total = self.busiest
        whys = {
            "matmuls": f"{self.micro_batches} micro batches of {self.layout.micro_batch_size} x {self.tokens} tokens",
            "host": "Python and launches beyond the device's time", "data": "FSDP's collectives that outlast compute",
        }  # fmt: skip
        for name, amount in zip(ITEMS, total, strict=True):
            if amount:
                yield Item("time", name, float(amount) * self.micro_batches, whys.get(name, ""))
        if self.layout.pp > 1:
            yield Item("time", "bubble", span - self.at_least, f"pipeline rank {rank} waits for others")
        units = [(unit, count) for unit, count in self.units(rank)]
        held = sum(unit.trained * count for unit, count in units)
        yield Item("time", "optimizer", traffic_seconds(self.cluster.chip, UPDATE_BYTES * held), f"{held:,} parameters")
        yield Item("time", "edges of the step", self._edges(units), "first gather, last reduction, sums over ranks")

    def _edges(self, units: Sequence[tuple[UnitPrice, int]]) -> float:
        """What no compute hides at the ends of a step: the first unit's gather, the last one's reduction, sums of
        gradients over replicas beyond one backward, and the sums over all ranks."""
        ends = max((unit.gather_seconds + unit.reduce_seconds for unit, _ in units), default=0.0)
        replicas = sum(unit.replicate_seconds * count for unit, count in units)
        reductions = sum(unit.reduce_seconds * count for unit, count in units)
        rank, _ = self.busiest
        backward = sum(self.passes[stage][1].sum() for stage in self.stages_of(rank)) * self.engine.overlaps_data
        last = max((unit.replicate_seconds for unit, _ in units), default=0.0)
        exposed = max(last, replicas - max(0.0, backward - reductions))
        sums = sum(
            price.step_seconds * count
            for stage in self.stages_of(rank)
            for price, count in self.parts(self.stages[stage])
        )
        tied = 0.0
        if len(self.grid.embedding_ranks) > 1:
            call = Call(
                axis="pp_ends",
                kind="all_reduce",
                bytes=self.prices.root.held * self.prices.shape.master_bytes,
                phase="step",
            )
            tied = seconds(self.cluster, self.cluster.tier_of(self.grid.members("pp_ends", 0)), call)
        return float(ends + exposed + sums + tied + self.prices.edges + self.engine.step_seconds)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def memory_of(self, rank: int) -> dict[str, float]:
        """Bytes of a pipeline rank by item; the last two are not tensors."""
        shape, chip = self.prices.shape, self.cluster.chip
        units = [unit for unit, count in self.units(rank) for _ in range(count)]
        held, trained = sum(unit.held for unit in units), sum(unit.trained for unit in units)
        sizes = [(unit.gathered, unit.reduced) for unit in units]
        if not any(self.stages[stage].has_head or (stage == 0 and self.is_tied) for stage in self.stages_of(rank)):
            sizes.append((0, 0))  # the model's own unit is empty here
        gathered, waiting = unit_bytes(sizes, self.layout.zero, shape)
        found: dict[str, float] = {
            "parameters": held * shape.master_bytes,
            "gradients": trained * shape.master_bytes,
            "optimizer state": trained * shape.master_bytes * len(OPTIMIZERS[shape.optimizer].state),
            "gathered parameters": gathered,
            "unreduced gradients": waiting,
            "saved activations": self._saved(rank),
            "logits": self.prices.logits if any(self.stages[stage].has_head for stage in self.stages_of(rank)) else 0,
            "router buffers": self.prices.buffers,
        }
        found["allocator"] = sum(found.values()) * (self.engine.slack - 1)
        found["runtime"] = _runtime_bytes(chip, self.grid)
        return found

    def _saved(self, rank: int) -> float:
        """What forward passes leave behind; with recompute, one layer's tensors besides while it is computed again."""
        flying = _in_flight(self.pipeline, self.micro_batches, rank)
        total, again = 0.0, 0
        for stage in self.stages_of(rank):
            for price, count in self.parts(self.stages[stage]):
                total += flying[stage] * count * price.kept
                again = max(again, price.saved if price.kept < price.saved else 0)
        return total + again

    @cached_property
    def fullest(self) -> tuple[int, dict[str, float]]:
        """The pipeline rank that needs the most memory, and what for."""
        found = ((rank, self.memory_of(rank)) for rank in self._distinct_ranks())
        return max(found, key=lambda each: sum(each[1].values()))

    def _distinct_ranks(self) -> Iterable[int]:
        return range(self.layout.pp)

    @cached_property
    def needs(self) -> float:
        """Bytes of the fullest rank, all in all."""
        return sum(self.fullest[1].values())

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def estimate(self, span: float | None = None) -> Estimate:
        rank, memory = self.fullest
        items = [Item("memory", name, amount) for name, amount in memory.items() if amount]
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


_DATA = ITEMS.index("data")


def _counts(unshards: Unshards) -> tuple[int, int, int]:
    return unshards.forward, unshards.backward, unshards.reductions


def _rank_of(pipeline: Layout, stage: int) -> int:
    return pipeline.schedule.rank_of(stage, pipeline.pp)


def _runtime_bytes(chip: Chip, grid: RankGrid) -> float:
    """The context, and a communicator for the world and for each axis of several ranks."""
    communicators = sum(axis.size > 1 for axis in grid.axes.values()) + (grid.world > 1)
    return (chip.context_gib + communicators * chip.communicator_gib) * 2**30
