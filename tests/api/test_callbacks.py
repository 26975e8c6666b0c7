"""The callbacks of `ff.train`: what they are given, and what becomes of a run when one raises."""

import errno
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import yaml

import fivefold as ff
from fivefold.checkpoint import steps
from fivefold.config import RunConfig
from fivefold.launch.events import EventFile, Listener
from fivefold.launch.world import World
from fivefold.training import run as run_module
from tests.pool import run_ranks
from tests.training.bodies import run_file


@pytest.mark.full
def test_rows_and_folders_come_in_order_to_the_process_that_called(tmp_path: Path) -> None:
    told: list[Any] = []
    tree = run_file(tmp_path, train__max_steps=3, eval__every=2, checkpoint__every=2, log__every=2)
    tree["data"]["validation"] = tree["data"]["train"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    with patch.dict(os.environ, {"FIVEFOLD_CACHE": str(tmp_path / "cache")}):
        run = ff.train(
            tmp_path / "run.yaml",
            nproc=1,
            on_step=lambda row: told.append(("step", row["step"], row["train/loss"])),
            on_eval=lambda row: told.append(("eval", row["step"], row["eval/loss"])),
            on_save=lambda folder: told.append(("save", folder.name, (folder / "manifest.json").exists())),
        )
    assert [each[:2] for each in told if each[0] == "step"] == [("step", 1), ("step", 2), ("step", 3)]
    assert [each[:2] for each in told if each[0] == "eval"] == [("eval", 2), ("eval", 3)]
    assert [each for each in told if each[0] == "save"] == [("save", f"step-00000{n}", True) for n in (2, 3)]
    logged = {row["step"]: row["train/loss"] for row in run.metrics}
    assert all(loss == logged[step] for kind, step, loss in told if kind == "step" and step in logged)
    assert not list((run.path / "logs").glob("events*"))

    def enough(row: dict[str, Any]) -> None:
        raise KeyError(row["step"])

    with patch.dict(os.environ, {"FIVEFOLD_CACHE": str(tmp_path / "cache")}), pytest.raises(KeyError):
        ff.train(tmp_path / "run.yaml", {"train.max_steps": 2000}, nproc=1, on_step=enough)
    assert 3 < steps(run.path / "checkpoints")[-1] < 2000


def test_what_finds_no_space_is_told_later(tmp_path: Path) -> None:
    """A full disk ends no run: neither its rows nor what is told of them."""
    (path := tmp_path / "events.jsonl").touch()
    events, plain, is_full = EventFile(path), os.write, True

    def write(descriptor: int, content: bytes) -> int:
        if is_full and len(content) < 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(descriptor, content[:9] if is_full else content)  # some of it had room

    with patch.object(os, "write", write):
        events.tell("step", {"step": 1})
        events.tell("step", {"step": 2})
        is_full = False
        events.tell("save", Path("x"))
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["value"] for each in told] == [{"step": 1}, {"step": 2}, "x"]


def stopped_by_a_callback(tree: dict[str, Any]) -> str:
    """On a rank of a world that is there: `on_step` raises at step 2, on the first rank."""

    def on_step(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            raise KeyError("enough")

    listener = Listener(on_step=on_step)
    config = RunConfig.model_validate(tree)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    with patch.dict(os.environ, {"FIVEFOLD_CACHE": str(Path(config.run.dir) / "cache")}):
        try:
            with listener.raising():
                run_module.train(config, world, events=listener if world.is_first else None)
        except (KeyError, SystemExit) as error:
            return repr(error)
    return "went on"


@pytest.mark.full
def test_an_error_in_a_callback_stops_the_run_saved_and_is_raised(tmp_path: Path) -> None:
    tree = run_file(tmp_path)
    assert run_ranks(2, stopped_by_a_callback, tree) == ["KeyError('enough')", "Stopped(143)"]
    assert steps(tmp_path / "run" / "checkpoints") == [3]  # the step after it, the same one on every rank
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize("call", [lambda tree: ff.train(tree), lambda tree: ff.verify(tree, layouts=["tp2"])])
def test_overrides_in_the_place_of_the_run_file_are_told_apart(call: Any) -> None:
    with pytest.raises(ff.UserError, match=r"ff\.train\(None, \{\.\.\.\}\)"):
        call({"train.max_steps": 3})
