"""Runs that train by a function of the user's own, which the run file names."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fivefold.checkpoint import agreement
from fivefold.config import RunConfig, check_supported, load_config
from fivefold.core.errors import UserError
from fivefold.core.named_code import NamedCode
from fivefold.training.preflight import agreed_fields
from tests.tiers import put_off
from tests.training.bodies import Stopped, column, run_file, same, state, train

FOCAL = """
import torch.nn.functional as F

def focal(logits, labels, row):
    nll = F.cross_entropy(logits, labels, reduction="none")
    return row["weight"] * (1 - (-nll).exp()) ** 2 * nll
"""


def tree_of(folder: Path, source: str = FOCAL, **changes: Any) -> dict[str, Any]:
    """A run over records with a weight each."""
    tree = run_file(folder, **changes)
    (folder / "my_loss.py").write_text(source)
    words = (folder / "corpus.txt").read_text(encoding="utf-8").split("\n")
    with (folder / "records.jsonl").open("w", encoding="utf-8") as file:
        for number, text in enumerate(words):
            print(json.dumps({"text": text, "weight": 0.5 + number % 3, "note": "x"}), file=file)
    tree["data"]["train"] = str(folder / "records.jsonl")
    tree["objective"] = {"name": "python", "path": f"{folder / 'my_loss.py'}:focal", "columns": ["weight"]}
    return tree


@pytest.mark.full
@pytest.mark.parametrize(("layout", "world"), [put_off({"tp": 2}, 2), ({"pp": 2}, 2), ({"dp_shard": 2, "cp": 2}, 4)])
def test_every_layout_trains_alike(tmp_path: Path, layout: dict[str, int], world: int) -> None:
    trees = [tree_of(tmp_path, run__name=name, train__max_steps=3) for name in ("alone", "laid")]
    assert train(trees[0], 1).error is None
    trees[1]["layout"] = layout
    assert train(trees[1], world).error is None
    assert column(trees[1], "train/loss") == pytest.approx(column(trees[0], "train/loss"), rel=2e-5)
    plain = run_file(tmp_path, run__name="plain", train__max_steps=3)
    plain["data"]["train"] = trees[0]["data"]["train"]
    assert train(plain, 1).error is None
    assert column(plain, "train/loss")[0] != pytest.approx(column(trees[0], "train/loss")[0], rel=0.05)


@pytest.mark.full
def test_resumed_it_is_bitwise_the_run_left_alone_and_a_changed_file_is_said(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train__max_steps": 5, "checkpoint__every": 2, "eval__every": 6}
    alone, stopped = (tree_of(tmp_path, run__name=name, **options) for name in ("alone", "stopped"))
    for tree in (alone, stopped):
        tree["data"]["validation"] = tree["data"]["train"]
    assert train(alone).error is None
    assert isinstance(train(stopped, stop_at=4).error, Stopped)
    ran = train(stopped)
    assert ran.error is None and "step 2 of 5" in ran.screen and "the code of" not in ran.screen
    assert column(stopped, "train/loss") == column(alone, "train/loss")
    assert same(state(stopped, 5), state(alone, 5))
    before = NamedCode.read(stopped["objective"]["path"], "objective.path").digest
    (tmp_path / "my_loss.py").write_text(FOCAL.replace("return ", "return 3 + 0 * "))
    after = NamedCode.read(stopped["objective"]["path"], "objective.path").digest
    ran = train(stopped | {"train": stopped["train"] | {"max_steps": 6}})
    assert ran.error is None and f"the code of objective.path {before} → {after}" in ran.screen
    assert column(stopped, "eval/loss")[-1] == 3  # evaluation, too, has the file's loss
    history = [json.loads(line) for line in (tmp_path / "stopped" / "history.jsonl").read_text().splitlines()]
    starts = [entry["code"] for entry in history if entry["event"] == "start"]
    assert starts[0] == {"objective.path": before} and starts[-1] == {"objective.path": after}


@pytest.mark.full
def test_losses_that_are_not_finite_skip_the_step_and_are_named(tmp_path: Path) -> None:
    broken = FOCAL.replace("* nll", "* nll + (nll * 0).log()")
    ran = train(tree_of(tmp_path, broken))
    assert ran.error is not None and "my_loss.py:4 focal: " in str(ran.error) and "are not finite" in str(ran.error)


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (FOCAL.replace("nll = F", "nll = G"), "my_loss.py:5 in focal: NameError: name 'G' is not defined"),
        (FOCAL.replace("return ", "return sum(nll) * "), "depends on the other tokens"),
        ("import nothing_like_it\n" + FOCAL, "my_loss.py:1: ModuleNotFoundError"),
        (FOCAL.replace("def focal(", "def focal"), "my_loss.py:4: SyntaxError"),
        ("focal = 3", "has a int called focal"), ("", "my_loss.py has no focal"),
    ],
)  # fmt: skip
def test_errors_of_the_file_are_those_of_every_rank(tmp_path: Path, source: str, said: str) -> None:
    error = train(tree_of(tmp_path, source)).error
    assert isinstance(error, UserError) and said in error.what


@pytest.mark.full
def test_a_record_without_its_number_is_named(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    with (tmp_path / "records.jsonl").open("a", encoding="utf-8") as file:
        print(json.dumps({"text": "abc", "weight": "much"}), file=file)
    error = train(tree).error
    assert isinstance(error, UserError) and "weight is 'much'" in error.what and "records.jsonl:" in error.what


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({"name": "python"}, "python needs objective.path"), ({"path": "a.py:f"}, "sft runs no code of a path"),
        ({"columns": ["weight"]}, "columns are for a function of your own"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(tmp_path: Path, objective: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate(run_file(tmp_path) | {"objective": objective})


def test_a_checkpoint_of_another_objective_has_no_keys_of_it(tmp_path: Path) -> None:
    """Those of versions without these keys go on. A file may lie elsewhere."""
    plain = agreement(RunConfig.model_validate(run_file(tmp_path)), "")
    assert not [key for key in plain if key.startswith("objective")]
    own = agreement(RunConfig.model_validate(tree_of(tmp_path)), "")
    assert own["objective.path"] == "my_loss.py:focal" and own["objective.columns"] == ["weight"]


def test_ranks_compare_what_is_in_the_file(tmp_path: Path) -> None:
    config, data, fields = RunConfig.model_validate(tree_of(tmp_path)), Mock(files={}), []
    for source in (FOCAL, FOCAL + "\n"):
        (tmp_path / "my_loss.py").write_text(source)
        fields.append(agreed_fields(config, data))
    assert [name for name in fields[0] if fields[0][name] != fields[1][name]] == ["the hash of objective.path"]


def test_a_path_is_relative_to_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the command line to the current folder."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.yaml").write_text("objective: {name: python, path: my_loss.py:focal}")
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("a/run.yaml")).objective.path == f"{tmp_path / 'a' / 'my_loss.py'}:focal"
    config = load_config(Path("a/run.yaml"), ["objective.path=own.py:focal"])
    assert config.objective.path == f"{tmp_path / 'own.py'}:focal"
    with pytest.raises(UserError, match=r"own\.py cannot be read"):
        check_supported(config)


def test_nothing_of_a_models_folder_is_run(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    tree["model"]["name_or_path"] = str(tmp_path)
    with pytest.raises(UserError, match="is in the folder of the model"):
        check_supported(RunConfig.model_validate(tree))


def test_a_file_runs_once_in_a_process_under_a_name_of_its_contents(tmp_path: Path) -> None:
    path = tmp_path / "counted.py"
    path.write_text("runs = []\nruns.append(1)\ndef f(): return len(runs)")
    code = NamedCode.read(f"{path}:f", "objective.path")
    assert code.load()() == NamedCode.read(f"{path}:f", "objective.path").load()() == 1
    assert code.load().__module__ == f"fivefold_named.counted_{code.digest}" in sys.modules
    assert not list(tmp_path.glob("__pycache__"))


def test_a_file_that_exits_and_a_path_with_a_nul_are_errors(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=r"exits\.py:2: SystemExit: 0"):
        NamedCode.read(f"{tmp_path / 'exits.py'}:f", "objective.path").load()
    with pytest.raises(UserError, match=r"objective\.path: .* cannot be read: embedded null byte"):
        NamedCode.read(f"{tmp_path}/a\0.py:f", "objective.path")
