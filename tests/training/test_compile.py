"""`train.compile: true`: one compiled region per block, shared by all blocks, whatever the documents are."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pool import run_ranks
from tests.training.bodies import column, on_rank, run_file, train

pytestmark = pytest.mark.full


def compiled(tree: dict[str, Any]) -> tuple[str, dict[str, int], int]:
    """(error, graph breaks by reason, graphs compiled) of a run on this rank."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    ran = on_rank(tree)
    return str(ran.error or ""), dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_blocks_compile_whole_and_once(tmp_path: Path) -> None:
    """Rows of one to four documents, evaluations and samples in between: three graphs of two blocks, three of the loss.

    The first batch's, the one whose number of documents is free, and that of evaluation; of the loss what comes before
    each exchange over tp, and the gradient.
    """
    rng = np.random.default_rng(1)
    text = "ab cd ef gh " * 9
    lines = [json.dumps({"text": text[: int(rng.integers(9, 90))]}) for _ in range(300)]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    plain, other = (
        run_file(
            tmp_path, data__train=str(tmp_path / "docs.jsonl"), data__validation=str(tmp_path / "docs.jsonl"),
            train__max_steps=8, eval__every=3, eval__max_tokens=800, sample__every=4, sample__prompts=["ab"],
            train__compile=compile, run__name=name,
        )
        for name, compile in (("plain", False), ("compiled", True))
    )  # fmt: skip
    train(plain, world=1)
    ((error, breaks, graphs),) = run_ranks(1, compiled, other, timeout=500)
    assert not error and not breaks
    assert 1 <= graphs <= 6
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        expected = column(plain, name)
        assert [v is None for v in column(other, name)] == [v is None for v in expected]
        assert [v for v in column(other, name) if v] == pytest.approx([v for v in expected if v], rel=1e-4)
