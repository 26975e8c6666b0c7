"""Collectives over shared memory: their results, beside those of one process; what becomes of a rank that ends; and
who shares memory at all."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.core.errors import UserError
from fivefold.ops.cpu import shared_memory
from tests.ops import transport
from tests.pool import forks, run_ranks
from tests.tiers import put_off

IN_TIME = 60.0  # seconds: these take one or two, also where processes outnumber cores
# Numbers a rank: none, one, a prime, a chunk of 4-byte numbers less one, some chunks more than there are slots.
COUNTS = [0, 1, 2, 127, 10_007, transport.CHUNK // 4 - 1, transport.CHUNK // 4 * 10 + 3]
FLOATS = ("sum", "avg", "max", "min")
TYPES = {
    torch.float32: FLOATS,
    torch.float64: FLOATS,
    torch.bfloat16: FLOATS,
    torch.int64: ("sum", "max", "min"),
    torch.int32: ("sum", "max", "min"),
    torch.float16: (),
    torch.uint8: (),
}

pytestmark = pytest.mark.skipif(bool(shared_memory.lacks()), reason=shared_memory.lacks())


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3, put_off(4)])
def test_every_kind_of_every_size(world: int, dtype: torch.dtype) -> None:
    """Bit for bit those of one process."""
    found = run_ranks(world, transport.all_kinds, dtype, COUNTS, TYPES[dtype], timeout=IN_TIME)
    assert found == [[]] * world


@pytest.mark.full
@pytest.mark.parametrize("scale", [1, 997, 60_000])
@pytest.mark.parametrize("world", [2, 3, put_off(4)])
def test_uneven_all_to_alls(world: int, scale: int) -> None:
    assert run_ranks(world, transport.uneven, scale, timeout=IN_TIME) == [True] * world


@pytest.mark.full
@pytest.mark.parametrize("count", [100, 200_000, 1_500_000])
@pytest.mark.parametrize("world", [2, 3])
def test_many_under_way(world: int, count: int) -> None:
    assert run_ranks(world, transport.asynchronous, count, timeout=IN_TIME) == [[]] * world


@pytest.mark.full
@pytest.mark.parametrize("count", [10, 5_000_000])
def test_opposite_orders_do_not_block(count: int) -> None:
    assert run_ranks(2, transport.crossed, count, timeout=IN_TIME) == [True] * 2


@pytest.mark.full
def test_several_groups_at_once() -> None:
    found = run_ranks(4, transport.several_groups, timeout=IN_TIME)
    for rank, each in enumerate(found):
        neighbour, across = 10 ** (rank ^ 1), 10 ** ((rank + 2) % 4)
        assert each == [float(10**rank + neighbour), float(10**rank + across), 1111.0] * 3


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_tensors_that_lie_apart_or_share_memory(world: int) -> None:
    for found in run_ranks(world, transport.laid_out_otherwise, timeout=IN_TIME):
        assert [name for name, is_right in found.items() if not is_right] == []


@pytest.mark.full
def test_a_nan_reaches_all_ranks() -> None:
    assert all(map(all, run_ranks(3, transport.not_a_number, timeout=IN_TIME)))


@pytest.mark.full
def test_what_gloo_does_still() -> None:
    assert run_ranks(2, transport.left_to_gloo, timeout=IN_TIME) == [[True] * 9] * 2


@pytest.mark.full
@pytest.mark.parametrize("world", [2])
def test_operators_alone_and_compiled(world: int) -> None:
    assert run_ranks(world, transport.operators) == [[True] * 3] * world


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_several_tensors_of_one_operator(world: int) -> None:
    assert run_ranks(world, transport.several_tensors, timeout=IN_TIME) == [[]] * world


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_memory_is_not_reused_too_early(world: int) -> None:
    assert run_ranks(world, transport.in_turns, 30, timeout=IN_TIME) == [True] * world


# ---- who shares memory -----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("why", ["full", "elsewhere", "switch"])
def test_one_rank_that_cannot_leaves_it_to_gloo_for_all(why: str) -> None:
    """No room in /dev/shm, another machine, switched off."""
    assert run_ranks(2, transport.without_segment, why, timeout=IN_TIME) == [[True] * 3] * 2


def test_the_switch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_memory.SWITCH, "gloo")
    assert shared_memory.lacks() == "FIVEFOLD_TRANSPORT is gloo"
    monkeypatch.setenv("FIVEFOLD_TRANSPORT", "GLOO")
    assert shared_memory.lacks() == "FIVEFOLD_TRANSPORT is gloo"
    monkeypatch.setenv("FIVEFOLD_TRANSPORT", "shm")
    with pytest.raises(UserError, match="FIVEFOLD_TRANSPORT=shm is no transport"):
        shared_memory.connect(None)  # type: ignore[arg-type]


def test_a_machine_without_the_folder_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path / "absent")
    assert "absent is not there" in shared_memory.lacks()


@pytest.mark.full
def test_nothing_is_left_behind() -> None:
    before = transport.names()
    run_ranks(2, transport.several_groups_left, timeout=IN_TIME)
    assert not transport.is_left_since(before)


# ---- ranks that end --------------------------------------------------------------------------------------------------


class _Two:
    """Two processes that have met, and what they answer."""

    def __init__(self, body: str, store: str) -> None:
        context = forks()
        self.answers = context.Queue()
        arguments = [(body, rank, store, self.answers) for rank in range(2)]
        self.processes = [context.Process(target=transport.apart, args=each, daemon=True) for each in arguments]
        for process in self.processes:
            process.start()
        assert {self.heard(), self.heard()} == {(0, "ready"), (1, "ready")}

    def heard(self) -> Any:
        return self.answers.get(timeout=30)

    def close(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.fixture
def two(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[_Two]:
    found = _Two(request.param, str(tmp_path / "store"))
    yield found
    found.close()


@pytest.mark.full
@pytest.mark.parametrize("two", ["waits"], indirect=True)
def test_a_rank_that_was_killed_is_named(two: _Two) -> None:
    time.sleep(0.3)
    began = time.monotonic()
    two.processes[1].kill()
    rank, said = two.heard()
    assert rank == 0 and "all_reduce [4] of group" in said and "rank 1 has left" in said
    assert time.monotonic() - began < 5


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("two", ["waits"], indirect=True)
def test_a_signal_ends_a_rank_that_waits(two: _Two, number: int) -> None:
    time.sleep(0.3)
    os.kill(two.processes[0].pid, number)
    two.processes[0].join(5)
    assert two.processes[0].exitcode not in (None, 0)


@pytest.mark.full
@pytest.mark.parametrize("two", ["goes_on"], indirect=True)
def test_a_rank_that_was_stopped_goes_on(two: _Two) -> None:
    os.kill(two.processes[1].pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(two.processes[1].pid, signal.SIGCONT)
    assert {two.heard(), two.heard()} == {(0, "8"), (1, "8")}


@pytest.mark.full
@pytest.mark.parametrize("two", [f"calls_another {what}" for what in transport.UNLIKE], indirect=True)
def test_another_collective_is_named(two: _Two) -> None:
    for rank, said in (two.heard(), two.heard()):
        assert f"rank {1 - rank} calls another collective" in said


@pytest.mark.full
@pytest.mark.parametrize("two", ["is_patient"], indirect=True)
def test_the_timeout_of_a_call_is_kept(two: _Two) -> None:
    rank, said = two.heard()
    assert rank == 0 and "no answer from the other ranks for 0.4 s" in said


@pytest.mark.full
@pytest.mark.parametrize("two", ["is_last"], indirect=True)
def test_what_a_rank_sent_before_it_ended_arrives(two: _Two) -> None:
    assert two.heard() == (0, "16")


@pytest.mark.full
@pytest.mark.parametrize("two", ["is_watched"], indirect=True)
def test_the_watchdog_sees_what_waits(two: _Two) -> None:
    rank, said = two.heard()
    assert rank == 0 and said.startswith("True True waits in: all_reduce [[4]] of group")


@pytest.mark.full
@pytest.mark.parametrize("two", ["averages_integers"], indirect=True)
def test_whole_numbers_have_no_average(two: _Two) -> None:
    assert all("type Float" in said for _, said in (two.heard(), two.heard()))


@pytest.mark.full
@pytest.mark.parametrize("two", ["exchanges_no_such_rows"], indirect=True)
def test_rows_that_a_tensor_has_not_are_refused(two: _Two) -> None:
    assert all("its splits are not those of its tensors" in said for _, said in (two.heard(), two.heard()))


@pytest.mark.full
@pytest.mark.parametrize("two", ["sleeps"], indirect=True)
def test_a_rank_that_was_stopped_has_not_waited_meanwhile(two: _Two) -> None:
    time.sleep(0.3)
    os.kill(two.processes[0].pid, signal.SIGSTOP)
    time.sleep(2)
    os.kill(two.processes[0].pid, signal.SIGCONT)
    assert {two.heard(), two.heard()} == {(0, "done"), (1, "done")}
