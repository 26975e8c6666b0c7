"""Memory, and a lower bound of the step time, of many layouts at once. No torch.

The numbers are those of `estimate`: its prices and sums, over arrays of layouts. Memory is exact. No step is shorter
than its bound, and without a pipeline none is longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.core.schedule import Kind
from fivefold.parallel.layout import Layout
from fivefold.planner.flow import Gathers, StagesInFlight, gathers, span, stages_in_flight
from fivefold.planner.parts import Content, Numbers, RankShards, Stages, cached_method
from fivefold.planner.rank_memory import (
    WAITING,
    in_flight_bytes,
    matmul_bytes,
    moving_bytes,
    resting_bytes,
    root_waits,
    runtime_bytes,
)
from fivefold.planner.space import Integers, Rows, Space, Which
from fivefold.planner.sums import (
    Edges,
    UnitSeconds,
    Work,
    busiest,
    crowded,
    durations,
    edges_of,
    least_span,
    passes,
    transfer_seconds,
)

AT_ONCE = 2**17  # elements of an array, so that it fits in a processor's cache
SPANS_AT_ONCE = 256  # pipelines run together: each keeps its state after as many rounds as it has ranks


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds of `rows`. `needs`: total bytes of the fullest rank. `at_least`: lower bound of the step's seconds."""

    rows: Rows
    needs: Numbers
    at_least: Numbers

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, which: Which) -> "Bounds":
        return Bounds(self.rows.at(which), self.needs[which], self.at_least[which])


class Alike(NamedTuple):
    """Rows of numbers without duplicates. `values`: the distinct rows. `first`: index of each one's first occurrence.
    `of`: for each row, its index in `values`."""

    values: list[tuple[int, ...]]
    first: Integers
    of: Integers


def distinct(*columns: Integers | NDArray[np.bool_]) -> Alike:
    """Deduplicate rows, given as columns of non-negative integers."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max()) + 1) + column
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    values = zip(*(column[first].tolist() for column in columns), strict=True)
    return Alike(list(values), first, of)


@dataclass(eq=False)
class Bounding:
    """Prices of a space as arrays."""

    space: Space
    _shards: list[RankShards] = field(init=False, default_factory=list)
    _resting: dict[tuple[Content, bool], dict[tuple[int, ...], Numbers]] = field(init=False, default_factory=dict)
    _edges: dict[tuple[int, int, int, Content], tuple[float, ...]] = field(init=False, default_factory=dict)

    def of(self, rows: Rows, most: float = np.inf) -> Bounds:
        """Compute bounds in chunks, to keep arrays small. Layouts that need more than `most` bytes take forever."""
        size = max(1, AT_ONCE // (rows.pipeline.stages))
        stages = self.space.prices.stages(rows.pipeline)
        parts = [self._of(rows.at(slice(start, start + size)), stages, most) for start in range(0, len(rows), size)]
        needs, at_least = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Bounds(rows, needs, at_least)

    # ---- look-ups ----------------------------------------------------------------------------------------------------

    @cached_property
    def work(self) -> Work:
        """Work of each micro batch: [number in `Space.works`, part]."""
        return Work.of([prices for _, _, prices in self.space.works])

    @cached_property
    def logits(self) -> Numbers:
        return np.array([float(prices.logits) for _, _, prices in self.space.works])

    @cached_property
    def shards(self) -> Integers:
        """Number in `_shards` of each place."""
        numbers: dict[int, int] = {}
        found = []
        for place in self.space.places:
            shards = self.space.prices.shards(place)
            if id(shards) not in numbers:
                numbers[id(shards)] = len(self._shards)
                self._shards.append(shards)
            found.append(numbers[id(shards)])
        return np.array(found)

    @cached_property
    def sent(self) -> UnitSeconds:
        """Seconds of FSDP's collectives: [number in `_shards`, part]."""
        assert len(self.shards), "there are places"
        return UnitSeconds.of(self._shards)

    @cached_property
    def replicas(self) -> Integers:
        """Data-parallel replicas of each place."""
        return np.array([place.dp_replicate for place in self.space.places])

    @cached_property
    def runtime(self) -> Numbers:
        """Bytes outside tensors, for each place."""
        chip, prices = self.space.prices.cluster.chip, self.space.prices
        return np.array([runtime_bytes(chip, prices.grid(place)) for place in self.space.places])

    def resting(self, rows: Rows, contents: Sequence[Content]) -> Numbers:
        """[layout, content, moment]: bytes that do not depend on the micro batch. The last entry is no moment, but the
        most unreduced gradients at any moment."""
        alike = distinct(self.shards[rows.place], rows.zero)
        found = [self._rest(content, rows.pipeline, alike.values) for content in contents]
        return np.array(found).swapaxes(0, 1)[alike.of]

    def _rest(self, content: Content, pipeline: Layout, keys: Sequence[tuple[int, ...]]) -> list[Numbers]:
        """Resting bytes for each (number in `_shards`, ZeRO stage)."""
        waits = root_waits(self._shards[0], content, pipeline)  # any shards: an embedding is tied in all or in none
        known = self._resting.setdefault((content, waits), {})
        for key in keys:
            if key not in known:
                number, zero = key
                items = resting_bytes(self.space.prices, self._shards[number], content, zero, waits=waits).values()
                waiting = max(kinds[WAITING] for kinds in items)
                known[key] = np.array([*(float(sum(kinds.values())) for kinds in items), waiting])
        return [known[key] for key in keys]

    def edges(self, places: Integers, contents: Sequence[Content]) -> Edges:
        """[layout, content]: seconds spent once a step."""
        alike = distinct(self.shards[places], self.replicas[places])
        found = [[self._edge(int(places[row]), content) for content in contents] for row in alike.first]
        return Edges(*np.moveaxis(np.array(found)[alike.of], -1, 0))

    def _edge(self, place: int, content: Content) -> tuple[float, ...]:
        layout = self.space.places[place]
        key = int(self.shards[place]), layout.dp_replicate, layout.pp, content
        if key not in self._edges:
            edges = edges_of(self.space.prices, self._shards[key[0]], content, layout)
            self._edges[key] = tuple(float(getattr(edges, number.name)) for number in fields(edges))
        return self._edges[key]

    def in_flight(self, rows: Rows) -> StagesInFlight:
        """[layout, stage]: micro batches in flight."""
        alike, layers = distinct(rows.micro_batches), self.space.prices.stages(rows.pipeline).sizes
        found = [stages_in_flight(rows.pipeline, count, layers) for (count,) in alike.values]
        return StagesInFlight(
            *(np.stack([getattr(bounds, name) for bounds in found])[alike.of] for name in _names(StagesInFlight))
        )

    def gathers(self, rows: Rows) -> Gathers:
        """[layout, stage]: gathers and reductions of FSDP."""
        of_places = np.array([[shards.stage(zero) for zero in range(4)] for shards in self._shards])[self.shards]
        alike = distinct(of_places[rows.place, rows.zero], rows.micro_batches)
        found = [gathers(rows.pipeline, count, zero) for zero, count in alike.values]
        return Gathers(*(np.stack([getattr(bounds, name) for bounds in found])[alike.of] for name in _names(Gathers)))

    @cached_method
    def transfer(self, pp: int) -> Numbers:
        """Seconds to send hidden states between pipeline ranks, for each micro batch of `Space.works`."""
        return np.array([transfer_seconds(self.space.prices, sent, pp) for _, _, sent in self.space.works])

    # ---- computations ------------------------------------------------------------------------------------------------

    def _of(self, rows: Rows, stages: Stages, most: float) -> tuple[Numbers, Numbers]:
        """Bytes of the fullest rank, and the lower bound of seconds."""
        needs = self._needs(rows, stages)
        fitting, at_least = needs <= most, np.full(len(rows), np.inf)
        if fitting.any():
            at_least[fitting] = self._least(rows.at(fitting), stages)
        return needs, at_least

    def _least(self, rows: Rows, stages: Stages) -> Numbers:
        forward, backward = self._passes(rows, stages)
        left, transfer = self.in_flight(rows).left, self.transfer(rows.pp)[rows.work]
        splits = rows.pipeline.schedule.splits_backward
        slots = durations(forward, backward, self.work.at(rows.work), stages)
        least = least_span(slots, stages, left, rows.micro_batches, transfer, splits_backward=splits)
        crowding = self.space.prices.cluster.crowding if rows.pp > 1 else 1.0
        return least / crowding + self._after(rows, stages, forward, backward)

    def _needs(self, rows: Rows, stages: Stages) -> Numbers:
        traits, resting = self.space.prices.traits, self.resting(rows, stages.distinct)
        tensors = (resting[..., :-1] + self._moving(rows, stages)).max(axis=-1)
        tensors += matmul_bytes(self.space.prices.cluster)
        reserved = tensors * traits.slack + traits.kept_back * resting[..., -1]
        found: Numbers = reserved.max(axis=-1) + self.runtime[rows.place]
        return found

    def _moving(self, rows: Rows, stages: Stages) -> Numbers:
        """[layout, content, moment]: bytes that depend on the micro batch, the most over the ranks with that content.
        Layouts with equal micro batches share them."""
        alike = distinct(rows.work, rows.micro_batches)
        own = rows.at(alike.first)
        in_flight = in_flight_bytes(self.work.at(own.work), stages, self.in_flight(own), self.logits[own.work])
        moments = moving_bytes(self.space.prices.cluster.chip, in_flight)
        by_rank = np.stack([sum(items.values()) for items in moments.values()], axis=-1)
        ranks = [[other == content for other in stages.contents] for content in stages.distinct]
        found: Numbers = np.stack([by_rank[:, own].max(axis=1) for own in ranks], axis=1)[alike.of]
        return found

    def _passes(self, rows: Rows, stages: Stages) -> tuple[Numbers, Numbers]:
        work, sent = self.work.at(rows.work), self.sent.at(self.shards[rows.place])
        return passes(work, sent, stages, self.gathers(rows), self.space.prices.traits)

    def _after(self, rows: Rows, stages: Stages, forward: Numbers, backward: Numbers) -> Numbers:
        """Seconds of the busiest rank outside the passes."""
        prices, rank = self.space.prices, busiest(forward, backward, stages)
        each = np.arange(len(rows), dtype=np.int64)
        content = np.array([stages.distinct.index(content) for content in stages.contents])[rank]
        edges = self.edges(rows.place, stages.distinct).at((each, content))
        own = (backward @ stages.ranks.T)[each, rank] * prices.traits.overlaps
        return edges.update + edges.seconds(own) + prices.world_seconds + prices.traits.step_seconds

    def seconds(self, rows: Rows) -> Numbers:
        """Seconds of a step, running the pipeline slot by slot. Numbers of micro batches may differ by whole rounds."""
        pipeline, stages = rows.pipeline, self.space.prices.stages(rows.pipeline)
        forward, backward = self._passes(rows, stages)
        of_kind = durations(forward, backward, self.work.at(rows.work), stages)
        transfer = self.transfer(rows.pp)[rows.work]
        timings = np.stack([*np.concatenate(list(of_kind.values()), axis=1).T, transfer, rows.micro_batches])
        differ, inverse = np.unique(timings, axis=1, return_inverse=True)
        pieces = np.array_split(differ, -(-differ.shape[1] // SPANS_AT_ONCE), axis=1)
        found = np.concatenate([_spans(pipeline, tuple(of_kind), piece) for piece in pieces])
        crowding = self.space.prices.cluster.crowding if rows.pp > 1 else 1.0
        together = crowded(found[inverse.reshape(-1)], forward, backward, rows.micro_batches, rows.pp, crowding)
        return together + self._after(rows, stages, forward, backward)


def _spans(pipeline: Layout, kinds: Sequence[Kind], timings: Numbers) -> Numbers:
    """`span` of columns: slot durations by kind and stage, transfer seconds, and micro batches."""
    seconds = dict(zip(kinds, np.split(timings[:-2], len(kinds)), strict=True))
    return span(pipeline, timings[-1].astype(int), seconds, timings[-2])


def _names(record: type) -> list[str]:
    return [attribute.name for attribute in fields(record)]
