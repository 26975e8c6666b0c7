"""Workers that die are started again, from the newest checkpoint, while that helps; a signal stops a run politely.

The runs here are real: `fivefold train` in a process of its own, its workers killed from outside.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold.checkpoint import Checkpoint, step_folder, steps
from fivefold.core.errors import RunFailed, UserError
from fivefold.launch.failure import WorkerDied
from fivefold.launch.folder import FolderLock
from fivefold.launch.workers import with_restarts
from tests.tiers import put_off
from tests.training.bodies import column, run_dir, run_file, same, state, train

STEPS, SAVED = 56, 10  # steps of a run, steps between its checkpoints
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")


# ---- when to try again -----------------------------------------------------------------------------------------------


def died(cause: str, *, comes_again: bool = False) -> WorkerDied:
    death = WorkerDied(f"rank 1 {cause}", fix="fix", more="log")
    death.cause, death.comes_again = cause, comes_again
    return death


def attempts(deaths: list[WorkerDied | None], places: list[tuple[int, int]], most: int = 3) -> tuple[int, str, str]:
    """(attempts made, the error that came out, the last thing said)."""
    made, said = 0, [""]

    def start() -> None:
        nonlocal made
        made += 1
        if death := deaths[made - 1]:
            raise death

    try:
        with_restarts(start, most=most, steps=lambda: places[made - 1], say=said.append)
    except RunFailed as error:
        return made, error.what, said[-1]
    return made, "", said[-1]


def test_goes_on_after_a_death() -> None:
    made, error, said = attempts([died("crashed"), None], [(7, 5)])
    assert (made, error) == (2, "")
    assert said == "rank 1 crashed at step 7; starting again from step 5 (restart 1 of 3)"


def test_the_same_failure_at_the_same_step_is_not_tried_a_third_time() -> None:
    made, error, _ = attempts([died("crashed")] * 2, [(7, 5)] * 2)
    assert made == 2 and error == "rank 1 crashed, twice at step 7: it would come again"
    assert attempts([died("crashed"), died("crashed"), None], [(7, 5), (8, 5)])[:2] == (3, "")
    assert attempts([died("crashed"), died("fell"), None], [(7, 5), (7, 5)])[:2] == (3, "")
    killed = died("was killed by SIGKILL")
    assert attempts([killed, killed, None], [(7, 5)] * 2)[:2] == (
        2,
        f"{killed.what}, twice at step 7: it would come again",
    )


def test_what_is_known_to_come_again_is_not_tried_again() -> None:
    made, error, said = attempts([died("ran out of memory", comes_again=True), None], [(7, 5)])
    assert (made, error, said) == (1, "rank 1 ran out of memory", "")


def test_restarts_without_progress_are_counted() -> None:
    deaths: list[WorkerDied | None] = [died(f"crash {i}") for i in range(9)]
    made, error, _ = attempts(deaths, [(i, 5) for i in range(9)])
    assert made == 4 and error == "rank 1 crash 3, after 3 restarts without a new checkpoint"
    assert attempts([*deaths, None], [(i, i) for i in range(9)])[:2] == (10, "")  # each time a new checkpoint
    assert attempts(deaths, [(1, 0)], most=0)[:2] == (1, "rank 1 crash 0")


def test_the_user_s_errors_are_not_tried_again() -> None:
    def start() -> None:
        raise UserError("train.jsonl:3 has no key 'text'")

    with pytest.raises(UserError, match="no key"):
        with_restarts(start, most=3, steps=lambda: (0, 0), say=print)


# ---- real runs -------------------------------------------------------------------------------------------------------


class Command:
    """`fivefold train` on a run file, in the background."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.run = run_dir(tree)
        file = self.run.parent / f"{self.run.name}.yaml"
        file.write_text(yaml.safe_dump(tree))
        environment = os.environ | {"FIVEFOLD_CACHE": str(self.run.parent / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fivefold", "train", str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
        )  # fmt: skip

    def workers(self) -> list[int]:
        """Processes that the command started, by rank."""
        found = {}
        for task in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                name, server = _name_and_parent(task)
                if name.startswith("fivefold ") and _name_and_parent(Path("/proc", server))[1] == str(self.process.pid):
                    found[int(name.split()[1])] = int(task.name)
        return [found[rank] for rank in sorted(found)]

    def until(self, step: int) -> None:
        """Wait until a step is logged."""
        _wait(lambda: self.process.poll() is not None or _last(self.run) >= step)
        assert self.process.poll() is None, self.process.communicate()[0]

    def end(self) -> tuple[int, str]:
        """(exit code, what it printed)."""
        out, _ = self.process.communicate(timeout=120)
        return self.process.returncode, out


def _name_and_parent(task: Path) -> tuple[str, str]:
    before, _, after = (task / "stat").read_text().rpartition(")")
    return before.partition("(")[2], after.split()[1]


def _last(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def file_of(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    tree = run_file(
        folder, run__name=name, train__max_steps=STEPS, checkpoint__every=SAVED, checkpoint__keep=3, **changes
    )
    return tree


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A run that nobody disturbed."""
    tree = file_of(tmp_path_factory.mktemp("runs"), "alone")
    assert train(tree).error is None
    yield tree


def check_same(tree: dict[str, Any], alone: dict[str, Any]) -> None:
    assert column(tree, "step") == list(range(1, STEPS + 1))
    assert column(tree, "train/loss") == column(alone, "train/loss")
    assert same(state(tree, STEPS), state(alone, STEPS))


@pytest.mark.full
def test_a_killed_worker_costs_only_the_steps_since_the_checkpoint(alone: dict[str, Any]) -> None:
    tree = file_of(run_dir(alone).parent, "killed")
    command = Command(tree)
    command.until(SAVED + 5)
    os.kill(command.workers()[1], signal.SIGKILL)
    command.until(3 * SAVED)  # of the second attempt: metrics are cut back to the checkpoint
    os.kill(command.workers()[0], signal.SIGKILL)
    code, out = command.end()
    assert code == 0, out
    assert out.count("was killed by SIGKILL at step") == 2 and "starting again from step" in out
    check_same(tree, alone)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "to"), [("SIGTERM", "one rank"), put_off("SIGTERM", "all"), put_off("SIGINT", "the command")]
)
def test_a_signal_stops_every_rank_after_one_step_and_saves_it(alone: dict[str, Any], name: str, to: str) -> None:
    tree = file_of(run_dir(alone).parent, f"stopped-{name}-{to}".replace(" ", "-"))
    command = Command(tree)
    command.until(2 * SAVED + 3)
    workers = command.workers()
    for pid in {"one rank": workers[1:], "all": [command.process.pid, *workers]}.get(to, [command.process.pid]):
        os.kill(pid, signal.Signals[name])
    code, out = command.end()
    assert code == 128 + signal.Signals[name] and "starting again" not in out, out
    stopped = steps(command.run / "checkpoints")[-1]
    assert f"stopped by {name} after step {stopped} of {STEPS}, which is saved" in out
    assert _last(command.run) == stopped
    opened = Checkpoint.open(command.run / "checkpoints" / step_folder(stopped))
    opened.verify()
    if name == "SIGTERM":
        assert train(tree).error is None  # goes on
        check_same(tree, alone)


@pytest.mark.full
def test_two_runs_do_not_write_to_one_folder(alone: dict[str, Any]) -> None:
    tree = file_of(run_dir(alone).parent, "twice")
    first = Command(tree)
    first.until(5)
    code, out = Command(tree).end()
    assert code == 2 and "another run writes to" in out and f"process {first.workers()[0]} on" in out
    os.killpg(first.process.pid, signal.SIGKILL)  # the launcher; its workers end by themselves
    first.process.communicate()
    _wait(lambda: not _is_locked(first.run))  # a dead owner's lock is nobody's


def _is_locked(run: Path) -> bool:
    try:
        FolderLock(run).release()
    except UserError:
        return True
    return False
