"""A step of many micro batches is told from one of a few: what is counted, and how long it takes, is that of all."""

from dataclasses import astuple, fields
from itertools import product

import numpy as np
import pytest

from fivefold.core.schedule import Kind
from fivefold.parallel.fsdp.unshards import of_slots
from fivefold.parallel.layout import Layout
from fivefold.parallel.pipeline.memory import in_flight
from fivefold.planner.flow import Durations, gathers, rounds_beyond, span, stages_in_flight

PIPELINES = [
    "pp2", "pp3", "pp7", "pp4+gpipe", "pp4+interleaved+v2", "pp3+interleaved+v4", "pp3+zb", "pp2+zb+v2", "pp4+zb+v2",
    "pp3+zbv", "pp4+zbv", "pp2+dualpipev", "pp4+dualpipev",
]  # fmt: skip
STAGES = ((1, False), (2, False), (3, False), (3, True))  # of ZeRO, and whether there are secondary copies
COUNTS = (4, 5, 8, 12, 14, 33, 60, 64, 200)


def legal(text: str) -> list[tuple[Layout, int]]:
    layout = Layout.parse(text)
    return [(layout, count) for count in COUNTS if not any(layout.step_violations(count))]


def timings(layout: Layout, number: int, *, alike: bool) -> tuple[Durations, np.ndarray]:
    """Of `number` layouts; all stages take as long, or each its own time."""
    rng, kinds = np.random.default_rng(0), tuple[Kind, ...]("FBIW")
    stages = [1 if alike else layout.stages, number]
    found = {kind: np.broadcast_to(rng.uniform(1, 2, stages), (layout.stages, number)) for kind in kinds}
    return {**found, "B": found["I"] + found["W"]}, rng.uniform(0, 0.5, number)


@pytest.mark.full  # fifteen seconds of arithmetic
def test_a_span_is_that_of_all_slots(subtests: pytest.Subtests) -> None:
    """Of one layout, and of layouts with different numbers of micro batches at once."""
    for text, alike in product(PIPELINES, [True, False]):
        with subtests.test(text=text, alike=alike):
            for layout, count in legal(text):
                seconds, transfer = timings(layout, 5, alike=alike)
                of_round, beyond = rounds_beyond(layout, count)
                counts = np.array([count - min(number, beyond) * of_round for number in range(5)])
                together = span(layout, counts, seconds, transfer)
                for number in range(0, 5, 2):
                    alone = {kind: each[:, [number]] for kind, each in seconds.items()}
                    whole = layout.schedule_plan(int(counts[number])).simulate(
                        lambda slot, alone=alone: float(alone[slot.kind][slot.stage, 0]), transfer=transfer[number]
                    )
                    found = span(layout, counts[[number]], alone, transfer[[number]])
                    assert found == pytest.approx(whole.span, 1e-11)
                    assert together[number] == pytest.approx(whole.span, 1e-11), (text, counts, number)


def test_many_micro_batches_are_counted_like_a_few(subtests: pytest.Subtests) -> None:
    """Micro batches in flight, and gathers and reductions, are those of the whole schedule."""
    for text in ["single", *PIPELINES]:
        with subtests.test(msg=text):
            for (zero, copies), (layout, count) in product(STAGES, legal(text)):
                layers = (2,) * layout.stages
                plan, held = layout.schedule_plan(count), stages_in_flight(layout, count, layers)
                own = gathers(layout, count, zero, has_copies=copies)
                for rank, order in enumerate(plan.orders):
                    stages = tuple(stage for stage in range(plan.stages) if plan.rank_of(stage) == rank)
                    users = {str(stage): frozenset((stage,)) for stage in stages}
                    times = of_slots(order, users, count, stages, zero, users if copies else ())
                    of = in_flight(order, layers)
                    for stage, each in ((stage, times[str(stage)]) for stage in of.most):
                        at = zero, copies, count, stage
                        waits = held.most[stage], held.at_loss[stage], held.later[stage], held.later_at_loss[stage]
                        assert waits == (of.most[stage], of.at_loss[stage], of.later[stage], of.later_at_loss[stage])
                        found = [getattr(own, field.name)[stage] * count for field in fields(own)]
                        assert found == pytest.approx(astuple(each)), at
