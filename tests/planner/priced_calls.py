"""The collectives that the planner prices, to be compared with those of the plan."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fivefold.parallel.collectives import Call
from fivefold.parallel.fsdp.spec import Sends
from fivefold.parallel.fsdp.unshards import Unshards, of_slots
from fivefold.planner.estimate import PricedStep
from fivefold.planner.flow import schedule_plan
from fivefold.planner.parts import Shard, UnitPrice
from fivefold.planner.sums import sum_calls, tied_call


def priced_calls(step: PricedStep, rank: int) -> Iterator[Call]:
    """Priced collectives of a pipeline rank, except those between pipeline ranks. These are the calls of its parts in
    all micro batches, those of its units as often as FSDP gathers and reduces them, and those once a step."""
    content, own = step.stages.contents[rank], tuple(np.flatnonzero(step.stages.ranks[rank]).tolist())
    times, of_rank = _unshards(step, rank, own), step.shards.of(content)
    shards = (*step.shards.layers, step.shards.embedding, Shard())
    for stage in own:
        counts = step.stages.layers[stage].astype(int).tolist()
        for part, shard, count in zip(step.prices.parts, shards, counts, strict=True):
            yield from (replace(call, times=call.times * count * step.micro_batches) for call in part.calls)
            yield from (call for unit in shard.units for call in _counted(step, unit, times[str(stage)], count))
    yield from (call for unit in of_rank[-1][0].units for call in _counted(step, unit, times[""], 1))
    yield from sum_calls(of_rank)
    if (tied := tied_call(step.shards, content, step.layout)) is not None:
        yield tied
    yield from step.price_list.world_calls


def _counted(step: PricedStep, unit: UnitPrice, times: Unshards, count: int) -> Iterator[Call]:
    """Collectives of `count` identical units in a step."""
    counts: dict[Sends, int] = {
        "gather": times.forward + times.backward,
        "near": times.near_forward + times.near_backward,
        "reduce": times.reductions,
        "replicas": int(step.layout.dp_replicate > step.layout.copies_apart),
    }
    for what, calls in unit.calls.items():
        yield from (replace(call, times=counts[what] * count) for call in calls if counts[what])


def _unshards(step: PricedStep, rank: int, own: Sequence[int]) -> dict[str, Unshards]:
    """Unshards of a unit of each stage of a rank, and of the model's own unit, used by the stages at the ends."""
    content = step.stages.contents[rank]
    ends = {own[0]} if content.has_embedding and step.shards.tied else set[int]()
    ends |= {own[-1]} if content.has_head else set()
    users = {str(stage): frozenset((stage,)) for stage in own} | {"": frozenset(ends)}
    order = schedule_plan(step.pipeline, step.micro_batches).orders[rank]
    copied = set(users) - {""} if step.layout.hpz else ()
    return of_slots(order, users, step.micro_batches, own, step.shards.stage(step.layout.zero), copied)
