"""Every layout worth pricing, as arrays. No torch.

A layout is a place (degrees, and how ranks share a micro batch), the rows of a micro batch, recompute, the ZeRO stage
and the schedule of a pipeline. The rules of `parallel/legality.py` are checked once for each part, not for each layout:
a layout is legal if its parts are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core.model_limits import ModelLimits
from fivefold.core.schedule import SCHEDULES
from fivefold.parallel import legality
from fivefold.parallel.features import limits_of
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Workload
from fivefold.planner.parts import Prices, cached_method
from fivefold.planner.price import PriceList, work_layout

MICRO_BATCHES = (1, 2, 4, 8, 16)  # rows of a forward pass
ENOUGH_TOKENS = 2**15  # per micro batch on a rank: more make nothing faster, and hide nothing better
VIRTUAL = (1, 2, 4, 8)  # stages of a pipeline rank
PLACED = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "expert_tp")  # fields of `Layout` that a place has
LEAST_TOKENS = 256  # per row on a rank of cp and tp: with fewer, collectives outlast all compute

Integers = NDArray[np.int64]
Which = NDArray[np.bool_] | NDArray[np.int64] | slice


@dataclass(frozen=True, eq=False)
class Rows:
    """Layouts of one pipeline: its degree, schedule and stages a rank. Arrays: micro batch (a number in `Space.works`),
    place (in `Space.places`), micro batches of a step, ZeRO stage."""

    pp: int
    schedule: str
    virtual: int
    work: Integers
    place: Integers
    micro_batches: Integers
    zero: Integers

    def __len__(self) -> int:
        return len(self.work)

    def at(self, which: Which) -> "Rows":
        arrays = (self.work[which], self.place[which], self.micro_batches[which], self.zero[which])
        return Rows(self.pp, self.schedule, self.virtual, *arrays)

    @property
    def pipeline(self) -> Layout:
        return Layout(pp=self.pp, pp_schedule=self.schedule, pp_virtual=self.virtual)


@dataclass(eq=False)
class Space:
    """The layouts of a model on a cluster for a workload.

    `works`: rows, recompute and prices of each kind of micro batch. `places`: layouts without these, without ZeRO stage
    and schedule. `given`: fields of `Layout` with values that all of them have. `_split`: maps a work to the same one
    under a schedule that delays weight gradients.
    """

    prices: PriceList
    workload: Workload
    given: Mapping[str, Any] = field(default_factory=dict)
    works: list[tuple[int, str, Prices]] = field(init=False, default_factory=list)
    places: list[Layout] = field(init=False, default_factory=list)
    _split: dict[int, int] = field(init=False, default_factory=dict)

    @cached_property
    def limits(self) -> ModelLimits:
        return limits_of(self.prices.facts)

    @cached_property
    def rows(self) -> tuple[Rows, ...]:
        """All legal layouts, by pipeline."""
        by_pp: dict[int, list[tuple[Integers, ...]]] = {}
        for shared in self._shared():
            for place, arrays in self._of(shared):
                by_pp.setdefault(place.pp, []).append(arrays)
        return tuple(
            own
            for pp, parts in sorted(by_pp.items())
            for rows in self._scheduled(pp, *(np.concatenate(column) for column in zip(*parts, strict=True)))
            if len(own := self._agreeing(rows))
        )

    def _agreeing(self, rows: Rows) -> Rows:
        def agree(**values: Any) -> bool:
            return all(self.given.get(name, value) == value for name, value in values.items())

        if not self.given:
            return rows
        if rows.pp > 1 and not agree(pp_schedule=rows.schedule, pp_virtual=rows.virtual):
            return rows.at(slice(0))
        places = np.array([agree(**{name: getattr(place, name) for name in PLACED}) for place in self.places])
        works = np.array([agree(recompute=recompute) for _, recompute, _ in self.works])
        zeros = np.array([agree(zero=zero) for zero in range(4)])
        is_whole = np.array([place.dp_shard * place.cp == 1 for place in self.places])  # ZeRO stages make no difference
        return rows.at(places[rows.place] & works[rows.work] & (zeros[rows.zero] | is_whole[rows.place]))

    def layout(self, rows: Rows, number: int) -> Layout:
        size, recompute, _ = self.works[rows.work[number]]
        place: Layout = self.places[rows.place[number]]
        return replace(
            place, zero=int(rows.zero[number]), micro_batch_size=size, recompute=recompute,
            pp_schedule=rows.schedule, pp_virtual=rows.virtual,
        )  # fmt: skip

    # ---- sharing a micro batch ---------------------------------------------------------------------------------------

    def _shared(self) -> Iterator[Layout]:
        """Ways for ranks to share a micro batch: tp, cp and its method, ep and `expert_tp`.

        Tensor parallelism stays inside a node: over the network it lost in every measurement. It splits the sequence if
        the model allows it: otherwise ranks send as many bytes and keep more.
        """
        cluster, length = self.prices.cluster, self.workload.seq_length
        degrees, split = divisors(cluster.world), "sequence_parallel" not in self.limits.refusals
        for tp, cp in product(degrees, degrees):
            too_short = tp * cp > 1 and length < LEAST_TOKENS * tp * cp
            if tp > cluster.domain or cluster.world % (tp * cp) or too_short:
                continue
            for features, ep in product(
                (False, True) if tp > 1 else (False,), degrees if self.limits.experts else (1,)
            ):
                if ep <= max(1, self.limits.experts or 0):
                    precision = self.given.get("precision", Layout.precision)
                    basis = work_layout(
                        Layout(tp=tp, cp=cp, sequence_parallel=split, expert_tp=features, ep=ep, precision=precision)
                    )
                    yield from self._methods(basis)

    def _methods(self, basis: Layout) -> Iterator[Layout]:
        """Layouts with every `cp_method` that has an effect of its own: auto first."""
        means = set()
        for method in ("auto", "ring", "ulysses", "allgather") if basis.cp > 1 else ("auto",):
            layout = replace(basis, cp_method=method)
            if not legality.violations(layout, self.limits):
                meant = self.prices.plan(work_layout(layout)).cp_method
                if meant not in means:
                    yield layout
                means.add(meant)

    def _of(self, shared: Layout) -> Iterator[tuple[Layout, tuple[Integers, ...]]]:
        """Places of layouts that share a micro batch this way; arrays of work, place, micro batches and ZeRO stage."""
        world, batch = self.prices.cluster.world, self.workload.global_batch_size
        rest = world // (shared.tp * shared.cp)
        works = None
        for pp in divisors(rest):
            for shards in divisors(rest // pp) if self._schedules(pp) else ():
                place = replace(shared, pp=pp, dp_shard=shards, dp_replicate=rest // pp // shards)
                sizes = self._sizes(place.data_ranks)
                if not len(sizes) or any(place.against_world(world)):
                    continue
                works = self._works(shared) if works is None else works
                own, rows = works[np.isin(works[:, 1], sizes)].T
                zeros = np.array((3, 2, 1) if shards * place.cp > 1 else (3,))
                numbers = np.full(len(own) * len(zeros), len(self.places))
                counts = np.tile(batch // (rows * place.data_ranks), len(zeros))
                self.places.append(place)
                yield place, (np.tile(own, len(zeros)), numbers, counts, np.repeat(zeros, len(own)))

    def _works(self, shared: Layout) -> Integers:
        """[number in `works`, rows] of every micro batch that is shared this way."""
        found = []
        length = self.workload.seq_length // shared.cp
        useful = [rows for rows in self._all_sizes if rows == 1 or (rows // 2) * length < ENOUGH_TOKENS]
        useful = list(self._all_sizes) if "micro_batch_size" in self.given else useful
        for rows, recompute in product(useful, ("none", "selective", "full")):
            layout = replace(shared, micro_batch_size=rows, recompute=recompute)
            number = self._add(layout)
            found.append((number, rows))
            if recompute == "none":  # recomputed activations would stay until the weight gradients
                self._split[number] = self._add(replace(layout, pp=2, pp_schedule="zb"))
        return np.array(found)

    def _add(self, layout: Layout) -> int:
        """Number in `works` of a layout's micro batches: that of the last one if prices are the same."""
        prices = self.prices.of(layout, layout.padded(self.workload.seq_length))
        if not self.works or self.works[-1][2] is not prices:
            self.works.append((layout.micro_batch_size, layout.recompute, prices))
        return len(self.works) - 1

    @cached_property
    def _all_sizes(self) -> tuple[int, ...]:
        """Micro batch sizes, in rows, that some layout can have."""
        return tuple(sorted({size for ranks in divisors(self.prices.cluster.world) for size in self._sizes(ranks)}))

    def _sizes(self, data_ranks: int) -> tuple[int, ...]:
        """Micro batch sizes, in rows, that divide the batch."""
        given = self.given.get("micro_batch_size")
        return _sizes(data_ranks, self.workload.global_batch_size, MICRO_BATCHES if given is None else (given,))

    # ---- pipelines ---------------------------------------------------------------------------------------------------

    @cached_method
    def _schedules(self, pp: int) -> list[Layout]:
        """Legal schedules with each number of stages a rank. GPipe is left out: as slow as 1F1B, and keeps more."""
        names = [name for name in SCHEDULES if name != "gpipe"] if pp > 1 else ["1f1b"]
        found: dict[tuple[str, int], Layout] = {}
        for name, virtual in product(names, VIRTUAL):
            layout = Layout(pp=pp, pp_schedule=name, pp_virtual=virtual)
            fills_gaps = layout.schedule.splits_backward and virtual > 2  # two stages a rank leave next to no gaps
            if not fills_gaps and not legality.violations(layout, self.limits):
                found.setdefault((name, layout.stages_per_rank), layout)
        return list(found.values())

    def _scheduled(self, pp: int, work: Integers, place: Integers, count: Integers, zero: Integers) -> Iterator[Rows]:
        """Yield, for each schedule, the layouts whose micro batches it takes."""
        split = np.array([self._split.get(number, -1) for number in range(len(self.works))])
        counts = np.unique(count)
        for pipeline in self._schedules(pp):
            taken = [count for count in counts if not any(pipeline.step_violations(int(count)))]
            own = split[work] if pipeline.schedule.splits_backward else work
            legal = np.isin(count, taken) & (own >= 0)
            if legal.any():
                yield Rows(pp, pipeline.pp_schedule, pipeline.pp_virtual, own, place, count, zero).at(legal)


@cache
def divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


@cache
def _sizes(data_ranks: int, batch: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    layouts = (Layout(dp_shard=data_ranks, micro_batch_size=size) for size in sizes)
    return tuple(layout.micro_batch_size for layout in layouts if not any(layout.against_batch(batch)))
