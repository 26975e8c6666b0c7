"""`plan`: every legal layout of a cluster, ranked. No torch.

All layouts are bounded from below at once (`bounds.py`). Those that may be among the best are run slot by slot. The
simplest of those near the fastest comes first. A set of degrees is shown once, with the best of its options. Tight
layouts are left out if others fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fivefold.core.errors import UserError
from fivefold.parallel import legality
from fivefold.parallel.layout import MOST_RANKS, Layout
from fivefold.planner.bounds import Bounding, Bounds
from fivefold.planner.estimate import TIGHT, Estimate, PricedStep, Workload
from fivefold.planner.flow import rounds_beyond
from fivefold.planner.parts import Numbers
from fivefold.planner.price import PriceList
from fivefold.planner.space import Integers, Rows, Space
from fivefold.planner.sums import ROUNDING

ALIKE = 1.005  # two numbers whose ratio is smaller count as equal
FAR = 1.5  # a layout that takes this many times as long is not shown
NEAR = 0.02  # two layouts whose times are this close are tied: the simpler one comes first


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a search. `best`: estimates, best first, of different degrees; sets no faster, leaner or simpler than
    another are left out. `fastest`: of all that may be in
    `best`. `legal`: layouts that can run. `fitting`: those that fit. `closest`: the smallest, if none fits."""

    best: tuple[Estimate, ...]
    legal: int
    fitting: int
    closest: Estimate | None = None
    fastest: Estimate | None = None

    @property
    def faster(self) -> Estimate | None:
        """The fastest layout, if its step is shorter than that of the first."""
        fastest = self.fastest
        return fastest if fastest and fastest.step_seconds * ALIKE < self.best[0].step_seconds else None


def _way_out(space: Space, given: Mapping[str, Any]) -> str | None:
    """Say what keeps every layout with the fields `given` from running, whatever the batch, and what to write instead;
    None if these fields are possible."""
    layout = Layout(**{"dp_shard": -1, **given})
    wrong = legality.violations(layout, space.limits, world=space.prices.cluster.world)
    return f"{wrong[0].error.what}: {wrong[0].error.fix}" if wrong else None


def simplicity(layout: Layout) -> tuple[int, ...]:
    """Sort key, smaller for simpler layouts: fewer kinds of parallelism besides data parallelism, then fewer options in
    its text, replicas included; then fewer pipeline stages, and smaller cp, tp and ep; then the milder options.

    `shard8.tp8` is simpler than `shard16.tp4+full`, and that than `shard8.tp4.pp2`.
    """
    return (
        _axes(layout), str(layout).count("+") + (layout.dp_replicate > 1), *_degrees(layout), layout.dp_replicate,
        layout.recompute != "none", layout.expert_tp, layout.schedule.splits_backward, layout.stages_per_rank,
        layout.cp_method != "auto", 3 - layout.zero, layout.micro_batch_size,
    )  # fmt: skip


def search(prices: PriceList, workload: Workload, *, top: int = 10, given: Mapping[str, Any] | None = None) -> Found:
    """Find the best layouts, among those with the fields `given` of `Layout`. Raises `UserError` if none is legal."""
    space = Space(prices, workload, given or {})
    legal = sum(map(len, space.rows))
    if not legal:
        rows, world = workload.global_batch_size, prices.cluster.world
        asked = "".join(f" with {name} {value}" for name, value in (given or {}).items())
        raise UserError(
            f"no layout of {prices.cluster.text}{asked} runs {prices.facts.model_class} with global_batch_size {rows}",
            fix=_way_out(space, given or {})
            or f"each device gets rows of its own with global_batch_size {-(-rows // world) * world}",
        )
    bounding = Bounding(space)
    memory = prices.cluster.chip.memory_bytes
    bounded = [bounding.of(rows, memory) for rows in space.rows]
    fitting = [bounds.at(bounds.needs <= memory) for bounds in bounded]
    easily = [bounds.at(bounds.needs <= memory * TIGHT) for bounds in fitting]
    sets, fastest = _Candidates(bounding, easily if any(map(len, easily)) else fitting).best(top)
    return Found(
        best=tuple(PricedStep(prices, one.layout, workload).estimate() for one in sets),
        fastest=PricedStep(prices, fastest, workload).estimate() if fastest else None,
        legal=legal,
        fitting=sum(map(len, fitting)),
        closest=None if sets else _closest(space, bounded),
    )


def _closest(space: Space, bounded: Sequence[Bounds]) -> Estimate:
    least = min(bounded, key=lambda bounds: bounds.needs.min())
    layout = space.layout(least.rows, int(least.needs.argmin()))
    return PricedStep(space.prices, layout, space.workload).estimate()


@dataclass(frozen=True)
class Chosen:
    """The best layout of a set of degrees: the simplest of those about as fast as the fastest. `needs`: bytes of a
    device."""

    layout: Layout
    seconds: float
    needs: float

    @cached_property
    def simplicity(self) -> tuple[int, ...]:
        return simplicity(self.layout)

    def says_nothing_beside(self, other: "Chosen") -> bool:
        """True if another one has simpler degrees, is as fast and needs no more memory. Example: shard2.cp4+mb2 and
        shard4.cp2."""
        is_as_good = other.seconds <= self.seconds * ALIKE and other.needs <= self.needs * ALIKE
        own, others = ((_axes(answer.layout), *_degrees(answer.layout)) for answer in (self, other))
        return is_as_good and others < own


@dataclass(eq=False)
class _Candidates:
    """Layouts that fit, as arrays: `at_least` seconds; `batch`: equal for one pipeline and number of micro batches;
    `set`: equal for the same degrees."""

    bounding: Bounding
    bounds: Sequence[Bounds]

    def __post_init__(self) -> None:
        lengths = [len(bounds) for bounds in self.bounds]
        self.at_least = np.concatenate([bounds.at_least for bounds in self.bounds])
        self.needs = np.concatenate([bounds.needs for bounds in self.bounds])
        self.pipeline = np.repeat(np.arange(len(lengths)), lengths)
        self.number = np.concatenate([np.arange(length) for length in lengths])
        self.batch = np.concatenate([_batches(number, bounds.rows) for number, bounds in enumerate(self.bounds)])
        places, sets = self.bounding.space.places, dict[tuple[int, ...], int]()
        of_place = np.array([sets.setdefault(_degrees(place), len(sets)) for place in places])
        self.set = of_place[np.concatenate([bounds.rows.place for bounds in self.bounds])]

    def layout(self, candidate: int) -> Layout:
        rows = self.bounds[self.pipeline[candidate]].rows
        return self.bounding.space.layout(rows, int(self.number[candidate]))

    def seconds(self, batch: Integers) -> Numbers:
        """Seconds of steps. Without a pipeline the bound is exact."""
        rows = self.bounds[self.pipeline[batch[0]]].rows
        return self.at_least[batch] if rows.pp == 1 else self.bounding.seconds(rows.at(self.number[batch]))

    def best(self, top: int) -> tuple[list[Chosen], Layout | None]:
        """The `top` best sets of degrees, best first; and the fastest layout of all."""
        if not len(self.at_least):
            return [], None
        order = np.lexsort((self.at_least, self.set))
        starts = np.flatnonzero(np.diff(self.set[order], prepend=-1))
        ends, leanest = np.append(starts[1:], len(order)), np.minimum.reduceat(self.needs[order], starts)
        sets, found, fastest = list[_Set](), list[Chosen](), np.inf
        for number in np.argsort(self.at_least[order[starts]], kind="stable"):
            own, shown = order[starts[number] : ends[number]], _ranked(found, fastest)
            least = Chosen(self.layout(int(own[0])), float(self.at_least[own[0]]), float(leanest[number]))
            slowest = max((chosen.seconds for chosen in shown[:top]), default=0.0)
            if (len(shown) >= top and least.seconds > slowest * (1 + NEAR)) or least.seconds > fastest * FAR:
                break
            may_be_first = least.seconds <= fastest * (1 + NEAR)
            if may_be_first or not any(least.says_nothing_beside(other) for other in found):
                sets.append(_Set(self, own))
                fastest = min(fastest, sets[-1].fastest)
                found.append(sets[-1].simplest(fastest))
        found = [own.simplest(fastest) if own.is_near(fastest) else one for own, one in zip(sets, found, strict=True)]
        return _ranked(found, fastest)[:top], min(sets, key=lambda answer: answer.fastest).layout_of_fastest


@dataclass(eq=False)
class _Set:
    """Candidates of the same degrees, `own`, in the order of their bounds. Each is run while it may be the fastest."""

    candidates: _Candidates
    own: Integers

    def __post_init__(self) -> None:
        self.bounds = self.candidates.at_least[self.own] * (1 - ROUNDING)
        self.seconds, self.is_run = np.full(len(self.own), np.inf), np.zeros(len(self.own), dtype=bool)
        while len(left := np.flatnonzero(~self.is_run & (self.bounds < self.fastest))):
            self._run(int(left[0]))

    @property
    def fastest(self) -> float:
        return float(self.seconds.min())

    @property
    def layout_of_fastest(self) -> Layout:
        return self.candidates.layout(int(self.own[self.seconds.argmin()]))

    def is_near(self, fastest: float) -> bool:
        """True if one of them is near the fastest of all."""
        return self.fastest <= fastest * (1 + NEAR)

    def simplest(self, fastest: float) -> Chosen:
        """The simplest of those near the fastest of all; if there are none, of those near the fastest of the set."""
        most = (fastest if self.is_near(fastest) else self.fastest) * (1 + NEAR)
        near = np.flatnonzero(self.bounds <= most)
        layouts = {int(place): self.candidates.layout(int(self.own[place])) for place in near}
        for place in sorted(layouts, key=lambda place: simplicity(layouts[place])):
            if not self.is_run[place]:
                self._run(place)
            if self.seconds[place] <= most:
                needs = float(self.candidates.needs[self.own[place]])
                return Chosen(layouts[place], float(self.seconds[place]), needs)
        raise AssertionError("the fastest is near itself")

    def _run(self, one: int) -> None:
        """Run one, and with it those of its batch that may be near."""
        near = self.bounds <= min(self.fastest, self.bounds[one]) * (1 + NEAR)
        batches = self.candidates.batch[self.own]
        batch = np.flatnonzero(near & ~self.is_run & (batches == batches[one]))
        self.seconds[batch], self.is_run[batch] = self.candidates.seconds(self.own[batch]), True


def _batches(number: int, rows: Rows) -> Integers:
    """Batch of each row of one pipeline, `number`: equal if numbers of micro batches differ by whole rounds, so that
    all are run at once."""
    counts, inverse = np.unique(rows.micro_batches, return_inverse=True)
    firsts = []
    for count in counts.tolist():
        of_round, beyond = rounds_beyond(rows.pipeline, count)
        firsts.append(number * MOST_RANKS**2 + (count - beyond * of_round) * MOST_RANKS + of_round)
    return np.array(firsts)[inverse]


def _axes(layout: Layout) -> int:
    """Number of kinds of parallelism of a layout, besides data parallelism."""
    return sum(degree > 1 for degree in _degrees(layout))


def _degrees(layout: Layout) -> tuple[int, ...]:
    """Degrees that layouts of one set share. The number of replicas within data parallelism is an option."""
    return layout.pp, layout.cp, layout.tp, layout.ep


def _ranked(found: Sequence[Chosen], fastest: float) -> list[Chosen]:
    """Order layouts: those within `NEAR` of `fastest` seconds, the simplest first; then those within it of the fastest
    that is left, and so on. A layout is left out if it `says_nothing_beside` an earlier one."""
    left, order = sorted(found, key=lambda answer: answer.seconds), list[Chosen]()
    while left:
        near = [answer for answer in left if answer.seconds <= fastest * (1 + NEAR)]
        order += sorted(near, key=lambda answer: answer.simplicity)
        left = left[len(near) :]
        fastest = left[0].seconds if left else fastest
    return [answer for at, answer in enumerate(order) if not any(answer.says_nothing_beside(one) for one in order[:at])]
