"""A pipeline's schedule as data: the slots of every rank in order, when each runs, and what is sent. No torch.

A pipeline runs `stages` groups of layers over `ranks`. Each micro batch goes forward (F) through all stages and back.
The backward of a stage is one slot (B), or two: I computes the gradient of the stage's input, for which the stage
before waits; W computes the gradients of the weights, for which no stage waits.

Each way to order the slots is one `Schedule` record of `SCHEDULES`, at the end of this file. Everything else asks the
record; a new schedule is a function that yields slots, and a record.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
TYPICAL = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # relative duration of a slot


class Slot(NamedTuple):
    """A micro batch on a stage, forward or backward."""

    stage: int
    kind: Kind
    micro_batch: int


# Slots in an order that runs: (rank, slot, ((index of a needed slot, whether its result is sent), ...)).
Walked = tuple[tuple[int, Slot, tuple[tuple[int, bool], ...]], ...]


@dataclass(frozen=True)
class Transfer:
    """A send or receive on this rank: the hidden states for slot F of `stage`, or the gradient for its B."""

    way: Literal["send", "recv"]
    of: Literal["F", "B"]
    stage: int  # the stage that waits for it
    micro_batch: int
    peer: int  # pipeline rank


Action = Slot | Transfer


@dataclass(frozen=True)
class Timed:
    """Time at which a rank ran a slot, in seconds (or in the unit of the durations). `waited`: how long it waited
    before the start for another rank's data."""

    rank: int
    slot: Slot
    start: float
    end: float
    waited: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """All slots of one optimizer step, simulated or measured."""

    ranks: int
    slots: tuple[Timed, ...]

    @property
    def span(self) -> float:
        return max(slot.end for slot in self.slots) - min(slot.start for slot in self.slots)

    @property
    def bubble(self) -> float:
        """Share of the time in which a rank runs no slot, mean over ranks. Waiting for a transfer counts as bubble."""
        busy = sum(slot.end - slot.start for slot in self.slots)
        return 1 - busy / (self.ranks * self.span)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: slots as objects with rank, stage, kind, micro_batch, start, end, waited."""
        slots = [
            {"rank": t.rank, **t.slot._asdict(), "start": t.start, "end": t.end, "waited": t.waited} for t in self.slots
        ]
        return {"ranks": self.ranks, "span": self.span, "bubble": self.bubble, "slots": slots}


@dataclass(frozen=True)
class SchedulePlan:
    """A schedule over `ranks` pipeline ranks with `virtual` stages each and a number of micro batches."""

    schedule: str
    ranks: int
    virtual: int
    micro_batches: int

    @property
    def record(self) -> "Schedule":
        return SCHEDULES[self.schedule]

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    @property
    def of_round(self) -> int:
        """Micro batches of one of the equal rounds, after which every rank repeats its pattern. Interleaved over 4
        ranks: 4 for 8 micro batches, 5 for 10. GPipe: all. The other schedules, and one stage a rank: 1."""
        if self.record.is_one_round:
            return self.micro_batches
        is_interleaved = self.record.in_rounds and self.virtual > 1
        return self.micro_batches // max(1, self.micro_batches // self.ranks) if is_interleaved else 1

    def rank_of(self, stage: int) -> int:
        return self.record.rank_of(stage, self.ranks)

    @cached_property
    def orders(self) -> tuple[tuple[Slot, ...], ...]:
        return tuple(tuple(self.record.order(self, rank)) for rank in range(self.ranks))

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Slots of each rank in order, with the transfers between them.

        Transfers are ordered by the end of their slots under the typical durations. So both ranks of a pair issue the
        transfers between them in the same order, and neither waits for one that the other issues later.
        """
        events: list[tuple[float, int, int, int, Action]] = []
        for number, timed in enumerate(self.simulate().slots):
            events.append((timed.start, 1, number, timed.rank, timed.slot))
            if (given := self._given(timed.slot)) is not None:
                of, stage = given
                peer = self.rank_of(stage)
                if peer != timed.rank:
                    mb = timed.slot.micro_batch
                    events.append((timed.end, 0, number, timed.rank, Transfer("send", of, stage, mb, peer)))
                    events.append((timed.end, 0, number, peer, Transfer("recv", of, stage, mb, timed.rank)))
        events.sort(key=lambda event: event[:3])
        return tuple(tuple(action for *_, on, action in events if on == rank) for rank in range(self.ranks))

    def _given(self, slot: Slot) -> tuple[Literal["F", "B"], int] | None:
        """Slot of another stage that needs this one: (F, next stage) of a forward, (B, stage before) of a backward,
        else None."""
        if slot.kind == "F":
            return ("F", slot.stage + 1) if slot.stage + 1 < self.stages else None
        return ("B", slot.stage - 1) if slot.kind in "BI" and slot.stage else None

    def simulate(self, seconds: Callable[[Slot], float] | None = None, *, transfer: float = 0.0) -> Timeline:
        """Simulate when each slot runs if it takes `seconds(slot)` (default: `TYPICAL`), and a transfer `transfer`."""
        last = seconds or (lambda slot: TYPICAL[slot.kind])
        free, ended, done = [0.0] * self.ranks, list[float](), list[Timed]()
        for rank, slot, needs in self.walk:
            ready = [ended[need] + transfer * is_sent for need, is_sent in needs]
            start = max([free[rank], *ready])
            free[rank] = start + last(slot)
            ended.append(free[rank])
            done.append(Timed(rank, slot, start, free[rank]))
        return Timeline(self.ranks, tuple(done))

    @cached_property
    def walk(self) -> Walked:
        """All slots, each after those that it needs, whatever their durations."""
        return _walked(self)

    def needs(self, slot: Slot) -> list[Slot]:
        """Slots that must end before this one starts. I also represents B."""
        stage, mb = slot.stage, slot.micro_batch
        if slot.kind == "F":
            return [Slot(stage - 1, "F", mb)] if stage else []
        if slot.kind == "W":
            return [Slot(stage, "I", mb)]
        after = [Slot(stage + 1, "I", mb)] if stage + 1 < self.stages else []
        return [Slot(stage, "F", mb), *after]

    def sent(self, slot: Slot) -> Slot | None:
        """Slot of another rank whose result this one waits for, if any. I also represents B."""
        rank = self.rank_of(slot.stage)
        return next((need for need in self.needs(slot) if self.rank_of(need.stage) != rank), None)

    @property
    def ideal_bubble(self) -> float | None:
        """Closed form for backwards of one slot, (p - 1) / (v m + p - 1); None for other schedules and for a V."""
        if self.record.splits_backward or self.record.is_v:
            return None
        return (self.ranks - 1) / (self.virtual * self.micro_batches + self.ranks - 1)


def _walked(plan: SchedulePlan) -> Walked:
    found: list[tuple[int, Slot, tuple[tuple[int, bool], ...]]] = []
    places, at = dict[Slot, int](), [0] * plan.ranks
    while any(at[rank] < len(order) for rank, order in enumerate(plan.orders)):
        before = len(found)
        for rank, order in enumerate(plan.orders):
            while at[rank] < len(order):
                slot = order[at[rank]]
                needed = plan.needs(slot)
                if not all(need in places for need in needed):
                    break
                needs = tuple((places[need], plan.rank_of(need.stage) != rank) for need in needed)
                places[slot] = len(found)
                if slot.kind == "B":  # is both I and W
                    places[Slot(slot.stage, "I", slot.micro_batch)] = places[slot]
                found.append((rank, slot, needs))
                at[rank] += 1
        assert len(found) > before, f"{plan} waits for itself"
    return tuple(found)


# ---- layers into stages ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def balanced(costs: tuple[float, ...], stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage: the cuts of `costs` whose most expensive stage is cheapest, then the most even.

    `first`, `last`: additional cost of the first and the last stage (embedding, head).
    """
    edges = [0.0]
    for cost in costs:
        edges.append(edges[-1] + cost)
    count = len(costs)

    def cost_of(stage: int, start: int, stop: int) -> float:
        return edges[stop] - edges[start] + first * (stage == 0) + last * (stage == stages - 1)

    # best[stop]: (most expensive stage, sum of squares, cuts) of the stages so far that end at layer `stop`
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in range(stage + 1, count - (stages - stage - 1) + 1):
            found[stop] = min(
                (max(dearest, own := cost_of(stage, start, stop)), squares + own * own, (*cuts, stop - start))
                for start, (dearest, squares, cuts) in best.items()
                if start < stop
            )
        best = found
    return best[count][2]


# ---- the order of each schedule --------------------------------------------------------------------------------------


def _gpipe(plan: SchedulePlan, rank: int) -> Iterator[Slot]:
    for kind in ("F", "B"):
        for mb in range(plan.micro_batches):
            yield Slot(rank, kind, mb)


def _rounds(plan: SchedulePlan, rank: int) -> Iterator[Slot]:
    """Slots of 1F1B and of interleaved 1F1B, with whole backwards or with separate I and W (`zb`)."""
    split = plan.record.splits_backward
    total = plan.virtual * plan.micro_batches
    of_round = plan.of_round
    ahead = 2 if plan.virtual > 1 and not split else 1
    warm = min(total, (plan.virtual - 1) * of_round + ahead * (plan.ranks - 1 - rank))
    forward, backward, weights = ([0] * plan.virtual for _ in range(3))

    def slot(kind: Kind, chunk: int, counts: list[int]) -> Slot:
        counts[chunk] += 1
        return Slot(chunk * plan.ranks + rank, kind, counts[chunk] - 1)

    def chunk_back(number: int) -> int:
        return plan.virtual - 1 - number // of_round % plan.virtual

    for op in range(total + warm):
        if op < total:
            yield slot("F", op // of_round % plan.virtual, forward)
        if op >= warm:
            yield slot("I" if split else "B", chunk_back(op - warm), backward)
            if split and op - warm >= rank:
                yield slot("W", chunk_back(op - warm - rank), weights)
    for number in range(max(0, total - rank), total) if split else ():
        yield slot("W", chunk_back(number), weights)


class _V:
    """Slots of a rank's two stages, with their counts: stage 0 on the way down the V, 1 on the way up."""

    def __init__(self, plan: SchedulePlan, rank: int) -> None:
        self.stages = (rank, plan.stages - 1 - rank)
        self.counts = {(chunk, kind): 0 for chunk in (0, 1) for kind in "FIW"}
        self.order: list[Slot] = []
        self.waiting: list[tuple[int, int]] = []  # pending W: (chunk, micro batch)

    def add(self, chunk: int, kind: Kind) -> None:
        counted = "I" if kind == "B" else kind
        mb = self.counts[chunk, counted]
        self.counts[chunk, counted] += 1
        if kind == "B":
            self.counts[chunk, "W"] += 1
        if kind == "I":
            self.waiting.append((chunk, mb))
        self.order.append(Slot(self.stages[chunk], kind, mb))

    def weights(self) -> None:
        """Append the W that has waited longest, if any."""
        if self.waiting:
            chunk, mb = self.waiting.pop(0)
            self.counts[chunk, "W"] += 1
            self.order.append(Slot(self.stages[chunk], "W", mb))


def _zbv(plan: SchedulePlan, rank: int) -> Iterator[Slot]:
    """Order of the ZB-V paper. With fewer than 2 p - 1 micro batches: the order of 2 p - 1 without the missing ones."""
    v, count = _V(plan, rank), max(2 * plan.ranks - 1, plan.micro_batches)
    done = v.counts

    def both(chunk: int) -> None:
        v.add(chunk, "I")
        v.add(chunk, "W")

    for _ in range(2 * (plan.ranks - rank) - 1):
        v.add(0, "F")
    for _ in range(rank):
        v.add(1, "F")
        v.add(0, "F")
    for _ in range(plan.ranks - rank):
        v.add(1, "F")
        both(1)
    while done[1, "F"] < done[0, "F"] or done[0, "F"] < count:
        if done[0, "F"] < count:
            v.add(0, "F")
        both(0)
        v.add(1, "F")
        both(1)
    for _ in range(rank):
        v.add(0, "I")
        v.add(1, "I")
    for _ in range(plan.ranks - rank):
        both(0)
    for chunk in (1, 0):
        while done[chunk, "W"] < done[chunk, "I"]:
            v.add(chunk, "W")
    yield from (slot for slot in v.order if slot.micro_batch < plan.micro_batches)


def _dualpipev(plan: SchedulePlan, rank: int) -> Iterator[Slot]:
    """The eight steps of DeepSeek's DualPipe, cut in half (DualPipeV). Slots that it overlaps run one after another."""
    v, left = _V(plan, rank), plan.ranks - rank - 1
    for _ in range(2 * left):
        v.add(0, "F")
    for _ in range(rank + 1):
        v.add(0, "F")
        v.add(1, "F")
    for _ in range(left):
        v.add(1, "I")
        v.weights()
        v.add(1, "F")
    for _ in range(plan.micro_batches - 2 * plan.ranks + rank + 1):
        for forward, backward in ((0, 1), (1, 0)):
            v.add(forward, "F")
            v.add(backward, "B")
    for _ in range(left):
        v.add(1, "B")
        v.add(1, "F")
        v.add(0, "B")
    apart = False
    for number in range(rank + 1):
        for chunk, turn in ((1, 1), (0, 0)):
            apart = apart or (number == (rank + 1) // 2 and rank % 2 == turn)
            v.add(chunk, "I" if apart else "B")
    for _ in range(left):
        v.weights()
        v.add(0, "I" if apart else "B")
    for _ in range(rank + 1):
        v.weights()
    yield from v.order


# ---- the records -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One way to order the slots of a pipeline, with all its properties.

    `order`: the slots of a rank. `stages`: fewest and most stages of a rank; None: any number. `is_v`: of pp ranks,
    rank r has the stages r and 2 pp - 1 - r; otherwise r, r + pp, r + 2 pp... `in_rounds`: micro batches come in equal
    rounds of about pp. `is_one_round`: no round repeats. `fewest_per_rank`: fewest micro batches of a step, for each
    pipeline rank. `source`: the paper that describes it.
    """

    name: str
    help: str
    source: str
    order: Callable[[SchedulePlan, int], Iterator[Slot]]
    stages: tuple[int, int | None]
    is_v: bool = False
    splits_backward: bool = False  # W and I are separate slots
    in_rounds: bool = False
    is_one_round: bool = False
    fewest_per_rank: int = 0

    def rank_of(self, stage: int, ranks: int) -> int:
        if self.is_v:
            return stage if stage < ranks else 2 * ranks - 1 - stage
        return stage % ranks

    def stages_per_rank(self, virtual: int) -> int:
        """Stages of a rank for a layout's `pp_virtual`: a V always has two."""
        return 2 if self.is_v else virtual

    def fewest(self, ranks: int) -> int:
        return max(1, self.fewest_per_rank * ranks)

    def multiple(self, ranks: int) -> int:
        """Any multiple of this many micro batches comes in equal rounds."""
        return ranks if self.in_rounds else 1

    def takes(self, micro_batches: int, ranks: int) -> bool:
        """True if so many micro batches form equal rounds: over 4 ranks 5, 7 and 8 do, and 9 do not."""
        return not self.in_rounds or micro_batches % max(1, micro_batches // ranks) == 0


SCHEDULES: dict[str, Schedule] = {
    record.name: record
    for record in (
        Schedule(
            name="1f1b", help="one forward, one backward, as early as can be", source="arXiv:1806.03377",
            order=_rounds, stages=(1, 1),
        ),
        Schedule(
            name="gpipe", help="all forward, then all backward", source="arXiv:1811.06965", order=_gpipe, stages=(1, 1),
            is_one_round=True,
        ),
        Schedule(
            name="interleaved", help="1F1B over several stages a rank", source="arXiv:2104.04473", order=_rounds,
            stages=(2, None), in_rounds=True,
        ),
        Schedule(
            name="zb", help="interleaved, with W filling the gaps", source="arXiv:2401.10241", order=_rounds,
            stages=(1, None), splits_backward=True, in_rounds=True,
        ),
        Schedule(
            name="zbv", help="a V without gaps where F, I and W take as long", source="arXiv:2401.10241", order=_zbv,
            stages=(2, 2), is_v=True, splits_backward=True,
        ),
        Schedule(
            name="dualpipev", help="a V with forward and backward side by side", source="arXiv:2412.19437",
            order=_dualpipev, stages=(2, 2), is_v=True, splits_backward=True, fewest_per_rank=2,
        ),
    )
}  # fmt: skip
