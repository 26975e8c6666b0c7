"""A run that copies its checkpoints to remote storage goes on from them on a machine that has none."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from fivefold.checkpoint import Remote, export
from fivefold.core.errors import RunFailed, UserError
from tests.training.bodies import Stopped, column, run_dir, run_file, same, state, train

pytestmark = pytest.mark.full

OPTIONS = {"train__max_steps": 7, "checkpoint__every": 2, "checkpoint__keep": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that nothing happened to."""
    tree = run_file(tmp_path_factory.mktemp("alone"), **OPTIONS)
    assert train(tree).error is None
    return tree


def test_a_run_goes_on_from_the_copies(tmp_path: Path, alone: dict[str, Any]) -> None:
    url = (tmp_path / "bucket").as_uri()
    moved = run_file(tmp_path, **OPTIONS, run__name="moved", checkpoint__remote=url)
    assert isinstance(train(moved, stop_at=6).error, Stopped)
    assert Remote(f"{url}/moved").steps() == [2, 4]
    shutil.rmtree(run_dir(moved))  # another machine
    ran = train(moved)
    assert ran.error is None and f"{url}/moved/checkpoints/step-000004" in ran.screen
    assert column(moved, "step") == [5, 6, 7]
    assert column(moved, "train/loss") == column(alone, "train/loss")[4:]
    assert same(state(moved, 7), state(alone, 7))
    assert Remote(f"{url}/moved").steps() == [6, 7]
    exported = export(f"{url}/moved", tmp_path / "out")
    assert exported.step == 7


def test_a_damaged_checkpoint_is_replaced_by_its_copy(tmp_path: Path, alone: dict[str, Any]) -> None:
    url = (tmp_path / "bucket").as_uri()
    tree = run_file(tmp_path, **OPTIONS, checkpoint__remote=url)
    assert isinstance(train(tree, stop_at=6).error, Stopped)
    file = run_dir(tree) / "checkpoints" / "step-000004" / "weight-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    ran = train(tree)
    assert ran.error is None and "DAMAGED" in ran.screen and f"{url}/run/checkpoints/step-000004" in ran.screen
    assert column(tree, "step") == [1, 2, 3, 4, 5, 6, 7]
    assert same(state(tree, 7), state(alone, 7))


def test_storage_that_refuses_costs_no_training(tmp_path: Path) -> None:
    """Here: a file where there should be a folder, from the second save on."""
    tree = run_file(tmp_path, **OPTIONS, checkpoint__remote=(tmp_path / "bucket").as_uri())
    assert isinstance(train(tree, stop_at=4).error, Stopped)
    shutil.rmtree(tmp_path / "bucket")
    (tmp_path / "bucket").write_text("")
    tree["train"]["max_steps"] = 5
    error = train(tree).error
    assert type(error) is RunFailed and "is saved, but not copied" in error.what  # the last save must be copied
    assert column(tree, "step") == [1, 2, 3, 4, 5] and state(tree, 5)  # whole, in the run folder


def test_a_run_that_must_not_resume_leaves_the_copies(tmp_path: Path) -> None:
    tree = run_file(tmp_path, **OPTIONS, checkpoint__remote=(tmp_path / "bucket").as_uri())
    assert train(tree).error is None
    shutil.rmtree(run_dir(tree))
    tree["checkpoint"]["resume"] = "never"
    error = train(tree).error
    assert type(error) is UserError and "holds steps 6, 7" in error.what


def test_storage_that_cannot_be_reached_is_said_before_the_first_step(tmp_path: Path) -> None:
    tree = run_file(tmp_path, **OPTIONS, checkpoint__remote="nonsense://bucket")
    error = train(tree).error
    assert type(error) is UserError and "checkpoint.remote" in error.what
    assert not (run_dir(tree) / "metrics.jsonl").exists()
