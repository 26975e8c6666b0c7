"""The examples of docs/python.md run, under every layout that the page names."""

import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

import fivefold as ff
from tests.pool import run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
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
            exec(compile(loop, "docs/python.md", "exec"), names)
        for block in PIECES:
            exec(compile(block, "docs/python.md", "exec"), names)
        dist.barrier()
    finally:
        os.chdir(before)
    return seen, sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    ((seen, _),) = run_ranks(1, run_page, "single", tmp_path_factory.mktemp("single"))
    return seen


@pytest.mark.full
@pytest.mark.parametrize("layout", ["shard2", "dp2", "tp2", "cp2", "pp2"])
def test_the_page_runs_and_its_numbers_stay_the_same(
    layout: str, tmp_path: Path, one_process: list[tuple[float, float]]
) -> None:
    (seen, files), (other, _) = run_ranks(2, run_page, layout, tmp_path)
    assert len(seen) == 3 and seen == other
    np.testing.assert_allclose(seen, one_process, rtol=1e-5)
    assert files == ["checkpoint", "my-adapter", "my-model", "my-model-bf16"]


def test_the_loop_of_the_page_is_short_and_its_layouts_are_those_that_are_run() -> None:
    lines = [line for line in LOOP.splitlines() if line.strip() and not line.startswith(("#", "import", "from"))]
    assert len(lines) <= 35 and '"shard2"' in LOOP and "torchrun --nproc-per-node 2 loop.py" in PAGE
    compile(COMMANDS, "docs/python.md", "exec")  # run by tests/api/test_callbacks.py with a run file of its own
