"""SIGKILL before and after every system call of a save: what is there afterwards is the old step or the new one.

A save of two ranks runs in a child process, one rank after the other, over a folder that holds an older step; the
child kills itself at the n-th call of `core/files.py`, for every n there is.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.checkpoint import Checkpoint, newest
from fivefold.checkpoint.load import is_valid
from fivefold.core import files
from fivefold.core.run_folder import step_folder
from tests.tiers import put_off

saving = sys.modules["fivefold.checkpoint.save"]
CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "scandir", "unlink", "rmdir")
NAMES = ("embed.weight", "layers.0.weight", "layers.1.weight")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Dying:
    """`os`, but for a SIGKILL right before the call number `at`; counts them when `at` is None."""

    def __init__(self, at: int | None) -> None:
        self.at, self.calls = at, 0

    def __getattr__(self, name: str) -> Any:
        plain = getattr(os, name)
        return self._counted(plain) if name in CALLS else plain

    def _counted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.calls == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls += 1
            return plain(*args)

        return call


def save_step(directory: Path, step: int, keep: int, best: tuple[int, ...] = ()) -> None:
    """What `Saver` does for two ranks that each own half of every tensor; all values are `step`. `best`: steps, of
    which the first one that is there stays."""
    save_at(directory / step_folder(step), step, keep, best)


def save_at(published: Path, step: int, keep: int | None, best: tuple[int, ...] = ()) -> None:
    """The same as the folder `published`; `keep` None: in place of what is there, as `ff.save` with `overwrite`."""
    beside = published.parent / f".tmp-{published.name}"
    alone = None if keep else [beside, saving._damaged(published)]
    saving._start(beside, published, abandoned=alone, overwrite=keep is None)
    parts = []
    for rank in range(2):
        slices = [
            saving.OwnedSlice(kind, name, (8, 6), (4 * rank, 0), torch.full((4, 6), float(step)))
            for kind in ("weight", "exp_avg")
            for name in NAMES
        ]
        snapshot = saving.Snapshot(
            about=save_about(step, best), layout="shard2", names=NAMES, slices=slices, scalars={},
            texts={"run.yaml": b"step\n" * step, "model/config.json": b"{}"},
        )  # fmt: skip
        parts.append(saving._told(beside, snapshot, rank))
    saving._publish(snapshot, parts, beside, published, keep)


def save_about(step: int, best: tuple[int, ...]) -> Any:
    return saving.Metadata(step=step, state={"step": step}, best=best, keep_best=1)


def in_child(action: Callable[[], None], at: int | None) -> tuple[int, int]:
    """Run `action` in a fork that dies at call `at`: (the signal it died of, the calls it made)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            files.os = dying = Dying(at)  # type: ignore[attr-defined,assignment]
            action()
            os.write(writer, str(dying.calls).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    calls = os.read(reader, 100)
    os.close(reader)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), int(calls or 0)


def content(folder: Path) -> set[float]:
    """Every value in a checkpoint."""
    opened = Checkpoint.open(folder)
    return {
        float(value) for kind in opened.kinds for name in NAMES for value in opened.source(kind).whole(name).unique()
    }


@pytest.mark.full
@pytest.mark.parametrize("every", [7, put_off(1)])
def test_the_old_step_or_the_new_one_never_a_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    keep = 1
    monkeypatch.setattr(files, "AT_ONCE", 32)  # so that files are cut in their middle, too
    save_step(tmp_path / "before", 1, keep)
    shutil.copytree(tmp_path / "before", tmp_path / "whole")
    _, calls = in_child(lambda: save_step(tmp_path / "whole", 2, keep), None)
    assert calls > 150
    outcomes = []
    for at in range(0, calls, every):
        directory = tmp_path / f"{at}"
        shutil.copytree(tmp_path / "before", directory)
        died, _ = in_child(lambda: save_step(directory, 2, keep), at)  # noqa: B023
        assert died == signal.SIGKILL
        folder = newest(directory)
        assert folder is not None and is_valid(folder)
        step = Checkpoint.open(folder).step
        assert content(folder) == {float(step)} and Checkpoint.open(folder).state == {"step": step}
        assert (folder / "run.yaml").read_bytes() == b"step\n" * step
        assert all(is_valid(path) for path in directory.glob("step-*"))
        outcomes.append(step)
        save_step(directory, step + 1, keep)  # the next save works, and clears away what this one left
        assert [path.name for path in directory.iterdir()] == [step_folder(step + 1)]
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}  # one moment divides old from new


@pytest.mark.full
@pytest.mark.parametrize("best", [put_off((1, 2, 3)), (3, 1, 2)], ids=["an older one", "the one that is saved"])
def test_the_best_stays_whenever_a_save_is_killed(tmp_path: Path, best: tuple[int, ...]) -> None:
    """A better one is there before it goes, and it is never what a run goes on from where a newer one is whole."""

    save_step(tmp_path / "before", 1, 1)
    save_step(tmp_path / "before", 2, 1, (1,))
    assert sorted(path.name for path in (tmp_path / "before").iterdir()) == [step_folder(1), step_folder(2)]
    shutil.copytree(tmp_path / "before", tmp_path / "whole")
    _, calls = in_child(lambda: save_step(tmp_path / "whole", 3, 1, best), None)
    outcomes = []
    for at in (*range(0, calls - 40, 37), *range(calls - 40, calls)):  # renames and removals are among the last
        directory = tmp_path / f"{at}"
        shutil.copytree(tmp_path / "before", directory)
        died, _ = in_child(lambda: save_step(directory, 3, 1, best), at)  # noqa: B023
        assert died == signal.SIGKILL
        there = {step for step in (1, 2, 3) if is_valid(directory / step_folder(step))}
        outcomes.append(max(there))
        assert next(step for step in best if step in {*there, 1}) in there and max(there) in (2, 3)
        assert newest(directory) == directory / step_folder(max(there))
        save_step(directory, 4, 1, best)
        kept = next(step for step in best if step in there)
        assert sorted(path.name for path in directory.iterdir()) == [step_folder(kept), step_folder(4)]
    assert outcomes == sorted(outcomes) and set(outcomes) == {2, 3}


class Cached:
    """`os`, with a note of what a loss of power would lose: files and names that were not synchronised since."""

    def __init__(self) -> None:
        self.lost: set[Path] = set()  # a folder: names in it
        self.unsafe: list[str] = []  # renames that would have put a name on what is not on the disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)
        self.lost.add(path.parent)

    def open(self, path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            self.lost |= {path, path.parent}
        return os.open(path, flags, *mode)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        self.lost.discard(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def rename(self, old: Path, new: Path) -> None:
        self.unsafe += [f"{path.name} in {new.name}" for path in self.lost if path.is_relative_to(old)]
        os.rename(old, new)
        self.lost.add(new.parent)


@pytest.mark.skipif(sys.platform != "linux", reason="names descriptors by /proc")
@pytest.mark.parametrize("keep", (1, None))
def test_what_takes_the_name_of_a_step_is_on_the_disk(
    tmp_path: Path, keep: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power has the old step or the new one, too. (A kill loses nothing that was written.)"""
    folder = tmp_path / "checkpoints" / step_folder(1)
    monkeypatch.setattr(files, "os", disk := Cached())
    save_at(folder, 1, keep)
    if keep is None:
        save_at(folder, 2, keep)
    assert not disk.unsafe
    assert not disk.lost


@pytest.mark.full
@pytest.mark.parametrize("every", [7, put_off(1)])
def test_a_damaged_step_is_replaced_or_stays(tmp_path: Path, every: int) -> None:
    """The step that is saved again because its first copy is damaged: an older valid one is there at every moment."""
    save_step(tmp_path / "before", 1, 3)
    save_step(tmp_path / "before", 2, 3)
    file = tmp_path / "before" / step_folder(2) / "weight-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    shutil.copytree(tmp_path / "before", tmp_path / "whole")
    _, calls = in_child(lambda: save_step(tmp_path / "whole", 2, 3), None)
    for at in (*range(0, calls - 30, every), *range(calls - 30, calls)):  # renames and removals are among the last
        directory = tmp_path / f"{at}"
        shutil.copytree(tmp_path / "before", directory)
        in_child(lambda: save_step(directory, 2, 3), at)  # noqa: B023
        assert is_valid(directory / step_folder(1))
        assert content(directory / step_folder(1)) == {1.0}


@pytest.mark.full
def test_a_checkpoint_that_is_replaced_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """`ff.save` with `overwrite`: `ff.load` finds one of them at every moment, and so does the next save."""
    save_at(tmp_path / "before" / "last", 1, None)
    shutil.copytree(tmp_path / "before", tmp_path / "whole")
    _, calls = in_child(lambda: save_at(tmp_path / "whole" / "last", 2, None), None)
    outcomes, gaps = [], 0
    for at in (*range(0, calls - 30, 40), *range(calls - 30, calls)):  # the two renames are among the last
        folder = tmp_path / f"{at}" / "last"
        shutil.copytree(tmp_path / "before", folder.parent)
        in_child(lambda: save_at(folder, 2, None), at)  # noqa: B023
        found = saving.standing(folder)
        assert is_valid(found)
        outcomes.append(Checkpoint.open(found).step)
        assert content(found) == {float(outcomes[-1])}
        if found != folder:
            gaps += 1
            in_child(lambda: save_at(folder, 3, None), calls // 2)  # noqa: B023 - the next save is cut off, too
            assert Checkpoint.open(saving.standing(folder)).step == 1
        save_at(folder, 3, None)
        assert content(folder) == {3.0} and [path.name for path in folder.parent.iterdir()] == ["last"]
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2} and gaps


def test_newer_steps_that_were_passed_over_do_not_cost_the_one_that_is_saved(tmp_path: Path) -> None:
    for step in (100, 200):
        save_step(tmp_path, step, 3)
    save_step(tmp_path, 150, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_folder(150), step_folder(200)]
