"""The run files of `examples/` train as they stand, and are run files still with the lines for GPUs."""

import json
import re
from pathlib import Path

import pytest

from fivefold.config import load_config
from tests.commands import fivefold

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "examples").glob("*.yaml"))
FOR_GPUS = re.compile(r"^(\w+): .*?  # GPUs: (.*)$", re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_as_it_stands(recipe: Path, tmp_path: Path) -> None:
    fivefold(["train", f"examples/{recipe.name}", "train.max_steps=2", f"run.dir={tmp_path}"], ROOT)
    lines = (tmp_path / recipe.stem / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2] and all(0 < line["train/loss"] < 6 for line in steps)
    assert ("rewards/margins" in steps[0]) == (recipe.stem == "preferences")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_three_lines_make_it_one_for_gpus(recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    assert [section for section, _ in FOR_GPUS.findall(text)] == ["model", "tokenizer", "data"]
    changed = tmp_path / "run.yaml"
    changed.write_text(FOR_GPUS.sub(r"\1: \2", text), encoding="utf-8")
    config = load_config(changed)
    assert not config.model.overrides and config.model.init == "pretrained" and config.data.seq_length >= 4096


@pytest.mark.full
def test_long_rows_fit_eight_gpus(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "long_rows.yaml").read_text(encoding="utf-8")
    command = next(re.finditer(r"^# +fivefold (plan .*)$", text, re.MULTILINE))[1].split()
    shown = fivefold(command, tmp_path)
    assert "8 rows of 32,768 tokens" in shown and re.search(r"^shard2\.cp4 .* best", shown, re.MULTILINE)
