"""Which ranks the launcher takes for frozen, by their beats: a launcher that was itself stopped has missed none."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fivefold.launch import failure, watch
from fivefold.launch.watch import Beat, BeatWatch
from fivefold.training.watchdog import Moves

PATIENCE = 10.0


class Machine:
    """Two ranks, a clock, and what the system says of both processes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.cpu, self.state = [0.0, 0.0, 0.0], ["S", "S", "S"]  # the last: of the process that forks
        self.beats = [Beat(str(folder), rank) for rank in (0, 1)]
        # The clock of the day is set back at every look.
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: -self.now, sleep=lambda _: None)
        monkeypatch.setattr(watch, "time", clock)
        monkeypatch.setattr(watch, "_state", lambda pid: (self.state[pid], self.cpu[pid]))
        self.watch = BeatWatch(
            folder, cast(Any, SimpleNamespace(ids=[0, 1], running=[0, 1], server=2, first=0)), PATIENCE
        )

    def frozen_after(self, looks: int, each: Callable[[], None], seconds: float = 2.0) -> set[int]:
        """The ranks that are taken for frozen after so many looks; `each`: what happens before a look."""
        for _ in range(looks):
            each()
            self.now += seconds
            self.watch.found_frozen()
        return set(self.watch._frozen)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(tmp_path, monkeypatch)
    for beat in found.beats:
        beat.write(still=0.0, waits=False)
    return found


def test_a_rank_without_a_beat_is_frozen(machine: Machine) -> None:
    assert machine.frozen_after(6, lambda: machine.beats[0].write(still=0.0, waits=False)) == set()
    assert machine.frozen_after(1, lambda: machine.beats[0].write(still=0.0, waits=False)) == {1}


def test_each_beat_begins_the_wait_anew(machine: Machine) -> None:
    for _ in range(3):  # eight seconds each
        machine.beats[1].write(still=0.0, waits=False)
        assert machine.frozen_after(4, lambda: machine.beats[0].write(still=0.0, waits=False)) == set()


def test_one_that_computes_is_not(machine: Machine) -> None:
    def computes() -> None:
        machine.cpu = [machine.cpu[0] + 1.0, machine.cpu[1] + 0.1, 0.0]

    assert machine.frozen_after(9, computes) == {1}  # a twentieth of a core is no work


def test_one_that_has_said_its_last_word_may_take_its_time(machine: Machine) -> None:
    machine.beats[1].end()
    assert machine.frozen_after(50, lambda: machine.beats[0].write(still=0.0, waits=False)) == set()


def test_a_launcher_that_was_stopped_has_missed_no_beat(machine: Machine) -> None:
    assert machine.frozen_after(3, lambda: None, seconds=10_000.0) == set()


def test_one_that_waits_for_another_is_not_frozen_and_all_that_wait_for_each_other_are(machine: Machine) -> None:
    def beat(still: float) -> None:
        machine.beats[0].write(still=99.0, waits=True)
        machine.beats[1].write(still=still, waits=True)

    assert machine.frozen_after(9, lambda: beat(0.0)) == set()
    assert machine.frozen_after(1, lambda: beat(99.0)) == {0, 1}


def test_ranks_that_stand_still_and_wait_for_no_other_are_not_frozen(machine: Machine) -> None:
    """Each may compile."""
    still = [lambda beat=beat: beat.write(still=99.0, waits=False) for beat in machine.beats]
    assert machine.frozen_after(9, lambda: [each() for each in still]) == set()


@pytest.mark.parametrize(("process", "state", "why"), [(2, "T", ": its process is stopped (SIGSTOP)"), (1, "Z", "")])
def test_what_forks_the_ranks_is_frozen_where_it_is_stopped_or_tells_of_no_end(
    process: int, state: str, why: str, machine: Machine
) -> None:
    def beat() -> None:
        machine.beats[0].write(still=0.0, waits=False)
        if machine.state[1] != "Z":
            machine.beats[1].write(still=0.0, waits=False)

    for _ in range(2):  # eight seconds each
        machine.state[process] = state
        assert machine.frozen_after(4, beat) == set() and machine.watch.server == ""
        machine.state[process] = "S"
        assert machine.frozen_after(1, beat) == set()
    machine.state[process] = state
    assert machine.frozen_after(6, beat) == set() and machine.watch.found_frozen()
    assert machine.watch.server == f"the forking process gave no sign for 10 s{why}"


# ---- whether a process moves, seen from a thread of it --------------------------------------------------------------


def still_while(work: Callable[[], None], looks: int = 5, seconds: float = 0.5) -> float:
    """What a thread sees that looks every `seconds`, as it is told, while this thread waits for it."""
    moves = Moves()

    def look() -> None:
        for _ in range(looks):
            work()
            moves.look(seconds)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join()
    return moves.still


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_the_work_of_the_one_who_looks_does_not_count() -> None:
    assert still_while(lambda: busy(0.08)) == 4 * 0.5


def test_a_thread_that_nobody_waits_for_does_not_count() -> None:
    ended = threading.Event()

    def wander() -> None:
        while not ended.is_set():
            time.sleep(0.001)
            ended.wait(0.001)

    threading.Thread(target=wander, daemon=True).start()
    assert still_while(lambda: time.sleep(0.005), looks=9) == 8 * 0.5
    ended.set()


def test_a_thread_that_goes_from_place_to_place_moves() -> None:
    turn = threading.Barrier(2)

    def walk() -> None:
        with suppress(threading.BrokenBarrierError):
            while True:
                turn.wait()
                turn.wait()

    walker = threading.Thread(target=walk)  # somebody waits for it
    walker.start()
    try:
        assert still_while(turn.wait, looks=7) <= 0.5
    finally:
        turn.abort()
        walker.join()


def test_waiting_for_the_network_moves() -> None:
    """Its clients end that themselves."""
    there, scope = threading.Event(), {"__name__": "fsspec.implementations.http"}
    exec("def fetch(there): there.wait()", scope)
    client = threading.Thread(target=cast(Any, scope["fetch"]), args=(there,))
    client.start()
    try:
        assert still_while(lambda: time.sleep(0.005)) == 0
    finally:
        there.set()
        client.join()


# ---- the first cause ------------------------------------------------------------------------------------------------


def test_a_failure_before_a_hang_is_the_cause_and_a_user_s_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earliest, whatever becomes of the clock of the day; whoever stands still afterwards waited for it."""
    ticks = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: next(ticks), time=lambda: -next(ticks))
    monkeypatch.setattr(failure, "time", clock)
    stood_still = type("StoodStill", (Exception,), {})
    failure.leave_failure(tmp_path, 2, ValueError("the cause"))
    failure.leave_failure(tmp_path, 0, RuntimeError("the group broke"))
    failure.leave_failure(tmp_path, 1, stood_still("for 2 s"))
    assert [each["rank"] for each in failure.failures(tmp_path)] == [2, 0, 1]
    failure.leave_failure(tmp_path, 3, failure.UserError("train.jsonl:3 has no text"))
    assert failure.failures(tmp_path)[0]["rank"] == 3
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
