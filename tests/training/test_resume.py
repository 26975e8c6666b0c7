"""A run that stops and goes on is the run that was left alone."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.core.errors import UserError
from tests.tiers import put_off
from tests.training.bodies import Stopped, column, metrics, run_dir, run_file, same, state, train, write_corpus

pytestmark = pytest.mark.full

NAMES = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_seen", "train/skipped_steps")


@dataclass(frozen=True)
class Two:
    """The run left alone, and one that saved at step 3 and was stopped before step 6 of 7."""

    alone: dict[str, Any]
    stopped: dict[str, Any]
    folder: Path

    def copy(self, name: str) -> dict[str, Any]:
        """Another stopped run to go on with."""
        tree = run_file(self.folder, **OPTIONS, run__name=name)
        shutil.copytree(run_dir(self.stopped), run_dir(tree))
        return tree


OPTIONS: dict[str, Any] = {"train__max_steps": 7, "checkpoint__every": 3}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    folder = tmp_path_factory.mktemp("resume")
    alone, stopped = (run_file(folder, **OPTIONS, run__name=name) for name in ("alone", "stopped"))
    assert train(alone).error is None
    assert isinstance(train(stopped, stop_at=6).error, Stopped)
    assert column(stopped, "step") == [1, 2, 3, 4, 5]  # two rows that the checkpoint knows nothing of
    return Two(alone, stopped, folder)


def test_resumed_is_bitwise_the_run_left_alone(two: Two) -> None:
    tree = two.copy("resumed")
    with (run_dir(tree) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/lo')  # killed while it wrote
    ran = train(tree)
    assert ran.error is None and "step 3 of 7" in ran.screen
    assert column(tree, "step") == [1, 2, 3, 4, 5, 6, 7]  # cut back, each once
    for name in NAMES:
        assert column(tree, name) == column(two.alone, name), name
    assert len(set(column(tree, "train/learning_rate")[2:])) == 5  # a schedule that would show a shift
    for step in (3, 6, 7):
        assert same(state(tree, step), state(two.alone, step))
    assert {name.split("/")[0] for name in state(tree, 7)} == {"weight", "exp_avg", "exp_avg_sq"}


def test_delayed_scaling_goes_on_bitwise(tmp_path: Path) -> None:
    """The scales of the step after a resume follow from the steps before it."""
    options: dict[str, Any] = {"train__max_steps": 5, "checkpoint__every": 3, "precision__fp8": "delayed"}
    alone, stopped = (run_file(tmp_path, **options, run__name=name) for name in ("alone", "stopped"))
    assert train(alone).error is None
    assert isinstance(train(stopped, stop_at=4).error, Stopped)
    for folder in (run_dir(stopped) / "checkpoints").glob("*0004"):
        shutil.rmtree(folder)
    assert train(stopped).error is None
    for name in NAMES:
        assert column(stopped, name) == column(alone, name), name
    assert same(state(stopped, 5), state(alone, 5))


def test_dropout_goes_on_bitwise_and_the_same_under_another_layout(tmp_path: Path) -> None:
    """What the step after a resume drops follows from its number."""
    overrides, adapter = {"attention_dropout": 0.1}, {"name": "lora", "rank": 4, "dropout": 0.2}
    options: dict[str, Any] = {"train__max_steps": 5, "checkpoint__every": 3, "precision__compute": "fp64"}
    options |= {"train__neftune_noise_alpha": 5}
    options |= {"sample__every": 1, "sample__prompts": ["der "], "sample__max_new_tokens": 2}
    alone, stopped, other = (run_file(tmp_path, **options, run__name=name) for name in ("alone", "stopped", "other"))
    for tree in (alone, stopped, other):
        tree["model"]["overrides"], tree["adapter"] = overrides, adapter
    assert train(alone).error is None
    assert isinstance(train(stopped, stop_at=5).error, Stopped)
    for folder in (run_dir(stopped) / "checkpoints").glob("*0004"):
        shutil.rmtree(folder)
    shutil.copytree(run_dir(stopped), run_dir(other))
    assert train(stopped).error is None
    for name in NAMES:
        assert column(stopped, name) == column(alone, name), name
    drawn = [(run_dir(tree) / "samples.jsonl").read_text() for tree in (alone, stopped)]
    assert drawn[0] == drawn[1] and drawn[0].count("\n") == 5
    assert same(state(stopped, 5), state(alone, 5))
    other["layout"] = {"tp": 2}
    assert train(other).error is None
    assert column(other, "train/loss") == pytest.approx(column(alone, "train/loss"), rel=1e-9)


def test_a_mixture_goes_on_bitwise_and_its_weights_may_not_change(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a.txt", characters=1009, seed=1)
    write_corpus(tmp_path / "b.txt", characters=2003, seed=2)
    mixture = [{"path": str(tmp_path / "a.txt"), "weight": 2}, {"path": str(tmp_path / "b.txt"), "weight": 0.7}]
    alone, stopped = (
        run_file(tmp_path, **OPTIONS, run__name=name, data__train=mixture) for name in ("alone", "stopped")
    )
    ran = train(alone)
    assert ran.error is None and "weight 0.7 = " in ran.screen
    assert isinstance(train(stopped, stop_at=6).error, Stopped)
    changed = {**stopped, "data": {**stopped["data"], "train": [{**mixture[0], "weight": 3}, mixture[1]]}}
    error = train(changed).error
    assert type(error) is UserError and error.what.startswith("data.train[0].weight is 3.0, but ")
    assert train(stopped).error is None
    for name in NAMES:
        assert column(stopped, name) == column(alone, name), name
    assert same(state(stopped, 7), state(alone, 7))


@pytest.mark.parametrize(
    ("layout", "world"),
    [({"tp": 2}, 2), put_off({"dp_shard": 2, "tp": 2}, 4), put_off({"dp_replicate": 1}, 1)],
)
def test_resumed_under_another_layout_follows(two: Two, layout: dict[str, int], world: int) -> None:
    tree = two.copy(f"tp{layout.get('tp', 1)}-{world}")
    tree["layout"] = layout
    assert train(tree, world=world).error is None
    assert column(tree, "train/loss")[3] == pytest.approx(column(two.alone, "train/loss")[3], rel=1e-6)
    assert column(tree, "train/loss") == pytest.approx(column(two.alone, "train/loss"), rel=1e-4)
    for name in ("train/learning_rate", "train/tokens_seen"):
        assert column(tree, name) == column(two.alone, name)
    assert same(state(tree, 3), state(two.alone, 3))  # what it started from is another run's, unchanged
    found, expected = state(tree, 7), state(two.alone, 7)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_a_finished_run_says_so(two: Two) -> None:
    before = (run_dir(two.alone) / "metrics.jsonl").read_text()
    ran = train(two.alone)
    assert ran.error is None and "this run is finished: 7 of 7 steps are done" in ran.screen
    assert (run_dir(two.alone) / "metrics.jsonl").read_text() == before


def test_a_finished_run_goes_on_when_it_is_made_longer(two: Two) -> None:
    tree = run_file(two.folder, **OPTIONS, run__name="longer")
    shutil.copytree(run_dir(two.alone), run_dir(tree))
    tree["train"]["max_steps"] = 9
    assert train(tree).error is None
    assert column(tree, "step") == list(range(1, 10))
    assert column(tree, "train/loss")[:7] == column(two.alone, "train/loss")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("optimizer", "learning_rate", 2e-2),
        put_off("optimizer", "weight_decay", 0.0),
        put_off("scheduler", "warmup_steps", 3),
        ("train", "seed", 8),
        put_off("train", "global_batch_size", 4),
        ("data", "seq_length", 59),
        ("model", "overrides", {"rms_norm_eps": 1e-3}),
    ],
)
def test_what_decides_the_run_may_not_change(two: Two, section: str, key: str, value: Any) -> None:
    tree = two.copy(f"changed-{key}")
    tree[section][key] = value
    before = (run_dir(tree) / "metrics.jsonl").read_text()
    error = train(tree).error
    assert type(error) is UserError and error.exit_code == 2
    assert error.what.startswith(f"{section}.{key} is ")
    assert (run_dir(tree) / "metrics.jsonl").read_text() == before  # nothing is lost by asking


def test_a_run_that_must_not_resume_does_not_overwrite(two: Two) -> None:
    tree = two.copy("never")
    tree["checkpoint"]["resume"] = "never"
    error = train(tree).error
    assert type(error) is UserError and "holds steps 3" in error.what and "run.name" in error.fix
    assert len(metrics(tree)) == 5


def test_skipped_steps_are_remembered(two: Two) -> None:
    tree = run_file(two.folder, **OPTIONS, run__name="skipped")
    assert isinstance(train(tree, inf_gradient=(2,), stop_at=5).error, Stopped)
    assert train(tree, inf_gradient=(1,)).error is None
    assert column(tree, "train/skipped_steps") == [0, 1, 1, 2, 2, 2, 2]


def test_the_export_at_the_end_is_that_of_the_last_step(two: Two) -> None:
    """Twice: the second time over the first one's."""
    from safetensors.torch import load_file

    tree = run_file(two.folder, run__name="exported", train__max_steps=2, checkpoint__export_hf=True)
    for steps in (2, 3, 3):
        tree["train"]["max_steps"] = steps
        assert train(tree).error is None
        exported = load_file(run_dir(tree) / "hf" / "model.safetensors")
        weights = {name.removeprefix("weight/"): t for name, t in state(tree, steps).items() if "weight/" in name}
        assert same(exported, weights)
