"""Full disks, folders that are removed or read-only, lines that are damaged: a run goes on, or says why not."""

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from fivefold.config import RunConfig
from fivefold.core import files, json_lines
from fivefold.core.errors import UserError
from fivefold.core.history import load
from fivefold.launch import worker
from fivefold.launch.failure import failures, leave_failure, room_for_failures
from fivefold.launch.folder import claim_fresh, open_folder
from fivefold.launch.world import World
from fivefold.training import preflight
from fivefold.training import run as run_module
from fivefold.training.run_log import HeldFolder
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training.bodies import Ran, column, on_rank, run_dir, run_file, state, train

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))


def with_full_disk(tree: dict[str, Any], calls: range) -> Ran:
    """Train on this rank; of what is written line by line, these calls find no space."""
    plain, count = json_lines.write_all, 0

    def write_all(descriptor: int, content: bytes) -> None:
        nonlocal count
        count += 1
        if count in calls:
            raise NO_SPACE
        plain(descriptor, content)

    with patch.object(json_lines, "write_all", write_all):
        return on_rank(tree)


@pytest.mark.full
def test_a_full_disk_costs_no_row_and_ends_no_run(tmp_path: Path) -> None:
    tree = run_file(tmp_path, sample__prompts=["der "], sample__every=2)
    ran = run_ranks(2, with_full_disk, tree, range(3, 9))[0]
    assert ran.error is None
    assert column(tree, "step") == [1, 2, 3, 4, 5, 6]
    assert ran.screen.count("metrics.jsonl cannot be written: No space left on device") == 1
    assert "metrics.jsonl can be written again" in ran.screen
    assert "Traceback" not in ran.screen


def test_a_checkpoint_that_is_removed_is_said_once(tmp_path: Path) -> None:
    """Not one that retention has removed."""
    there, said = tmp_path / "checkpoints", list[str]()
    (there / "step-000004").mkdir(parents=True)
    folder = HeldFolder(tmp_path)
    folder.take()
    folder.saved = 4
    folder.look(said.append)
    (there / "step-000004").rename(there / "step-000006")
    folder.look(said.append)
    folder.saved = 6
    folder.look(said.append)
    assert said == []
    shutil.rmtree(there)
    folder.look(said.append)
    folder.look(said.append)
    folder.release()
    assert said == [f"WARNING: step 6 was removed from {there}; the next one is saved on time"]


def with_folder_removed(tree: dict[str, Any]) -> Ran:
    """Train on this rank; after the third step somebody removes the run folder."""
    plain, calls = run_module.train_step, 0

    def train_step(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = plain(*args, **options)
        if calls == 4 and dist.get_rank() == 0:
            while run_dir(tree).exists():  # a save that is being written puts files where some were removed
                shutil.rmtree(run_dir(tree), ignore_errors=True)
        return result

    with patch.object(run_module, "train_step", train_step):
        return on_rank(tree)


@pytest.mark.full
def test_a_run_folder_that_is_removed_is_made_again_and_said(tmp_path: Path) -> None:
    tree = run_file(tmp_path, checkpoint__every=2)
    ran = run_ranks(2, with_folder_removed, tree)[0]
    assert ran.error is None
    assert "WARNING" in ran.screen and "was removed while this run writes to it; it is made again" in ran.screen
    assert column(tree, "step") == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (run_dir(tree) / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert (run_dir(tree) / "run.yaml").read_text() == RunConfig.model_validate(tree).to_yaml()
    assert json.loads((run_dir(tree) / "spread.json").read_text())["world"] == 2
    assert [start.how for start in load(run_dir(tree)).starts] == ["finished"]


@pytest.mark.full
def test_damaged_lines_and_odd_samples_stop_no_resume(tmp_path: Path) -> None:
    tree = run_file(tmp_path, train__max_steps=2, sample__prompts=["x"], sample__every=1)
    assert train(tree).error is None
    metrics = run_dir(tree) / "metrics.jsonl"
    first, second = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(first[:40] + "\n" + second + '{"step": 3, "tr')
    with (run_dir(tree) / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 2, "prompt": "x", "text": "\u2028 \u2029 \x85"}, ensure_ascii=False) + "\n")
    tree["train"]["max_steps"] = 3
    ran = train(tree)
    assert ran.error is None
    assert f"{metrics}:1 is not a row of JSON, and 1 more: set aside in {metrics}.damaged" in ran.screen
    assert column(tree, "step") == [2, 3]
    samples = json_lines.read(run_dir(tree) / "samples.jsonl")
    assert [row["step"] for row in samples.rows] == [1, 2, 2, 3] and not samples.damaged
    assert samples.rows[2]["text"] == "\u2028 \u2029 \x85"


# ---- room for checkpoints, by arithmetic ---------------------------------------------------------------------------


def with_free(tree: dict[str, Any], free: int) -> Ran:
    """Train on this rank, on a disk that has `free` bytes; the size of a checkpoint is said."""
    plain = preflight.checkpoint_bytes

    def checkpoint_bytes(model: Any, config: RunConfig) -> int:
        size = plain(model, config)
        print(f"one takes {size}")
        return size

    with ExitStack() as stack:
        stack.enter_context(
            patch.object(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(total=10**12, free=free))
        )
        stack.enter_context(patch.object(preflight, "checkpoint_bytes", checkpoint_bytes))
        return on_rank(tree)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [put_off("adamw"), "muon"])
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(optimizer: str, tmp_path: Path) -> None:
    tree = run_file(tmp_path, train__max_steps=1, optimizer__name=optimizer)
    ran = run_ranks(2, with_free, tree, 10**12)[0]
    assert ran.error is None and "DISK" not in ran.screen
    tensors = state(tree, 1).values()
    assert f"one takes {sum(tensor.numel() * tensor.element_size() for tensor in tensors)}\n" in ran.screen


@pytest.mark.full
def test_a_disk_too_small_is_said_before_the_first_step(tmp_path: Path) -> None:
    tree = run_file(tmp_path, checkpoint__every=1, checkpoint__keep=3)
    refused = run_ranks(2, with_free, tree, 30_000)
    assert all(isinstance(ran.error, UserError) and ran.error.exit_code == 2 for ran in refused)
    assert "a checkpoint takes" in str(refused[0].error) and "run.dir" in str(refused[0].error)
    assert not (run_dir(tree) / "metrics.jsonl").exists()
    size = int(refused[0].screen.split("one takes ")[1].split()[0])
    tight = run_ranks(2, with_free, tree, 2 * size)[0]
    assert tight.error is None
    assert "saving will fail: 3 checkpoints of" in tight.screen and "set checkpoint.keep: 1" in tight.screen


@pytest.mark.parametrize(
    "held, keep, saves, more",
    [
        ([], 3, 1, 10),
        ([], 3, 2, 20),
        ([], 3, 9, 40),  # three, and one in flight
        ([10], 3, 9, 30),
        ([10, 10, 10], 3, 9, 10),
        ([10, 10, 10], 1, 9, 10),  # those beyond `keep` go after the first
        ([4, 4, 4], 3, 9, 28),  # smaller ones of an earlier optimizer
        ([90, 10], 1, 2, 10),
    ],
)
def test_an_old_checkpoint_makes_room_once_a_new_one_is_there(
    held: list[int], keep: int, saves: int, more: int
) -> None:
    assert preflight.more_bytes(10, held, keep=keep, saves=saves) == more


@pytest.mark.parametrize("every", [0, 1, 3, 5, 100])
def test_saves_to_come_are_counted(every: int) -> None:
    config = RunConfig.model_validate({"checkpoint": {"every": every}})
    for step in range(11):
        due = [each for each in range(step + 1, 11) if (every and each % every == 0) or each == 10]
        assert preflight.saves_left(config, step, 10) == len(due)


def test_the_best_need_room_beside_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three kept ones, one is the best, and a fourth is written beside them."""
    config = RunConfig.model_validate(run_file(tmp_path, checkpoint__keep=2, checkpoint__keep_best=1, eval__every=1))
    config.run_dir.mkdir()
    monkeypatch.setattr(preflight, "checkpoint_bytes", lambda *_: 10)
    free = dict.fromkeys((40, 39, 29), "")
    for bytes_ in free:
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _, b=bytes_: SimpleNamespace(total=100, free=b))
        free[bytes_] = preflight.check_disk(Mock(), config, step=0, total_steps=9)
    assert not free[40] and "set checkpoint.keep: 1, " in free[39]
    assert "3 checkpoints of" in free[29] and "set checkpoint.keep" not in free[29]


def test_saves_of_the_best_are_counted_too() -> None:
    """One at each validation, though some may fall on the same step as another."""
    config = RunConfig.model_validate({"checkpoint": {"every": 0, "keep_best": 1}, "eval": {"every": 3}})
    assert [preflight.saves_left(config, step, 10) for step in (0, 2, 3, 8, 9, 10)] == [4, 4, 3, 2, 1, 0]


# ---- folders that cannot be written --------------------------------------------------------------------------------


def refusing(error: OSError, below: Path) -> Callable[..., None]:
    """`os.mkdir` of a filesystem that is read-only at `below`."""
    plain = os.mkdir

    def mkdir(path: Any, *args: Any, **options: Any) -> None:
        if str(path).startswith(str(below)):
            raise OSError(error.errno, error.strerror, str(path))
        plain(path, *args, **options)

    return mkdir


@pytest.mark.parametrize("start", [claim_fresh, open_folder])
def test_a_read_only_run_folder_is_the_users(
    start: Callable[[RunConfig], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.model_validate({"run": {"dir": str(tmp_path / "ro")}})
    monkeypatch.setattr(os, "mkdir", refusing(READ_ONLY, tmp_path / "ro"))
    with pytest.raises(UserError, match="Read-only file system") as caught:
        start(config)
    assert caught.value.exit_code == 2 and "run.dir" in str(caught.value.fix)
    monkeypatch.undo()
    (tmp_path / "ro").write_text("a file")
    with pytest.raises(UserError, match=f"cannot write {tmp_path / 'ro' / 'demo'}"):
        start(config)


def test_a_place_for_checkpoints_that_is_not_there_is_refused_before_the_first_step(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"run": {"dir": str(tmp_path)}})
    place = config.run_dir / "checkpoints"
    config.run_dir.mkdir()
    place.symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match=f"{place} is a link to {tmp_path}/unmounted, which is not there") as caught:
        open_folder(config)
    assert "run.dir" in str(caught.value.fix)
    (tmp_path / "unmounted").mkdir()
    open_folder(config)
    place.unlink()
    place.touch()
    with pytest.raises(UserError, match=f"cannot write {place}.*: Not a directory"):
        open_folder(config)


def test_a_failure_that_cannot_be_left_beside_the_logs_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    leave_failure(tmp_path / "file" / "logs", 0, UserError("what went wrong", fix="a way out"))
    assert "what went wrong\na way out\n" in capsys.readouterr().err


def test_a_log_that_cannot_be_written_shows_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import logging

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise NO_SPACE

    before, raises = logging.getLogger().handlers[:], logging.raiseExceptions
    try:
        worker._log_to(tmp_path / "rank-0.log", whole=False)
        logging.getLogger().handlers[-1].stream = Full()  # type: ignore[attr-defined]
        logging.getLogger().error("this cannot be written")
    finally:
        logging.getLogger().handlers[:], logging.raiseExceptions = before, raises
        logging.captureWarnings(False)
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_under_a_library_in_rust_is_known() -> None:
    said = files.of_system(Exception("Error while serializing: I/O error: No space left (os error 28)"))
    assert said is not None and files.is_users(said) and said.errno == errno.ENOSPC
    assert files.of_system(Exception("another")) is None and files.of_system(NO_SPACE) is NO_SPACE


def test_a_failure_needs_no_room_that_a_full_disk_may_not_have(tmp_path: Path) -> None:
    with room_for_failures(tmp_path, 2):
        before = (tmp_path / ".failure-0.json").stat()
        leave_failure(tmp_path, 0, UserError("what went wrong", fix="a way out"))
    (left,) = tmp_path.iterdir()
    assert left.stat().st_ino == before.st_ino and left.stat().st_blocks <= before.st_blocks
    assert failures(tmp_path)[0]["what"] == "what went wrong"


def test_a_full_disk_is_the_user_s_to_mend(tmp_path: Path) -> None:
    """No restart helps."""
    said = "^cannot write a file of the run: No space left on device\nfree space$"
    with pytest.raises(UserError, match=said), worker._in_words(World()):
        raise NO_SPACE
