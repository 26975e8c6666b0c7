"""When a rank keeps its last step: if others are gone, once, and not in the midst of an update."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.core.best import Best
from fivefold.launch.memory import ENDING
from fivefold.training.keeping import HeldStep, LastStep

CUT_OFF = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29500")


def held(step: int) -> HeldStep:
    return HeldStep(step, {}, Best(), {})


def steps(kept: list[int]) -> LastStep:
    """One that has done a step."""
    last = LastStep(lambda one, _: kept.append(one.step))
    last.changes()
    last.stands(held(1))
    return last


def test_a_step_is_kept_if_others_go_and_not_in_the_midst_of_the_next(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    def fail(error: Exception, last: LastStep, *, changes: bool) -> None:
        if changes:
            last.changes()
        raise error

    ends: dict[str, tuple[Exception, bool, list[int]]] = {
        "others are gone": (CUT_OFF, False, [1]),
        "in an update": (CUT_OFF, True, []),
        "its own failure": (ValueError("x"), False, []),
    }
    for name, (error, changes, wanted) in ends.items():
        with subtests.test(name):
            kept: list[int] = []
            last = steps(kept)
            with pytest.raises(type(error)), last.kept_if_others_go("", tmp_path / "memory" / "ready-0"):
                assert (tmp_path / "memory" / "ready-0").exists()
                fail(error, last, changes=changes)
            assert kept == wanted and not any((tmp_path / "memory").iterdir())


def waited(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_rank_that_waits_for_ever_keeps_its_step_at_the_word_of_the_launcher(tmp_path: Path) -> None:
    kept: list[int] = []
    last, flag = steps(kept), tmp_path / "ready-0"
    with last.kept_if_others_go(str(tmp_path), flag):
        (tmp_path / ENDING).touch()
        assert waited(lambda: not flag.exists()) and kept == [1]
        update = threading.Thread(target=last.changes, daemon=True)
        update.start()
        update.join(0.2)
        assert update.is_alive()  # what was kept is the last step for ever
    assert kept == [1]


def test_nothing_is_kept_where_nothing_could_survive(tmp_path: Path) -> None:
    last = LastStep()
    with last.kept_if_others_go("", Path("/nowhere/ready-0")):
        last.changes()
        last.changes()
    kept: list[int] = []
    with pytest.raises(RuntimeError), steps(kept).kept_if_others_go("", tmp_path / "removed" / "round" / "ready-0"):
        raise CUT_OFF
    assert not kept
