"""A rank that stands still is named with the place where it does, within the time-out and five seconds."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fivefold.launch import failure
from fivefold.launch.failure import WorkerDied
from fivefold.launch.processes import Workers, keep, scratch_folder
from fivefold.launch.watch import Beat
from fivefold.launch.workers import start_workers
from fivefold.training import watchdog
from fivefold.training.watchdog import Moves
from tests.launch.test_restart import Command, file_of
from tests.launch.test_workers import PATHS, body

TIMEOUT = 2.0


def frozen(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerDied, float]:
    """The error of workers of which one freezes, and the seconds from then until it was known."""
    monkeypatch.setenv("PYTHONPATH", PATHS)
    request = {"device": "cpu", "out": str(folder), "timeout": TIMEOUT}
    with pytest.raises(WorkerDied) as caught, Workers(body(name), count=2) as crew:
        start_workers(crew, request, logs=folder / "logs", patience=TIMEOUT)
    return caught.value, time.monotonic() - float((folder / "froze").read_text())


def stack(folder: Path) -> str:
    return str(json.loads((folder / "logs" / "failure-1.json").read_text())["traceback"])


@pytest.mark.full
def test_a_rank_that_sleeps_in_a_save_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error, seconds = frozen("sleeps_in_a_save", tmp_path, monkeypatch)
    assert error.what.startswith("rank 1 stopped: StoodStill: stood still for 2 s in save (launch/bodies.py:")
    assert "in slumber" in stack(tmp_path)
    assert "rank 0, waits in: " in (error.more or "") and "of group checkpoint" in (error.more or "")
    assert seconds < TIMEOUT + 5


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads the state of processes in /proc")
def test_a_rank_that_is_stopped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error, seconds = frozen("is_stopped_in_a_save", tmp_path, monkeypatch)
    assert "rank 1 stopped: Frozen: gave no sign for 2 s: its process is stopped (SIGSTOP), in s" in error.what
    assert "in stop" in stack(tmp_path)  # or one call further: the signal takes a moment
    assert "in save" in stack(tmp_path)
    assert seconds < TIMEOUT + 5


def failed(rank: int, kind: str, *, waits: bool) -> None:
    """Leave a failure of a type of this name."""
    failure.leave_failure(Path.cwd(), rank, type(kind, (Exception,), {})("x"), stack="", waits=waits)


def test_the_first_cause_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rank, (kind, waits) in enumerate([("Hung", True), ("Hung", False), ("ValueError", False)]):
        failed(rank, kind, waits=waits)
    assert failure.failures(tmp_path)[0]["rank"] == 1  # the one that the others waited for
    failed(3, "Frozen", waits=False)
    assert failure.failures(tmp_path)[0]["rank"] == 3  # and could not say so itself
    failed(0, "RuntimeError", waits=False)  # the group broke when the others were ended
    assert failure.failures(tmp_path)[0]["rank"] == 3


def test_the_place_is_the_innermost_of_our_own() -> None:
    text = """Thread 0x1 (most recent call first):
  File "/x/other.py", line 3 in idle

Current thread 0x2 (most recent call first):
  File "{lib}/threading.py", line 327 in wait
  File "{lib}/concurrent/futures/_base.py", line 306 in wait
  File "/repo/src/fivefold/checkpoint/save.py", line 122 in save
  File "/repo/src/fivefold/training/run.py", line 40 in _save
""".format(lib=os.path.dirname(os.__file__))
    assert failure.place(text) == "save (checkpoint/save.py:122)"
    assert failure.place("") == "an unknown place"


def test_slow_is_not_frozen(tmp_path: Path) -> None:
    of_this = Moves()
    for _ in range(3):
        of_this.look(1.0)  # this thread is at another place each time
    assert of_this.still == 0
    of_this._moved = lambda seconds: False  # type: ignore[method-assign]
    of_this.look(1.5)
    of_this.look(0.5)
    assert of_this.still == 2.0


HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
while True: pass
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="finds the holder in /proc")
def test_a_wait_for_a_lock_is_frozen_only_if_its_holder_is(tmp_path: Path) -> None:
    """A process that tokenises a large file for all ranks holds the lock of its tokens, and is a child of one rank."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "lock")]
    waiting = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX)"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline() == "held\n"
        with subprocess.Popen([sys.executable, "-c", waiting, str(tmp_path / "lock")]) as waiter:
            try:
                deadline = time.monotonic() + 20
                while not (before := watchdog._others(waiter.pid)):
                    assert time.monotonic() < deadline
                assert watchdog._others(waiter.pid) == before and before.keys() == {holder.pid}
                holder.stdin.write("\n")
                holder.stdin.flush()
                while watchdog._others(waiter.pid)[holder.pid] < before[holder.pid] + 0.1:
                    assert time.monotonic() < deadline
            finally:
                holder.kill()
                waiter.kill()


def test_folders_of_those_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, kept, mine, far = (scratch_folder(name) for name in ("left", "kept", "mine", "far"))
    owner = json.loads((left / ".owner").read_text())
    for folder in (left, kept):
        (folder / ".owner").write_text(json.dumps(owner | {"pid": 2**22 + 1}))
    (far / ".owner").write_text(json.dumps(owner | {"pid": 2**22 + 1, "host": "another machine"}))
    keep(kept)
    another = scratch_folder("another")
    assert sorted(tmp_path.iterdir()) == sorted([kept, mine, far, another])


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_real_run_names_the_rank_that_was_stopped(rank: int, tmp_path: Path) -> None:
    tree = file_of(tmp_path, "frozen", train__collective_timeout=8, train__max_restarts=0)
    command = Command(tree)
    command.until(10)
    os.kill(command.workers()[rank], signal.SIGSTOP)
    stopped = time.monotonic()
    code, out = command.end()
    assert code == 1 and time.monotonic() - stopped < 8 + 5, out
    assert f"rank {rank} stopped: Frozen: " in out and "its process is stopped (SIGSTOP), in " in out
    assert "memory" not in out.rpartition("\n\n")[2].partition("stopped: Frozen")[2]


@pytest.mark.campaign
def test_an_impatient_run_that_is_well_is_left_alone(tmp_path: Path) -> None:
    """Two seconds are more than a step, an evaluation and a save of this model take, and less than its start."""
    tree = file_of(tmp_path, "impatient", train__collective_timeout=2, sample__every=20)
    code, out = Command(tree).end()
    assert code == 0, out


def test_a_beat_needs_no_room_that_a_full_disk_may_not_have(tmp_path: Path) -> None:
    beat = Beat(str(tmp_path), 0)
    beat.write(still=0.0, waits=False)
    (file,) = tmp_path.iterdir()
    before = file.stat()
    for seconds in (1.0, 1234567.8912345):
        beat.write(still=seconds, waits=True)
        assert json.loads(file.read_text())["still"] == seconds
    beat.end()
    assert (file.stat().st_ino, file.stat().st_size) == (before.st_ino, before.st_size)
    assert json.loads(file.read_text()) == {}
