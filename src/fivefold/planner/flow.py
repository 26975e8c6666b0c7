"""How micro batches pass the stages of a pipeline: how many are in flight, how often FSDP gathers, how long all take.
No torch.

Every schedule comes to do the same for each round of micro batches. So a step of many rounds is told from one of a few:
what is counted in the last of these rounds is counted as often as there are more, and a round is run until it takes as
long as the one before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core.layout import Layout
from fivefold.core.schedule import Kind, SchedulePlan, Slot, Walked, walked
from fivefold.parallel.memory import under_way
from fivefold.parallel.unshards import of_slots

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]
Seconds = Any  # of one layout a number, of many an array
Durations = Mapping[Kind, Sequence[Seconds]]
STEADY = 1e-12  # of a round's time, by which the next one may differ


@lru_cache(maxsize=256)
def schedule_plan(pipeline: Layout, micro_batches: int) -> SchedulePlan:
    """Of a layout that says its pipeline alone. It keeps what it has computed."""
    return SchedulePlan.of(pipeline, micro_batches)


@lru_cache(maxsize=4096)
def _order(pipeline: Layout, micro_batches: int, rank: int) -> tuple[Slot, ...]:
    """The slots of one rank."""
    plan = schedule_plan(pipeline, micro_batches)
    return tuple(plan.record.order(plan, rank))


def rounds_beyond(pipeline: Layout, micro_batches: int) -> tuple[int, int]:
    """Micro batches of a round, and how many rounds there are beyond the first ones, which a schedule needs to come to
    do the same: 2 pp micro batches, and whole rounds.

    Of 4 ranks and 64 micro batches, 4 and 14.
    """
    of_round = schedule_plan(pipeline, micro_batches).of_round
    return of_round, max(0, (micro_batches - 2 * pipeline.pp) // of_round)


# ---- what is counted -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Flow:
    """How micro batches pass a pipeline's stages.

    `in_flight`, `at_loss`, `later`, `later_at_loss`: of each stage, those that wait for their backward (`UnderWay`).
    `forward`, `backward`, `reductions`: how often FSDP gathers a unit of each stage in a forward and in a backward, and
    reduces it: as a mean over micro batches. `left`: of each stage, the gradients of weights that its rank computes
    after its last other slot.
    """

    in_flight: Numbers
    at_loss: Numbers
    later: Numbers
    later_at_loss: Numbers
    forward: Numbers
    backward: Numbers
    reductions: Numbers
    left: Numbers


@lru_cache(maxsize=16384)
def flow(pipeline: Layout, micro_batches: int, layers: tuple[int, ...]) -> Flow:
    """Of a pipeline, and its ZeRO stage. `layers`: of each stage."""
    alone = replace(pipeline, zero=3)
    of_round, beyond = rounds_beyond(alone, micro_batches)
    shown = micro_batches - max(0, beyond - 1) * of_round
    times = _times(alone, shown, pipeline.zero)
    if shown < micro_batches:
        times = times + (times - _times(alone, shown - of_round, pipeline.zero)) * (beyond - 1)
    forward, backward, reductions = times / micro_batches
    in_flight, at_loss, later, later_at_loss, left = _in_flight(alone, micro_batches - beyond * of_round, layers)
    return Flow(in_flight, at_loss, later, later_at_loss, forward, backward, reductions, left)


@lru_cache(maxsize=4096)
def _in_flight(pipeline: Layout, count: int, layers: tuple[int, ...]) -> Numbers:
    """Of each stage: micro batches in flight, as `UnderWay` has them; gradients of weights that are left to the end."""
    found = np.zeros((5, pipeline.stages))
    for rank in range(pipeline.pp):
        order = _order(pipeline, count, rank)
        counts = under_way(order, layers)
        for numbers, of in zip(found, (counts.most, counts.at_loss, counts.later, counts.later_at_loss), strict=False):
            numbers[list(of)] = list(of.values())
        for slot in takewhile(lambda slot: slot.kind == "W", reversed(order)):
            found[-1, slot.stage] += 1
    return found


@lru_cache(maxsize=16384)
def _times(pipeline: Layout, micro_batches: int, zero: int) -> Numbers:
    """[forward, backward, reductions; stage]: how often FSDP gathers and reduces a unit that one stage uses."""
    plan, found = schedule_plan(pipeline, micro_batches), np.zeros((3, pipeline.stages))
    is_alike = not pipeline.schedule.splits_backward  # of whole backwards, FSDP does the same in every stage
    for rank in range(1 if is_alike else pipeline.pp):
        own = tuple(stage for stage in range(plan.stages) if plan.rank_of(stage) == rank)
        users = {str(stage): frozenset((stage,)) for stage in (own[:1] if is_alike else own)}
        times = of_slots(_order(pipeline, micro_batches, rank), users, micro_batches, own, zero)
        for stage, each in times.items():
            found[:, int(stage)] = each.forward, each.backward, each.reductions
    return np.repeat(found[:, :1], pipeline.stages, axis=1) if is_alike else found


# ---- how long all take -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a schedule. `slots`: each behind those that it needs; they name what they need by its place in what is
    known before the part, and behind it in the part itself. `keeps`: places of what the next part knows."""

    slots: Walked
    keeps: tuple[int, ...] = ()

    def run(self, seconds: Durations, transfer: Seconds, state: Sequence[Seconds], ranks: int) -> list[Seconds]:
        """The state behind the part, of the state before it: when each rank is free, and when each slot has ended that
        is known."""
        larger = np.maximum if isinstance(transfer, np.ndarray) else max
        free, ended = list(state[:ranks]), list(state[ranks:])
        for rank, slot, needs in self.slots:
            start = free[rank]
            for need, is_sent in needs:
                start = larger(start, ended[need] + transfer if is_sent else ended[need])
            free[rank] = start + seconds[slot[1]][slot[0]]
            ended.append(free[rank])
        return free + [ended[place] for place in self.keeps]


def span(pipeline: Layout, micro_batches: Integers | int, seconds: Durations, transfer: Seconds) -> Seconds:
    """Seconds from the first slot to the end of the last, of one layout (numbers) or of many (arrays).

    `seconds`: of a slot of each kind, by stage; `transfer`: of what is sent between ranks. Numbers of micro batches of
    many layouts differ by whole rounds beyond the first ones.
    """
    of_round, beyond = rounds_beyond(pipeline, int(np.max(micro_batches)))
    first = int(np.max(micro_batches)) - beyond * of_round
    rounds, ranks = (np.asarray(micro_batches) - first) // of_round, pipeline.pp
    if not beyond:
        whole = Part(schedule_plan(pipeline, first).walk)
        return _last(whole.run(seconds, transfer, [transfer * 0] * ranks, ranks))
    begin, middle, end = parts(pipeline, first, of_round)
    state = begin.run(seconds, transfer, [transfer * 0] * ranks, ranks)
    found = np.array(state)
    for done in range(1, beyond + 1):
        before, state = np.array(state), middle.run(seconds, transfer, state, ranks)
        grown = np.array(state) - before
        is_steady = np.ptp(grown, axis=0) <= STEADY * grown[0] * done
        left = np.where(is_steady, rounds - done, 0)
        found = np.where(rounds >= done, np.array(state) + left * grown, found)
        if np.all(is_steady | (rounds <= done)):
            break
    return _last(end.run(seconds, transfer, list(found) if found.ndim > 1 else found.tolist(), ranks))


def _last(free: Sequence[Seconds]) -> Seconds:
    found: Seconds = np.max(free, axis=0)
    return found


@lru_cache(maxsize=256)
def parts(pipeline: Layout, first: int, of_round: int) -> tuple[Part, Part, Part]:
    """The beginning of every step of `first` micro batches and whole rounds, a round, and the end.

    The slots of a rank in a step with one round more are the same up to a place; there they have the slots of a round
    besides. Behind it the same slots come as without, of later micro batches.
    """
    fewer, more = schedule_plan(pipeline, first), schedule_plan(pipeline, first + of_round)
    begin, middle, end = list[Sequence[Slot]](), list[Sequence[Slot]](), list[Sequence[Slot]]()
    for short, long in zip(fewer.orders, more.orders, strict=True):
        cut = next((place for place, slot in enumerate(short) if slot != long[place]), len(short))
        back = len(long) - len(short) + cut
        assert [_later(slot, of_round) for slot in short[cut:]] == list(long[back:]), f"{more} has no rounds"
        begin.append(long[:cut])
        middle.append(long[cut:back])
        end.append(short[cut:])
    walk, places = walked(more, begin)
    needed = {need for orders in (middle, end) for order in orders for slot in order for need in more.needs(slot)}
    known = sorted((slot for slot in needed if slot in places), key=lambda slot: places[slot])
    keeps = tuple(places[slot] for slot in known)
    around, after = walked(more, middle, known)
    again = tuple(after[_later(slot, of_round)] for slot in known)
    return Part(walk, keeps), Part(around, again), Part(walked(more, end, known)[0])


def _later(slot: Slot, micro_batches: int) -> Slot:
    return Slot(slot.stage, slot.kind, slot.micro_batch + micro_batches)
