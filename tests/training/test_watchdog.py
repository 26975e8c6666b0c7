"""The flight recorder, read rightly: entries as NCCL's and gloo's recorders write them, healthy and hung."""

import json
from typing import Any

import pytest

from fivefold.torch_internals import flight_recorder
from fivefold.training import watchdog

NOW = 1_000.0


def entry(
    name: str, *, group: str = "mesh_cp", age: float = 1.0, done: bool = True, number: int = 1,
    finished: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A collective that was enqueued `age` seconds ago, and seen to be done `finished` seconds ago."""
    is_p2p = name.endswith((":send", ":recv"))
    return {
        "pg_id": sum(map(ord, group)), "process_group": ["7", group], "profiling_name": name, "is_p2p": is_p2p,
        "retired": done, "state": "completed" if done else "scheduled", "input_sizes": [[8, 3]], "op_id": number,
        "time_created_ns": int((NOW - age) * 1e9),
        "time_discovered_completed_ns": 0 if finished is None else int((NOW - finished) * 1e9),
    }  # fmt: skip


def batch(*, age: float, done: bool, number: int) -> list[dict[str, Any]]:
    """A ring's exchange: the send and the receive never retire, what ends the batch does."""
    names = ("nccl:send", "nccl:recv")
    parts = [entry(name, age=age, done=False, number=number) for name in names]
    return [*parts, entry("nccl:coalesced", age=age, done=done, number=number)]


def look(*looks: tuple[float, list[dict[str, Any]]], timeout: float = 30.0) -> watchdog.Waits:
    """What is known after looks at a recorder, each so many seconds after the one before."""
    there: list[dict[str, Any]] = []

    def source(collectives: bool, only_active: bool) -> str:
        return json.dumps({"entries": [one for one in there if not (only_active and one["retired"])]})

    waits = watchdog.Waits(source, timeout)
    for seconds, found in looks:
        there[:] = [{"record_id": number} | one for number, one in enumerate(found)]
        waits.look(seconds)
    return waits


RING = [one for number in range(50) for one in batch(age=900 - number, done=True, number=number)]


def test_a_healthy_ring_waits_for_nothing() -> None:
    """Its sends and receives are older than any timeout, and will never be said to be done."""
    later = entry("nccl:all_reduce", group="default_pg", done=True)
    for found in (RING, [*RING, later]):
        assert watchdog.under_way(found) == []
        waits = look(*[(10.0, found)] * 9)
        assert not waits.are_stuck and not waits.are_under_way


def test_a_hung_ring_is_seen_at_the_batch_that_hangs() -> None:
    found = [*RING, *batch(age=300, done=False, number=77), *batch(age=299, done=False, number=78)]
    assert [(each["profiling_name"], each["op_id"]) for each in watchdog.under_way(found)] == [
        ("nccl:coalesced", 77),
        ("nccl:coalesced", 78),
    ]
    fresh = [[*found, entry("nccl:all_reduce", done=False) | {"record_id": 1000 + at}] for at in range(5)]
    assert look(*[(10.0, each) for each in fresh]).are_stuck, "others come and go behind it"
    assert not look(*[(10.0, found)] * 4).are_stuck  # it is seen for 30 seconds, not for more
    assert look(*[(10.0, found)] * 5).are_stuck


def test_a_receive_of_a_pipeline_that_never_comes_is_seen() -> None:
    """It is in no batch, and stands for itself; batches of another group do not hide it."""
    hung = entry("nccl:recv", group="mesh_pp", age=400, done=False, number=5)
    assert watchdog.under_way([*RING[:6], hung, *RING[6:]]) == [hung]


def test_the_first_that_is_not_done_is_told_not_the_last() -> None:
    """The CPU has enqueued a thousand behind it."""
    hung = entry("nccl:_reduce_scatter_base", group="mesh_dp_shard", age=90, done=False, number=41)
    behind = [entry("nccl:all_reduce", group="mesh_tp", age=80, done=False, number=n) for n in range(1000)]
    found = [*RING, hung, *behind]
    words = "waits in: _reduce_scatter_base [[8, 3]] of group mesh_dp_shard, number 41, under way"
    assert watchdog.in_words(found) == words


def test_a_long_step_that_goes_on_is_no_hang() -> None:
    """What was enqueued long ago has waited only since the one before it was done."""
    looks = []
    for at in range(9):
        done = [entry("nccl:all_reduce", age=700, finished=100 - at, number=at)]
        looks.append((10.0, [*done, entry("nccl:all_reduce", age=699, done=False, number=99)]))
    assert not look(*looks).are_stuck
    assert look(*looks, *[looks[-1]] * 4).are_stuck


def test_a_process_that_was_stopped_has_not_waited() -> None:
    """Nor has one whose clock was set: entries are as old as the looks that saw them."""
    assert not look((1.0, [entry("gloo:all_reduce", age=5000, done=False)]), timeout=30).are_stuck


def test_a_rank_that_still_writes_may_be_waited_for() -> None:
    waits = look(*[(10.0, [entry("gloo:gather", group="checkpoint", age=5000, done=False)])] * 9)
    assert waits.are_under_way and not waits.are_stuck


def test_nothing_or_all_done_is_told() -> None:
    assert watchdog.in_words([]) == "none was begun"
    assert watchdog.in_words([entry("gloo:barrier", group="default_pg", number=9)]).startswith("last: barrier")


def test_all_entries_are_read_only_where_some_are_old() -> None:
    asked = []

    def source(collectives: bool, only_active: bool) -> str:
        asked.append(only_active)
        return json.dumps({"entries": [entry("nccl:all_reduce", done=False) | {"record_id": 1}]})

    waits = watchdog.Waits(source, timeout=30)
    for _ in range(3):
        waits.look(2.0)
    assert asked == [True, True, True, False]


def test_each_backend_has_its_own_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C import _distributed_c10d

    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", lambda *_: '{"entries": [1]}', raising=False)
    of_nccl, of_gloo = flight_recorder("nccl"), flight_recorder("gloo")
    assert of_nccl is not None and of_gloo is not None
    assert watchdog.entries(of_nccl) == [1]
    assert 1 not in watchdog.entries(of_gloo)
