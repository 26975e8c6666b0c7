"""The pipeline's schedules as data: torch's own orders, nothing that waits for itself, the gaps of the closed forms."""

import json
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torchs

from fivefold.core.errors import UserError, refuse
from fivefold.core.model_limits import ModelLimits
from fivefold.core.schedule import SCHEDULES as RECORDS
from fivefold.core.schedule import SchedulePlan, Slot, Transfer, balanced
from fivefold.parallel.layout import Layout
from fivefold.parallel.legality import violations

# Each with every number of stages a rank; of those that take any number, the two fewest.
SCHEDULES = [
    (name, virtual)
    for name, record in RECORDS.items()
    for virtual in range(record.stages[0], (record.stages[1] or record.stages[0] + 1) + 1)
]
PLANS = [SchedulePlan(name, p, v, m) for name, v in SCHEDULES for p in (2, 3, 4, 8) for m in (2 * p, 3 * p, 8 * p)]


def test_every_stage_has_every_micro_batch_once_each_way(subtests: pytest.Subtests) -> None:
    for plan in PLANS:
        with subtests.test(msg=str(plan)):
            counted = Counter(slot for order in plan.orders for slot in order)
            assert set(counted.values()) == {1}
            for stage in range(plan.stages):
                for mb in range(plan.micro_batches):
                    assert counted[Slot(stage, "F", mb)] == 1
                    backward = [counted[Slot(stage, kind, mb)] for kind in ("B", "I", "W")]
                    assert backward in ([1, 0, 0], [0, 1, 1])
            for rank, order in enumerate(plan.orders):
                assert {plan.rank_of(slot.stage) for slot in order} == {rank}


def test_two_ranks_have_the_transfers_between_them_in_the_same_order(subtests: pytest.Subtests) -> None:
    """Else two ranks would wait for each other on a device whose transfers go one after the other."""
    for plan in PLANS:
        with subtests.test(msg=str(plan)):
            for rank, actions in enumerate(plan.actions):
                for peer in range(plan.ranks):
                    mine = [_wire(t) for t in actions if isinstance(t, Transfer) and t.peer == peer]
                    theirs = [
                        _wire(t, turn=True) for t in plan.actions[peer] if isinstance(t, Transfer) and t.peer == rank
                    ]
                    assert mine == theirs
                assert tuple(each for each in actions if isinstance(each, Slot)) == plan.orders[rank]
                _check_received_before_use(plan, rank, actions)


def _wire(transfer: Transfer, *, turn: bool = False) -> tuple[Any, ...]:
    way = {"send": "recv", "recv": "send"}[transfer.way] if turn else transfer.way
    return way, transfer.of, transfer.stage, transfer.micro_batch


def _check_received_before_use(plan: SchedulePlan, rank: int, actions: tuple[Any, ...]) -> None:
    seen: set[Any] = set()
    for action in actions:
        if isinstance(action, Transfer) and action.way == "recv":
            seen.add((action.of, action.stage, action.micro_batch))
        if isinstance(action, Slot) and action.kind in "FBI":
            before = action.stage - 1 if action.kind == "F" else action.stage + 1
            if 0 <= before < plan.stages and plan.rank_of(before) != rank:
                assert ("F" if action.kind == "F" else "B", action.stage, action.micro_batch) in seen


def test_orders_are_those_of_torch(subtests: pytest.Subtests) -> None:
    classes: dict[str, Any] = {
        "interleaved": torchs.ScheduleInterleaved1F1B, "zb": torchs.ScheduleInterleavedZeroBubble,
        "zbv": torchs.ScheduleZBVZeroBubble, "dualpipev": torchs.ScheduleDualPipeV,
    }  # fmt: skip
    for plan in [plan for plan in PLANS if plan.schedule in classes]:
        with subtests.test(msg=str(plan)):
            rounds = max(1, plan.micro_batches // plan.ranks)
            for rank, order in enumerate(plan.orders):
                schedule = SimpleNamespace(
                    pp_group_size=plan.ranks, n_local_stages=plan.virtual, _n_microbatches=plan.micro_batches,
                    rank=rank, num_stages=plan.stages, number_of_rounds=rounds,
                    microbatches_per_round=plan.micro_batches // rounds,
                )  # fmt: skip
                actions = classes[plan.schedule]._calculate_single_rank_operations(schedule, rank)
                assert order == tuple(_flat(actions))


def _flat(actions: Any) -> Any:
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    for action in actions:
        if action is not None and action.sub_actions:
            yield from _flat(action.sub_actions)
        elif action is not None:
            yield Slot(action.stage_index, kinds[action.computation_type.name], action.microbatch_index)  # type: ignore[arg-type]


def test_simulated_gaps_are_those_of_the_closed_form(subtests: pytest.Subtests) -> None:
    for name, (ranks, micro_batches) in product(
        ["gpipe", "1f1b", "interleaved"], [(2, 2), (2, 8), (4, 4), (4, 16), (8, 32)]
    ):
        with subtests.test(name=name, ranks=ranks, micro_batches=micro_batches):
            plan = SchedulePlan(name, ranks, 2 if name == "interleaved" else 1, micro_batches)
            assert plan.simulate().bubble == pytest.approx(plan.ideal_bubble)


def test_what_a_schedule_is_for() -> None:
    """Each has fewer gaps than the one before; 1F1B keeps fewer micro batches than GPipe."""
    gaps = [SchedulePlan(name, 4, v, 16).simulate().bubble for name, v in (("1f1b", 1), ("interleaved", 2), ("zbv", 2))]
    assert gaps == sorted(gaps, reverse=True) and len(set(gaps)) == 3
    assert [_most_kept(SchedulePlan(name, 4, 1, 16).orders[0]) for name in ("gpipe", "1f1b")] == [16, 4]


def _most_kept(order: tuple[Slot, ...]) -> int:
    kept = [0]
    for slot in order:
        kept.append(kept[-1] + {"F": 1, "B": -1}[slot.kind])
    return max(kept)


def test_a_timeline_is_json_and_transfers_take_time() -> None:
    plan = SchedulePlan("1f1b", 2, 1, 2)
    quick, slow = plan.simulate(), plan.simulate(lambda slot: 2.0 if slot.kind == "F" else 3.0, transfer=0.5)
    assert json.loads(json.dumps(quick.to_json()))["slots"][0] == {
        "rank": 0, "stage": 0, "kind": "F", "micro_batch": 0, "start": 0.0, "end": 1.0, "waited": 0.0,
    }  # fmt: skip
    assert slow.span == 2 + 0.5 + 2 + 3 + 2 + 3 + 0.5 + 3  # by hand: rank 1 has no gap but its first


# ---- what is refused, and what is chosen -----------------------------------------------------------------------------


def test_refusals(subtests: pytest.Subtests) -> None:
    cases = [
        ("pp4", None, 3, "pp 4 x 1 stages a rank = 4, but the model has 3 layers"),
        ("pp2+zbv", None, 3, "pp 2 x 2 stages a rank = 4, but the model has 3 layers"),
        ("pp2+v2", None, None, "pp_schedule 1f1b has one stage a rank"),
        ("single+v2", None, None, "pp_virtual 2 needs a pipeline"),
        ("pp2+interleaved", None, None, "interleaved has two stages a rank or more"),
        ("pp2+zbv+v3", None, None, "zbv has two stages a rank, not 3"),
        ("pp2+dualpipev", 3, None, "dualpipev needs 2 x pp = 4 micro batches or more, and a step has 3"),
        ("pp4+interleaved+v2", 9, None, "in rounds of pp = 4, and a step has 9"),
        ("pp2+split1-2-3", None, None, "names 3 stages, and there are 2"),
        ("pp2+split3-4", None, 8, "has 7 layers, but the model has 8"),
    ]
    for text, micro_batches, layers, said in cases:
        with subtests.test(msg=text), pytest.raises(UserError, match=said):
            refuse(violations(Layout.parse(text), ModelLimits(layers=layers), micro_batches=micro_batches))


def test_what_a_proof_needs_is_accepted(subtests: pytest.Subtests) -> None:
    for text in ["single", "pp2", "pp3+zbv", "pp2+dualpipev", "pp4+interleaved+v2", "pp4+zb"]:
        with subtests.test(msg=text):
            layout = Layout.parse(text)
            fewest, unit = layout.micro_batch_unit
            for count in range(1, 40):
                if count >= fewest and count % unit == 0:
                    assert not violations(layout, ModelLimits(layers=layout.fewest_layers), micro_batches=count)


def test_stages_are_balanced_with_the_head_counted() -> None:
    assert balanced((1.0,) * 8, 4) == (2, 2, 2, 2)
    assert balanced((1.0,) * 12, 4, last=2.2) == (3, 4, 4, 1)
    assert balanced((3.0, 1.0, 1.0, 1.0, 5.0), 3) == (1, 3, 1)
    assert balanced((1.0,) * 3, 3, last=50.0) == (1, 1, 1)  # every stage has a layer
    assert Layout.parse("pp3+split4-3-5").split == (4, 3, 5)


def test_the_guide_names_every_schedule() -> None:
    guide = Path("docs/explain/pipeline.md").read_text()
    for name, record in RECORDS.items():
        assert f"| `{name}`" in guide and record.help in guide and record.source in guide
