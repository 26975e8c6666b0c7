"""W&B, MLflow and Trackio as places of `log.to`: what they are told, once, and that they cannot stop a run."""

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fivefold.config import RunConfig, check_supported, load_config
from fivefold.core.errors import UserError
from fivefold.training.display import Sample
from fivefold.training.trackers import _ADVICE, TRACKERS, TrackerSink
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training.bodies import Ran, Stopped, column, metrics, on_rank, run_dir, run_file
from tests.training.trackers import NAMES, Told, stand_ins

ALL = ["jsonl", *NAMES]


def train_tracked(tree: dict[str, Any], faults: dict[str, Any], options: dict[str, Any]) -> tuple[Ran, dict[str, Told]]:
    with stand_ins(**faults) as told:
        return on_rank(tree, **options), told


def train(
    tree: dict[str, Any], faults: dict[str, Any] | None = None, *, world: int = 1, **options: Any
) -> tuple[Ran, dict[str, Told]]:
    """Train on `world` ranks, of which the first alone may speak to trackers."""
    first, *others = run_ranks(world, train_tracked, tree, faults or {}, options)
    for other in others:
        assert not any(told.started or told.rows for told in other[1].values())
        assert str(first[0].error) == str(other[0].error)
    return first


@pytest.mark.full
def test_each_is_told_the_run_its_config_and_every_row(tmp_path: Path) -> None:
    tree = run_file(tmp_path, log__to=ALL, data__validation=str(tmp_path / "corpus.txt"), eval__every=3)
    ran, told = train(tree, world=2)
    assert ran.error is None
    for name in NAMES:
        expected = [
            (row["step"], {key: value for key, value in row.items() if key != "step" and value is not None})
            for row in metrics(tree)
        ]
        assert told[name].rows == expected and told[name].steps == [1, 2, 3, 4, 5, 6], name
        assert "eval/loss" in told[name].rows[2][1]
        assert told[name].started[0]["name"] == "run"
    assert told["wandb"].config["optimizer"]["learning_rate"] == 1e-2
    assert told["mlflow"].config["optimizer.learning_rate"] == "0.01"
    assert told["trackio"].config["optimizer.learning_rate"] == 1e-2
    assert told["wandb"].started[0] | {"id": ""} == {
        "id": "", "resume": "allow", "project": "fivefold", "name": "run", "dir": str(run_dir(tree)),
    }  # fmt: skip
    assert [told[name].ended for name in NAMES] == [[0], ["FINISHED"], ["finished"]]


@pytest.mark.full
def test_each_is_sent_the_samples_of_a_step_as_a_table(tmp_path: Path) -> None:
    tree = run_file(
        tmp_path, log__to=[*ALL, "tensorboard"], train__max_steps=4, checkpoint__every=2, sample__every=2,
        sample__prompts=["der "], sample__messages=["Wer?"], sample__max_new_tokens=3,
    )  # fmt: skip
    ran, told = train(tree)
    assert ran.error is None
    rows = [json.loads(line) for line in (run_dir(tree) / "samples.jsonl").read_text().splitlines()]
    columns = {
        step: {name: [row[name] for row in rows if row["step"] == step] for name in ("step", "prompt", "text")}
        for step in (2, 4)
    }
    assert columns[4]["prompt"] == ["der ", "user: Wer?\nassistant: "]
    for name in NAMES:
        steps = (None, None) if name == "mlflow" else (2, 4)
        assert told[name].tables == [(steps[0], columns[2]), (steps[1], columns[4])], name
    events = EventAccumulator(str(run_dir(tree) / "tensorboard")).Reload()
    (first, second), tag = events.Tensors("samples/1/text_summary"), columns[2]["text"][1]
    assert [first.step, second.step] == [2, 4]
    written = first.tensor_proto.string_val[0].decode()
    assert written == "".join(f"    {line}\n" for line in f"user: Wer?\nassistant: {tag}".split("\n"))


@pytest.mark.full
def test_nothing_is_imported_unless_asked(tmp_path: Path) -> None:
    ran, told = train(run_file(tmp_path, train__max_steps=1), {"fail_to_start": True})
    assert ran.error is None and not any(each.started for each in told.values())


@pytest.mark.full
def test_a_run_that_goes_on_goes_on_there_and_sends_no_row_twice(tmp_path: Path) -> None:
    tree = run_file(tmp_path, log__to=ALL, train__max_steps=7, checkpoint__every=3)
    ran, first = train(tree, stop_at=6)
    assert isinstance(ran.error, Stopped)
    assert [first[name].ended for name in NAMES] == [[1], ["FAILED"], ["finished"]]
    ran, second = train(tree)
    assert ran.error is None and column(tree, "step") == [1, 2, 3, 4, 5, 6, 7]  # from step 3
    for name in NAMES:
        assert first[name].steps == [1, 2, 3, 4, 5] and second[name].steps == [6, 7], name
    assert first["wandb"].started[0]["id"] == second["wandb"].started[0]["id"]
    assert second["mlflow"].started == [{"id": "3f0e", "name": None}] and not second["mlflow"].config
    assert [each["trackio"].started[0]["resume"] for each in (first, second)] == ["never", "allow"]


@pytest.mark.full
def test_a_tracker_asked_for_later_gets_the_rows_from_there(tmp_path: Path) -> None:
    tree = run_file(tmp_path, log__to=["jsonl"], train__max_steps=7, checkpoint__every=3)
    train(tree, stop_at=6)
    tree["log"]["to"] = ALL
    _, told = train(tree)
    assert [told[name].steps for name in NAMES] == [[4, 5, 6, 7]] * 3


@pytest.mark.full
def test_a_run_that_starts_again_is_another_one(tmp_path: Path) -> None:
    """It was killed before its first checkpoint, so that nothing goes on."""
    tree = run_file(tmp_path, log__to=ALL, train__max_steps=4)
    (_, first), (_, second) = train(tree, stop_at=3), train(tree)
    assert all(second[name].steps == [1, 2, 3, 4] for name in NAMES)
    assert first["wandb"].started[0]["id"] != second["wandb"].started[0]["id"]


@pytest.mark.full
def test_one_that_fails_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    tree = run_file(tmp_path, log__to=ALL)
    ran, told = train(tree, {"fail_at": 3}, world=2)
    assert ran.error is None and column(tree, "step") == [1, 2, 3, 4, 5, 6]
    assert sorted(re.findall(r"note: (.*)", ran.screen)) == sorted(
        f"{name} failed: no route to host; the run goes on without it" for name in NAMES
    )
    assert all(told[name].steps == [1, 2, 3] and not told[name].ended for name in NAMES)


@pytest.mark.full
@pytest.mark.parametrize("name", [NAMES[0], *map(put_off, NAMES[1:])])
def test_one_that_does_not_start_is_an_error_of_a_new_run_only(tmp_path: Path, name: str) -> None:
    tree = run_file(tmp_path, log__to=[name], checkpoint__every=3)
    ran, _ = train(tree, {"fail_to_start": True}, world=2)
    assert (
        type(ran.error) is UserError
        and ran.error.what == f"log.to names {name}, which does not start: no route to host"
    )
    assert not (run_dir(tree) / "metrics.jsonl").exists()
    train(tree, stop_at=5)
    ran, _ = train(tree, {"fail_to_start": True})
    assert ran.error is None and f"note: {name} failed: no route to host" in ran.screen
    assert column(tree, "step") == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_what_the_environment_says_is_left_to_the_tracker(tmp_path: Path) -> None:
    tree = run_file(tmp_path, log__to=["wandb"], train__max_steps=1)
    told = run_ranks(1, with_variables, tree)[0]
    assert told["wandb"].started[0] | {"id": ""} == {"id": "", "resume": "allow", "project": "", "name": "", "dir": ""}


def with_variables(tree: dict[str, Any]) -> dict[str, Told]:
    assert dist.get_world_size() == 1
    with patch.dict(os.environ, {"WANDB_PROJECT": "mine", "WANDB_NAME": "n", "WANDB_DIR": "/nowhere"}):
        return train_tracked(tree, {}, {})[1]


def test_the_run_that_the_environment_names_is_that_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another than that of the attempt before gets the rows again that a resume computes again."""
    config = RunConfig.model_validate(run_file(tmp_path))
    config.run_dir.mkdir()
    (config.run_dir / "metrics.jsonl").write_text('{"step": 4, "train/loss": 1.0}\n')
    monkeypatch.setenv("WANDB_RESUME", "must")
    for named, known, rows in (("mine", None, [3]), ("mine", "mine", []), ("mine", "other", [3]), ("", "other", [])):
        monkeypatch.setenv("WANDB_RUN_ID", named)
        (config.run_dir / "trackers.json").write_text(json.dumps({"wandb": known} if known else {}))
        with stand_ins() as told:
            TrackerSink("wandb", config, last_step=2, say=print).write({"step": 3, "train/loss": 1.0})
        assert told["wandb"].started[0]["id"] == (named or known) and told["wandb"].started[0]["resume"] == ""
        assert told["wandb"].steps == rows
        assert json.loads((config.run_dir / "trackers.json").read_text()) == {"wandb": named or known}


@pytest.mark.parametrize("name", ["tensorboard", *NAMES])
def test_a_package_that_is_not_there_is_said_before_anything_starts(name: str) -> None:
    config = load_config(None, [f"log.to=[jsonl, {name}]"])
    with patch("fivefold.config.schema.find_spec", lambda package: None), pytest.raises(UserError) as caught:
        check_supported(config)
    assert str(caught.value).splitlines()[:2] == [f"log.to names {name}, which is not installed", f"pip install {name}"]
    assert len(str(caught.value).splitlines()) == 3
    with stand_ins():
        check_supported(config)


@pytest.mark.full
def test_the_ids_are_kept_in_the_run_folder(tmp_path: Path) -> None:
    tree = run_file(tmp_path, log__to=ALL, train__max_steps=1)
    _, told = train(tree)
    ids = json.loads((run_dir(tree) / "trackers.json").read_text())
    assert ids == {"wandb": told["wandb"].started[0]["id"], "mlflow": "3f0e", "trackio": "run"}


def test_what_an_earlier_attempt_sent_is_not_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed after step 4, and goes on from step 2."""
    config = RunConfig.model_validate(run_file(tmp_path))
    config.run_dir.mkdir()
    (config.run_dir / "trackers.json").write_text('{"wandb": "known"}')
    (config.run_dir / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "train/loss": 1.0}}\n' for step in (2, 4))
    )
    told = Mock(id="known")
    monkeypatch.setitem(TRACKERS, "wandb", lambda *_: told)
    sink = TrackerSink("wandb", config, last_step=2, say=print)
    for step in (4, 6):
        sink.write({"step": step, "train/loss": 1.0})
        sink.samples([Sample(step, "a", "b"), Sample(step, "c", "d")])
    told.log.assert_called_once_with({"train/loss": 1.0}, 6)
    told.table.assert_called_once_with({"step": [6, 6], "prompt": ["a", "c"], "text": ["b", "d"]}, 6)


def test_a_run_that_goes_on_replaces_the_rows_of_tensorboard(tmp_path: Path) -> None:
    """Those after the step from which it goes on. TensorBoard has no ids to keep."""
    config = RunConfig.model_validate(run_file(tmp_path))
    config.run_dir.mkdir()
    for last_step, steps in ((0, (1, 2, 3)), (1, (2,))):
        sink = TrackerSink("tensorboard", config, last_step=last_step, say=print)
        for step in steps:
            sink.write({"step": step, "tokens": 7 * step})
        sink.close()
    events = EventAccumulator(str(config.run_dir / "tensorboard")).Reload().Scalars("tokens")
    assert [(event.step, event.value) for event in events] == [(1, 7.0), (2, 14.0)]
    assert not (config.run_dir / "trackers.json").exists()


def test_an_id_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    config, said = RunConfig.model_validate(run_file(tmp_path)), list[str]()
    (config.run_dir / "trackers.json").mkdir(parents=True)
    with stand_ins() as told:
        TrackerSink("wandb", config, last_step=0, say=said.append).write({"step": 1, "train/loss": 1.0})
    assert told["wandb"].steps == [1]
    assert re.fullmatch(r".*trackers\.json cannot be written: .*; a resume begins a new wandb run", said[0])


def test_mlflow_gets_values_that_it_keeps_and_its_own_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.model_validate(run_file(tmp_path, sample__prompts=["a" * 9999]))
    config.run_dir.mkdir()
    for variable, expected in (("", ["fivefold"]), ("MLFLOW_EXPERIMENT_NAME", []), ("MLFLOW_EXPERIMENT_ID", [])):
        experiments: list[str] = []
        with stand_ins() as told, monkeypatch.context() as inside:
            inside.setattr("mlflow.set_experiment", experiments.append)
            if variable:
                inside.setenv(variable, "7")
            TrackerSink("mlflow", config, last_step=0, say=print)
        assert experiments == expected and len(told["mlflow"].config["sample.prompts"]) == 6000


def test_each_tracker_has_advice() -> None:
    assert _ADVICE.keys() == TRACKERS.keys()
