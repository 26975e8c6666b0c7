"""Runs that tokenise while training (`data.streaming`): the same rows for every layout, and after a resume."""

import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.config import RunConfig
from fivefold.data import prepare, units
from tests.training.bodies import Stopped, column, run_dir, run_file, same, state, train

pytestmark = pytest.mark.full

UNIT = 211  # bytes of text: 19 units, so 3 windows an epoch
OPTIONS: dict[str, Any] = {"train__max_steps": 12, "checkpoint__every": 7, "train__check_every": 4}


def streaming(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """The file of a run on the small text, which is divided into small units."""
    tree = run_file(folder, **{**OPTIONS, **changes}, run__name=name)
    tree["data"] |= {"streaming": True, "train": str(folder / "lines.jsonl")}
    if not (folder / "lines.jsonl").exists():
        text = (folder / "corpus.txt").read_text(encoding="utf-8")
        lines = [f'{{"text": "{text[at : at + 37]}"}}'.replace("\n", " ") for at in range(0, len(text), 37)]
        (folder / "lines.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with patch.object(units, "unit_bytes", lambda _: UNIT):
        prepare(RunConfig.model_validate(tree), cache=folder / "cache")
    return tree


def test_a_resumed_run_and_another_layout_read_the_same_rows(tmp_path: Path) -> None:
    alone, stopped, sharded = (streaming(tmp_path, name) for name in ("alone", "stopped", "sharded"))
    ran = train(alone, world=1)
    assert ran.error is None, ran.screen
    assert int(re.search(r"an epoch is (\d+) windows", ran.screen)[1]) > 2  # type: ignore[index]
    assert isinstance(train(stopped, world=1, stop_at=10).error, Stopped)
    shutil.copytree(run_dir(stopped), run_dir(sharded))
    shutil.rmtree(tmp_path / "cache")  # another machine: what is missing is tokenised again
    streaming(tmp_path, "stopped")

    ran = train(stopped, world=1)
    assert ran.error is None and "step 7 of 12" in ran.screen
    for name in ("train/loss", "train/grad_norm", "train/tokens_seen"):
        assert column(stopped, name) == column(alone, name), name
    assert same(state(stopped, 12), state(alone, 12))

    assert train(sharded, world=2).error is None  # the standing checks compare the rows of the ranks
    assert column(sharded, "train/loss") == pytest.approx(column(alone, "train/loss"), rel=1e-5)
    assert column(sharded, "train/tokens_seen") == column(alone, "train/tokens_seen")
