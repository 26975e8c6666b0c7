"""What becomes of a rank that fails, and of processes and folders when a rehearsal is stopped."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fivefold.core.errors import RunFailed
from fivefold.core.interrupts import Stopped, sigterm_raises
from fivefold.rehearsal import launch
from fivefold.rehearsal.request import Request


@pytest.fixture(autouse=True)
def _another_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STAGE", "tests.rehearsed.stages")


def request(folder: Path, told: str) -> Request:
    return Request(config=told, folder=str(folder / "0"), rank=3, world=8, local_size=8, steps=2)


@pytest.mark.parametrize(
    ("told", "message", "fix"),
    [
        ("7", r"rank 3 ended without a word \(code 7\): 7 was said", "--debug"),
        ("-11", "rank 3 was ended by SIGSEGV", "--debug"),
        ("die", "rank 3 was ended by SIGKILL", "free memory"),
    ],
)
def test_a_rank_that_ends_without_a_word(told: str, message: str, fix: str, tmp_path: Path) -> None:
    with launch.stage(os.environ, tmp_path) as play, pytest.raises(RunFailed, match=message) as failed:
        play(request(tmp_path, told))
    assert fix in str(failed.value.fix)


def children() -> set[str]:
    """The processes that this one has started; workers of other tests are among them."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_sigterm_leaves_neither_process_nor_folder() -> None:
    """While a rank runs, which would go on for long."""
    before = children()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    with (
        pytest.raises(Stopped) as stopped, sigterm_raises(), launch.scratch() as folder,
        launch.stage(os.environ, folder) as play,
    ):  # fmt: skip
        play(request(folder, "sleep"))
    assert stopped.value.code == 143 and time.monotonic() - began < 60
    assert not folder.exists()
    assert children() <= before
