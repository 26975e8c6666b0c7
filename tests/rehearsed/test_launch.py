"""What becomes of a rank that fails, and of processes and folders when a rehearsal is stopped."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fivefold.core.errors import RunFailed
from fivefold.core.interrupts import Stopped, sigterm_raises
from fivefold.hardware.cluster import Cluster
from fivefold.launch.processes import private_folder
from fivefold.rehearsal import launch
from fivefold.rehearsal.request import RehearsalRequest
from tests.tiers import put_off


@pytest.fixture(autouse=True)
def _another_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STAGE", "tests.rehearsed.stages")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)


def request(folder: Path, told: str) -> RehearsalRequest:
    return RehearsalRequest(config=told, folder=str(folder / "0"), rank=3, world=8, local_size=8, steps=2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("told", "message", "fix"),
    [
        ("7", r"rank 3 ended without a word \(code 7\): 7 was said", "--debug"),
        put_off("-11", "rank 3 was ended by SIGSEGV", "--debug"),
        ("die", "rank 3 was ended by SIGKILL", "free memory"),
    ],
)
def test_a_rank_that_ends_without_a_word(told: str, message: str, fix: str, tmp_path: Path) -> None:
    with launch.stage(os.environ, tmp_path) as play, pytest.raises(RunFailed, match=message) as failed:
        play(request(tmp_path, told))
    assert fix in str(failed.value.fix)


def test_a_rehearsed_step_is_one_without_standing_checks(tmp_path: Path) -> None:
    """They hash every parameter, in one step of a hundred: as many launches as the step has without them."""
    config, _ = launch.resolved(None, launch.changes(tmp_path, 2, is_full=False), Cluster.parse("2xH100"))
    assert config.train.check_every == 0


@pytest.mark.full
def test_a_compiler_does_not_outlive_its_rank(tmp_path: Path) -> None:
    """It would write into a folder that is being removed."""
    with launch.stage(os.environ, tmp_path) as play, pytest.raises(RunFailed, match="SIGKILL"):
        play(request(tmp_path, "compile"))
    compiler = Path("/proc", (tmp_path / "0" / "compiler").read_text(), "stat")
    until = time.monotonic() + 10
    while compiler.exists() and compiler.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.full
def test_a_stage_knows_who_started_it(tmp_path: Path) -> None:
    """While it imports torch nothing ends it with its parent; afterwards `die_with_parent` sees that it has another,
    and nothing is rehearsed for nobody."""
    with launch.stage(os.environ, tmp_path) as play, pytest.raises(RunFailed, match="True was said"):
        play(request(tmp_path, "who"))


def children() -> set[str]:
    """The processes that this one has started; workers of other tests are among them."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.full
def test_sigterm_leaves_neither_process_nor_folder() -> None:
    """While a rank runs, which would go on for long."""
    before = children()
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    began = time.monotonic()
    with (
        pytest.raises(Stopped) as stopped, sigterm_raises(), private_folder("rehearsal") as folder,
        launch.stage(os.environ, folder) as play,
    ):  # fmt: skip
        try:
            play(request(folder, "sleep"))
        finally:
            timer.cancel()  # a rehearsal that fails before must not end the process of the tests
    assert stopped.value.code == 143 and time.monotonic() - began < 60
    assert not folder.exists()
    assert children() <= before
