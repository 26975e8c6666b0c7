"""Micro batches in the stages of a pipeline: how many are in flight, how often FSDP gathers, how long all take. No
torch.

Schedules become periodic, with a round of micro batches as period. So a few rounds are simulated and extrapolated:
counts of the last round are multiplied, and rounds are run until one takes as long as the one before.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from itertools import takewhile
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from fivefold.core.schedule import Kind, SchedulePlan, Slot
from fivefold.parallel.fsdp.unshards import of_slots
from fivefold.parallel.layout import Layout
from fivefold.parallel.pipeline.memory import in_flight

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]
Durations = Mapping[Kind, Numbers]  # [stage, layout]
KINDS: tuple[Kind, ...] = get_args(Kind)
STEADY = 1e-13  # relative to the time so far: smaller differences count as none


@lru_cache(maxsize=256)
def schedule_plan(pipeline: Layout, micro_batches: int) -> SchedulePlan:
    """Plan of a layout with only its pipeline set. Cached, since the plan keeps what it has computed."""
    return pipeline.schedule_plan(micro_batches)


def rounds_beyond(pipeline: Layout, micro_batches: int) -> tuple[int, int]:
    """Micro batches of a round, and the number of rounds beyond the first ones. A schedule is periodic after 2 pp micro
    batches, extended to whole rounds.

    4 ranks and 64 micro batches: 4 and 14.
    """
    of_round = schedule_plan(pipeline, micro_batches).of_round
    return of_round, max(0, (micro_batches - 2 * pipeline.pp) // of_round)


# ---- counts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StagesInFlight:
    """Micro batches of each stage that wait for their backward, as `InFlight` counts them. `left`: slots of weight
    gradients that its rank runs after its last other slot."""

    most: Numbers
    at_loss: Numbers
    later: Numbers
    later_at_loss: Numbers
    left: Numbers


@lru_cache(maxsize=16384)
def stages_in_flight(pipeline: Layout, micro_batches: int, layers: tuple[int, ...]) -> StagesInFlight:
    """Count the micro batches in flight of a pipeline. `layers`: of each stage."""
    of_round, beyond = rounds_beyond(pipeline, micro_batches)
    if beyond:
        return stages_in_flight(pipeline, micro_batches - beyond * of_round, layers)
    most, at_loss, later, later_at_loss, left = np.zeros((5, pipeline.stages))
    for order in schedule_plan(pipeline, micro_batches).orders:
        counts = in_flight(order, layers)
        for stage in counts.most:
            most[stage], at_loss[stage] = counts.most[stage], counts.at_loss[stage]
            later[stage], later_at_loss[stage] = counts.later[stage], counts.later_at_loss[stage]
        for slot in takewhile(lambda slot: slot.kind == "W", reversed(order)):
            left[slot.stage] += 1
    return StagesInFlight(most, at_loss, later, later_at_loss, left)


@dataclass(frozen=True, eq=False)
class Gathers:
    """How often FSDP gathers a unit of each stage in a forward and in a backward, and reduces it: means over micro
    batches. `near_...`: gathers from secondary copies."""

    forward: Numbers
    backward: Numbers
    reductions: Numbers
    near_forward: Numbers
    near_backward: Numbers


@lru_cache(maxsize=16384)
def gathers(pipeline: Layout, micro_batches: int, zero: int, *, has_copies: bool = False) -> Gathers:
    """Count for a pipeline under a ZeRO stage. Unless backwards are split, FSDP does the same as without a pipeline."""
    alone = pipeline if pipeline.schedule.splits_backward else Layout()
    of_round, beyond = rounds_beyond(alone, micro_batches)
    shown = micro_batches - max(0, beyond - 1) * of_round
    times = _times(alone, shown, zero, has_copies=has_copies)
    if shown < micro_batches:
        before = _times(alone, shown - of_round, zero, has_copies=has_copies)
        times = times + (times - before) * (beyond - 1)
    return Gathers(*np.broadcast_to(times / micro_batches, (len(times), pipeline.stages)))


@lru_cache(maxsize=16384)
def _times(pipeline: Layout, micro_batches: int, zero: int, *, has_copies: bool) -> Numbers:
    """[number of `Unshards`; stage]: how often FSDP gathers and reduces a unit that one stage uses."""
    plan, found = schedule_plan(pipeline, micro_batches), np.zeros((5, pipeline.stages))
    for order in plan.orders:
        own = tuple(dict.fromkeys(slot.stage for slot in order))
        users = {str(stage): frozenset((stage,)) for stage in own}
        for stage, times in of_slots(order, users, micro_batches, own, zero, users if has_copies else ()).items():
            found[:, int(stage)] = astuple(times)
    return found


# ---- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Level:
    """Slots of different ranks that do not wait for each other, as arrays with one entry for each slot.

    End times have places: first those when each rank is free, then those known before the part, then one for each slot.
    `before`: the place of the rank's previous slot. `sent`: the place of the slot on another rank whose result it
    needs; `before` if there is none, and `hops` is then 0, else 1. `took`: the row of its duration.
    """

    before: Integers
    sent: Integers
    hops: Numbers
    took: Integers


@dataclass(frozen=True, eq=False)
class SchedulePart:
    """A part of a schedule. `keeps`: the places that are known after it."""

    levels: tuple[Level, ...]
    keeps: Integers

    def run(self, seconds: Numbers, transfer: Numbers, known: Numbers) -> Numbers:
        """[place, layout]: end times that are known after the part, from those known before it. `seconds`: [kind and
        stage, layout]."""
        slots = sum(len(level.took) for level in self.levels)
        ends, done = np.concatenate((known, np.empty((slots, known.shape[1])))), len(known)
        for level in self.levels:
            start = np.maximum(ends[level.before], ends[level.sent] + level.hops * transfer)
            ends[done : done + len(start)] = start + seconds[level.took]
            done += len(start)
        return ends[self.keeps]


def span(pipeline: Layout, micro_batches: Integers, seconds: Durations, transfer: Numbers) -> Numbers:
    """[layout]: seconds from the first slot to the end of the last.

    `seconds`: [stage, layout] of a slot of each kind; `transfer`: [layout] of a send between ranks. Numbers of micro
    batches may differ only by whole rounds beyond the first ones.
    """
    of_round, beyond = rounds_beyond(pipeline, int(micro_batches.max()))
    first = int(micro_batches.max()) - beyond * of_round
    of_slot = np.concatenate([seconds[kind] for kind in KINDS])

    def run(part: SchedulePart, known: Numbers) -> Numbers:
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
    """[place, layout]: end times after each layout's number of rounds, from those before them.

    After some rounds the times equal those of an earlier round, all shifted by a constant. From there on they are
    periodic. A period is one round or several: with 1F1B as many as there are ranks, `longest`, if the slowest way
    round the pipeline carries as many micro batches. Looked for every `looks` rounds.
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
    """[layout]: rounds of its period, 0 if there is none yet; and how much later each period ends than the one before.
    `states`: after the last rounds."""
    *before, now = states
    grown = now - np.stack(before[::-1])
    least, most = grown.min(axis=1), grown.max(axis=1)
    is_alike = most - least <= STEADY * now.max(axis=0)
    shortest = is_alike.argmax(axis=0)
    each = np.arange(len(shortest))
    return np.where(is_alike[shortest, each], shortest + 1, 0), most[shortest, each]


@lru_cache(maxsize=256)
def _whole(pipeline: Layout, micro_batches: int) -> SchedulePart:
    """A step as one part."""
    plan = schedule_plan(pipeline, micro_batches)
    levels, _, last = _levels(plan, plan.orders)
    return SchedulePart(levels, np.array(last))


@lru_cache(maxsize=256)
def _parts(pipeline: Layout, first: int, of_round: int) -> tuple[SchedulePart, SchedulePart, SchedulePart]:
    """Parts of any step of `first` micro batches and whole rounds: the beginning, one round, and the end.

    In a step with one more round, a rank's slots are the same up to a place, where the slots of the round are inserted.
    After them come the same slots as without it, for later micro batches.
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
        SchedulePart(of_begin, np.array([*last, *(places[slot] for slot in known)])),
        SchedulePart(around, np.array([*last_of_round, *again])),
        SchedulePart(to_end, np.array(last_of_all)),
    )


def _later(slot: Slot, micro_batches: int) -> Slot:
    return Slot(slot.stage, slot.kind, slot.micro_batch + micro_batches)


def _levels(
    plan: SchedulePlan, orders: Sequence[Sequence[Slot]], known: Sequence[Slot] = ()
) -> tuple[tuple[Level, ...], dict[Slot, int], list[int]]:
    """Group the slots of all ranks into levels. Also returns the place of each slot that another rank may wait for, and
    that of each rank's last one. `orders`: the slots of each rank. `known`: slots that came before."""
    ranks, places = plan.ranks, {slot: plan.ranks + number for number, slot in enumerate(known)}
    last, count, levels = list(range(ranks)), ranks + len(known), list[Level]()
    left = {rank: [(slot, plan.sent(slot)) for slot in reversed(order)] for rank, order in enumerate(orders) if order}
    while left:
        ready = [rank for rank, slots in left.items() if (need := slots[-1][1]) is None or need in places]
        assert ready, f"{plan} waits for itself"
        level, before = [left[rank].pop() for rank in ready], [last[rank] for rank in ready]
        sent = [place if need is None else places[need] for place, (_, need) in zip(before, level, strict=True)]
        hops = [[float(need is not None)] for _, need in level]
        took = [KINDS.index(slot.kind) * plan.stages + slot.stage for slot, _ in level]
        levels.append(Level(np.array(before), np.array(sent), np.array(hops), np.array(took)))
        for rank, (slot, _) in zip(ready, level, strict=True):
            places[slot._replace(kind="I") if slot.kind == "B" else slot] = last[rank] = count
            count += 1
            if not left[rank]:
                del left[rank]
    return tuple(levels), places, last
