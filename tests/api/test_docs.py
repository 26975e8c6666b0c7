"""The examples of docs/howto/python.md run, under every layout that the page names."""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
import yaml

import fivefold as ff
from tests.commands import as_process
from tests.pages import ROOT, blocks
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training.bodies import run_file

PAGE = ROOT / "docs" / "howto" / "python.md"
BLOCKS = [block.text for block in blocks(PAGE) if block.language == "python"]
LOOP, *PIECES, COMMANDS = BLOCKS


def run_page(layout: str, folder: Path) -> tuple[list[tuple[float, float]], list[str]]:
    """The loop, and what comes after it in the page, on this rank: losses and norms, and what is left on disk."""
    seen: list[tuple[float, float]] = []
    step = ff.train_step

    def train_step(*args: Any, **options: Any) -> Any:
        result = step(*args, **options)
        seen.append((result.loss, result.grad_norm))
        return result

    loop = LOOP.replace('"shard2"', f'"{layout}"').replace("destroy_process_group()", "barrier()")
    names: dict[str, Any] = {}
    before = os.getcwd()
    os.chdir(folder)
    try:
        with patch.object(ff, "train_step", train_step, create=True):
            exec(compile(loop, "docs/howto/python.md", "exec"), names)
        for block in PIECES:
            exec(compile(block, "docs/howto/python.md", "exec"), names)
        dist.barrier()
    finally:
        os.chdir(before)
    return seen, sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    ((seen, _),) = run_ranks(1, run_page, "single", tmp_path_factory.mktemp("single"))
    return seen


@pytest.mark.full
@pytest.mark.parametrize("layout", ["shard2", "pp2", *map(put_off, ("dp2", "tp2", "cp2"))])
def test_the_page_runs_and_its_numbers_stay_the_same(
    layout: str, tmp_path: Path, one_process: list[tuple[float, float]]
) -> None:
    (seen, files), (other, _) = run_ranks(2, run_page, layout, tmp_path)
    assert len(seen) == 3 and seen == other
    np.testing.assert_allclose(seen, one_process, rtol=1e-5)
    assert files == ["checkpoint", "my-adapter", "my-model", "my-model-bf16"]


@pytest.mark.full
def test_the_commands_run(tmp_path: Path) -> None:
    tree = run_file(tmp_path, train__max_steps=2)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    (tmp_path / "block.py").write_text(COMMANDS, encoding="utf-8")
    said = as_process([sys.executable, "block.py"], tmp_path)
    *_, run, best = said.splitlines()
    assert f"saved {tmp_path}" in said and str(tmp_path / "run") in run and best == "None"


def test_the_loop_of_the_page_is_short_and_its_layouts_are_those_that_are_run() -> None:
    lines = [line for line in LOOP.splitlines() if line.strip() and not line.startswith(("#", "import", "from"))]
    assert len(lines) <= 35 and '"shard2"' in LOOP
