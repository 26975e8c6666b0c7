"""How micro batches pass the stages of a pipeline: how many are in flight, how often FSDP gathers, how long all take.
No torch.

Every schedule comes to do the same for each round of micro batches. So a step of many rounds is told from one of a few:
what is counted in the last of these rounds is counted as often as there are more, and a round is run until it takes as
long as the one before it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import takewhile
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from fivefold.core.layout import Layout
from fivefold.core.schedule import Kind, SchedulePlan, Slot
from fivefold.parallel.fsdp.unshards import of_slots
from fivefold.parallel.memory import under_way

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]
Durations = Mapping[Kind, Numbers]  # [stage, layout]
KINDS: tuple[Kind, ...] = get_args(Kind)
STEADY = 1e-13  # of the time so far, by which what is equal may differ


@lru_cache(maxsize=256)
def schedule_plan(pipeline: Layout, micro_batches: int) -> SchedulePlan:
    """Of a layout that says its pipeline alone. It keeps what it has computed."""
    return pipeline.schedule_plan(micro_batches)


def rounds_beyond(pipeline: Layout, micro_batches: int) -> tuple[int, int]:
    """Micro batches of a round, and how many rounds there are beyond the first ones, which a schedule needs to come to
    do the same: 2 pp micro batches, and whole rounds.

    Of 4 ranks and 64 micro batches, 4 and 14.
    """
    of_round = schedule_plan(pipeline, micro_batches).of_round
    return of_round, max(0, (micro_batches - 2 * pipeline.pp) // of_round)


# ---- counts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InFlight:
    """Micro batches of each stage that wait for their backward, as `UnderWay` counts them. `left`: gradients of weights
    that its rank computes after its last other slot."""

    most: Numbers
    at_loss: Numbers
    later: Numbers
    later_at_loss: Numbers
    left: Numbers


@lru_cache(maxsize=16384)
def in_flight(pipeline: Layout, micro_batches: int, layers: tuple[int, ...]) -> InFlight:
    """Of a pipeline. `layers`: of each stage."""
    of_round, beyond = rounds_beyond(pipeline, micro_batches)
    if beyond:
        return in_flight(pipeline, micro_batches - beyond * of_round, layers)
    most, at_loss, later, later_at_loss, left = np.zeros((5, pipeline.stages))
    for order in schedule_plan(pipeline, micro_batches).orders:
        of = under_way(order, layers)
        for stage in of.most:
            most[stage], at_loss[stage] = of.most[stage], of.at_loss[stage]
            later[stage], later_at_loss[stage] = of.later[stage], of.later_at_loss[stage]
        for slot in takewhile(lambda slot: slot.kind == "W", reversed(order)):
            left[slot.stage] += 1
    return InFlight(most, at_loss, later, later_at_loss, left)


@dataclass(frozen=True, eq=False)
class Gathers:
    """How often FSDP gathers a unit of each stage in a forward and in a backward, and reduces it: as a mean over micro
    batches."""

    forward: Numbers
    backward: Numbers
    reductions: Numbers


@lru_cache(maxsize=16384)
def gathers(pipeline: Layout, micro_batches: int, zero: int) -> Gathers:
    """Of a pipeline under a ZeRO stage. Of whole backwards, FSDP does the same in every stage as without a pipeline."""
    alone = pipeline if pipeline.schedule.splits_backward else Layout()
    of_round, beyond = rounds_beyond(alone, micro_batches)
    shown = micro_batches - max(0, beyond - 1) * of_round
    times = _times(alone, shown, zero)
    if shown < micro_batches:
        times = times + (times - _times(alone, shown - of_round, zero)) * (beyond - 1)
    return Gathers(*np.broadcast_to(times / micro_batches, (3, pipeline.stages)))


@lru_cache(maxsize=16384)
def _times(pipeline: Layout, micro_batches: int, zero: int) -> Numbers:
    """[forward, backward, reductions; stage]: how often FSDP gathers and reduces a unit that one stage uses."""
    plan, found = schedule_plan(pipeline, micro_batches), np.zeros((3, pipeline.stages))
    for order in plan.orders:
        own = tuple(dict.fromkeys(slot.stage for slot in order))
        users = {str(stage): frozenset((stage,)) for stage in own}
        for stage, each in of_slots(order, users, micro_batches, own, zero).items():
            found[:, int(stage)] = each.forward, each.backward, each.reductions
    return found


# ---- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Level:
    """Slots of different ranks that do not wait for each other. Arrays, one number for each slot.

    Times of ends have places: first those when each rank is free, then those that are known before the part, then one
    for each slot. `before`: the place of what the rank did last. `sent`: of the slot whose result comes from another
    rank; `before` where none does, and `hops` is then 0, else 1. `took`: the row of its duration.
    """

    before: Integers
    sent: Integers
    hops: Numbers
    took: Integers


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a schedule. `keeps`: the places of what is known behind it."""

    levels: tuple[Level, ...]
    keeps: Integers

    def run(self, seconds: Numbers, transfer: Numbers, known: Numbers) -> Numbers:
        """[place, layout]: when each slot has ended that is known behind the part, of those known before it.
        `seconds`: [kind and stage, layout]."""
        slots = sum(len(level.took) for level in self.levels)
        ends, done = np.concatenate((known, np.empty((slots, known.shape[1])))), len(known)
        for level in self.levels:
            start = np.maximum(ends[level.before], ends[level.sent] + level.hops * transfer)
            ends[done : done + len(start)] = start + seconds[level.took]
            done += len(start)
        return ends[self.keeps]


def span(pipeline: Layout, micro_batches: Integers, seconds: Durations, transfer: Numbers) -> Numbers:
    """[layout]: seconds from the first slot to the end of the last.

    `seconds`: [stage, layout] of a slot of each kind; `transfer`: [layout] of what is sent between ranks. Numbers of
    micro batches differ by whole rounds beyond the first ones.
    """
    of_round, beyond = rounds_beyond(pipeline, int(micro_batches.max()))
    first = int(micro_batches.max()) - beyond * of_round
    of_slot = np.concatenate([seconds[kind] for kind in KINDS])

    def run(part: Part, known: Numbers) -> Numbers:
        return part.run(of_slot, transfer, known)

    ends = np.zeros((pipeline.pp, len(transfer)))
    if not beyond:
        ends = run(_whole(pipeline, first), ends)
    else:
        begin, middle, end = _parts(pipeline, first, of_round)
        rounds = (micro_batches - first) // of_round
        looks = max(1, pipeline.pp // of_round)
        ends = run(end, _after(rounds, run(begin, ends), partial(run, middle), pipeline.pp, looks))
    found: Numbers = ends[: pipeline.pp].max(axis=0)
    return found


def _after(
    rounds: Integers, known: Numbers, of_round: Callable[[Numbers], Numbers], longest: int, looks: int
) -> Numbers:
    """[place, layout]: what is known after so many rounds of each layout, of what was known before them.

    A round soon finds what another found some rounds before, all later by as much: then all later ones do. Such a
    period has one round or several: of 1F1B as many as there are ranks, `longest`, where the slowest way round the
    pipeline has as many micro batches on it. It is looked for every `looks` rounds.
    """
    states, found = deque([known], maxlen=longest + 1), known.copy()
    for done in range(1, int(rounds.max()) + 1):
        states.append(of_round(states[-1]))
        found = np.where(rounds == done, states[-1], found)
        if done % looks == 0:
            period, grown = _periods(states)
            if np.all((period > 0) | (rounds <= done)):
                periods, more = np.divmod(np.maximum(rounds - done, 0), np.maximum(period, 1))
                kept = np.stack(states)[more - period - 1, :, np.arange(len(rounds))].T
                return np.where(rounds > done, kept + (periods + 1) * grown, found)
    return found


def _periods(states: Sequence[Numbers]) -> tuple[Integers, Numbers]:
    """[layout]: the rounds of its period, 0 where there is none yet; how much later each period ends than the one
    before. `states`: behind the last rounds."""
    *before, now = states
    grown = now - np.stack(before[::-1])
    least, most = grown.min(axis=1), grown.max(axis=1)
    is_alike = most - least <= STEADY * now.max(axis=0)
    shortest = is_alike.argmax(axis=0)
    each = np.arange(len(shortest))
    return np.where(is_alike[shortest, each], shortest + 1, 0), most[shortest, each]


@lru_cache(maxsize=256)
def _whole(pipeline: Layout, micro_batches: int) -> Part:
    """A step."""
    plan = schedule_plan(pipeline, micro_batches)
    levels, _, last = _levels(plan, plan.orders)
    return Part(levels, np.array(last))


@lru_cache(maxsize=256)
def _parts(pipeline: Layout, first: int, of_round: int) -> tuple[Part, Part, Part]:
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
    of_begin, places, last = _levels(more, begin)
    needed = {more.sent(slot) for order in (*middle, *end) for slot in order}
    known = tuple(slot for slot in places if slot in needed)
    around, after, last_of_round = _levels(more, middle, known)
    to_end, _, last_of_all = _levels(more, end, known)
    again = [after[_later(slot, of_round)] for slot in known]
    return (
        Part(of_begin, np.array([*last, *(places[slot] for slot in known)])),
        Part(around, np.array([*last_of_round, *again])),
        Part(to_end, np.array(last_of_all)),
    )


def _later(slot: Slot, micro_batches: int) -> Slot:
    return Slot(slot.stage, slot.kind, slot.micro_batch + micro_batches)


def _levels(
    plan: SchedulePlan, orders: Sequence[Sequence[Slot]], known: Sequence[Slot] = ()
) -> tuple[tuple[Level, ...], dict[Slot, int], list[int]]:
    """The slots of all ranks as levels, the place of each that another rank may wait for, and that of each rank's last
    one. `orders`: of each rank those that are asked. `known`: slots that came before."""
    ranks, places = plan.ranks, {slot: plan.ranks + number for number, slot in enumerate(known)}
    last, count, levels = list(range(ranks)), ranks + len(known), list[Level]()
    left = {rank: [(slot, plan.sent(slot)) for slot in reversed(order)] for rank, order in enumerate(orders) if order}
    while left:
        ready = [rank for rank, slots in left.items() if (need := slots[-1][1]) is None or need in places]
        assert ready, f"{plan} waits for itself"
        level, before = [left[rank].pop() for rank in ready], [last[rank] for rank in ready]
        sent = [each if need is None else places[need] for each, (_, need) in zip(before, level, strict=True)]
        hops = [[float(need is not None)] for _, need in level]
        took = [KINDS.index(slot.kind) * plan.stages + slot.stage for slot, _ in level]
        levels.append(Level(np.array(before), np.array(sent), np.array(hops), np.array(took)))
        for rank, (slot, _) in zip(ready, level, strict=True):
            places[slot._replace(kind="I") if slot.kind == "B" else slot] = last[rank] = count
            count += 1
            if not left[rank]:
                del left[rank]
    return tuple(levels), places, last
