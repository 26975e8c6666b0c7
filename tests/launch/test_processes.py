"""Workers that are started, heard and ended; here they are programs of the shell, which take no time to start."""

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from fivefold.launch import processes
from fivefold.launch.failure import WorkerDied
from fivefold.launch.processes import Workers, scratch_folder
from fivefold.launch.workers import start_workers
from tests.launch.test_workers import PATHS, is_alive

DEAF = 'trap "" TERM INT; touch "$FIVEFOLD_WORKERS/ready-$RANK"; exec sleep 30'


@contextmanager
def workers(script: str, folder: Path, count: int = 1) -> Iterator[Workers]:
    request = folder / "request.json"
    request.write_text('{"device": "cpu"}')
    with (
        patch.dict(os.environ, {"SCRIPT": script, "PYTHONPATH": PATHS}),
        Workers("tests.launch.shell:run", count=count) as crew,
        crew.started(request, folder),
    ):
        yield crew


def until_ready(folder: Path, rank: int) -> None:
    until = time.monotonic() + 20
    while not (folder / f"ready-{rank}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.full
def test_who_does_not_heed_a_polite_stop_has_its_time_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 stops as it was asked to; rank 1 would sleep for half a minute."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    began, seen = time.monotonic(), 0
    with workers(f'[ "$RANK" = 0 ] && exit {processes.POLITE[0]}; {DEAF}', tmp_path, 2) as started:
        for _ in started.turns():
            seen += bool(started.codes)
        assert started.running == [1] and seen, "that a rank has stopped is no failure that ends the others at once"
    assert started.codes[1] in (-signal.SIGKILL, -signal.SIGTERM) and time.monotonic() - began < 10


@pytest.mark.full
def test_three_signals_leave_no_time_to_anyone(tmp_path: Path) -> None:
    began = time.monotonic()
    with workers(DEAF, tmp_path) as started:
        until_ready(tmp_path, 0)
        started.signals += [signal.SIGINT] * processes.AT_ONCE
        for _ in started.turns():
            pass
    assert started.codes == {0: -signal.SIGKILL} and time.monotonic() - began < processes.GRACE_SECONDS / 2


@pytest.mark.full
def test_a_closed_terminal_stops_workers_as_sigterm_does(tmp_path: Path) -> None:
    waits = "for each in $(seq 500); do sleep 0.02; done"  # a shell hears a signal between two commands
    script = f'trap "exit 5" TERM; touch "$FIVEFOLD_WORKERS/ready-$RANK"; {waits}'
    with workers(script, tmp_path) as started:
        until_ready(tmp_path, 0)
        started.signals.append(signal.SIGHUP)
        for _ in started.turns():
            pass
        assert started.codes == {0: 5}


@pytest.mark.full
def test_ctrl_c_in_the_terminal_reaches_workers_by_way_of_the_launcher_alone(tmp_path: Path) -> None:
    with workers("exec sleep 30", tmp_path, 2) as started:
        next(turn for turn in started.turns() if started.ids)
        assert not {os.getsid(0), os.getpgid(0)} & {
            group for pid in started.ids for group in (os.getsid(pid), os.getpgid(pid))
        }


@pytest.mark.full
def test_workers_start_again_after_the_process_that_forks_them_was_killed(tmp_path: Path) -> None:
    with workers("exit 3", tmp_path) as started:
        started._server.kill()
        started._server.wait()
        for _ in started.turns():
            pass
        with started.started(tmp_path / "request.json", tmp_path):
            for _ in started.turns():
                pass
            assert started.codes == {0: 3}


@pytest.mark.full
def test_signals_that_schedulers_repeat_leave_time_to_save(tmp_path: Path) -> None:
    """Slurm and systemd send SIGTERM to all processes of a job, and again to some of them."""
    script = """
        cd "$FIVEFOLD_WORKERS"; trap 'touch asked-$RANK' TERM; touch "ready-$RANK"
        until [ -e asked-$RANK ]; do sleep 0.02; done
        for each in $(seq 25); do sleep 0.02; done
        touch "saved-$RANK"; exit 143"""
    with workers(script, tmp_path, 2) as started:
        for rank in (0, 1):
            until_ready(tmp_path, rank)
        for turn, _ in enumerate(started.turns()):
            if turn in (1, 3, 5):
                for pid in (os.getpid(), started.server, *started.ids):
                    os.kill(pid, signal.SIGTERM)
        assert started.codes == {0: 143, 1: 143}
    assert len(list(tmp_path.glob("saved-*"))) == 2


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads the state of processes in /proc")
@pytest.mark.parametrize("script", ["exec sleep 30", 'kill -STOP "$PPID"; exec sleep 30', 'kill -STOP "$PPID"; exit 3'])
def test_a_stopped_process_that_forks_is_noticed(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has forked, while workers run, and once they have ended."""
    monkeypatch.setenv("SCRIPT", script)
    monkeypatch.setenv("PYTHONPATH", PATHS)
    began = time.monotonic()
    with (
        pytest.raises(WorkerDied, match=r"the forking process gave no sign for 1 s: its process is stopped"),
        Workers("tests.launch.shell:run", count=1) as crew,
    ):
        if script == "exec sleep 30":
            os.kill(crew.server, signal.SIGSTOP)
        start_workers(crew, {"device": "cpu"}, logs=tmp_path, patience=1.0)
    assert time.monotonic() - began < 1 + 5 + 5  # it takes a moment to start
    assert all(not is_alive(pid) for pid in crew.ids)


@pytest.mark.full
def test_workers_are_heard_by_a_process_with_a_thousand_open_files(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        with workers("exit 3", tmp_path) as started:
            for _ in started.turns():
                pass
            assert started.codes == {0: 3}
    finally:
        for each in many:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.full
def test_a_process_without_standard_output_starts_workers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setenv("SCRIPT", "exit 0")
    monkeypatch.setenv("PYTHONPATH", PATHS)
    with Workers("tests.launch.shell:run", count=1) as crew:
        start_workers(crew, {"device": "cpu"}, logs=tmp_path)
    assert crew.codes == {0: 0}


@pytest.mark.full
def test_workers_are_forked_where_standard_output_is_closed(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text('{"device": "cpu"}')
    start = {"request": str(tmp_path / "request.json"), "places": [{"RANK": "0"}], "unseen": False}
    reports, theirs = os.pipe()
    subprocess.run(
        [sys.executable, "-m", "fivefold.launch.fork_server", "tests.launch.shell:run", str(theirs)],
        input=f"{json.dumps(start)}\n".encode(), env={**os.environ, "SCRIPT": "exit 3", "PYTHONPATH": PATHS},
        pass_fds=[theirs], preexec_fn=lambda: os.close(1), timeout=60, check=True,
    )  # fmt: skip
    os.close(theirs)
    with os.fdopen(reports) as told:
        lines = [*map(json.loads, told.read().splitlines())]
        assert lines[0] == [] and lines[-1] == [0, 3]


@pytest.mark.full
def test_imports_are_waited_for_but_not_of_a_process_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PATHS)
    for is_killed in (False, True):
        with Workers("tests.launch.shell:run", count=1) as crew:
            if is_killed:
                os.kill(crew.server, signal.SIGKILL)
            crew.import_first()
            assert crew._has_imported != is_killed


@pytest.mark.full
def test_what_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """Under nohup a closed terminal ends nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with workers("exec sleep 30", tmp_path):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.skipif(sys.platform != "linux", reason="tells processes of one number apart by /proc")
def test_only_folders_of_this_user_whose_process_is_gone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, reused = scratch_folder("mine"), scratch_folder("reused")
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    owner = json.loads((mine / ".owner").read_text())
    (reused / ".owner").write_text(json.dumps(owner | {"start": "1"}))  # another process had this number
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        scratch_folder("another")
        assert reused.exists(), "of another user"
    scratch_folder("more")
    assert mine.exists() and not reused.exists()
