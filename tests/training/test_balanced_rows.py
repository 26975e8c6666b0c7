"""Runs whose rows are shared out by their cost: the losses of the run that shares by order, kills and resumes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.data.order import shares
from fivefold.parallel.layout import Layout
from fivefold.training.checks import _misread
from tests.data.helpers import write_jsonl
from tests.training.bodies import Stopped, column, run_file, same, state, train

TEXTS = ["".join(np.random.default_rng(n).choice(list("abcd e"), n * n % 97)) for n in range(97)]


@pytest.mark.full
def test_a_run_has_the_losses_of_one_that_shares_by_order_and_goes_on_bitwise(tmp_path: Path) -> None:
    """Under its standing checks: the ledger of rows counts them at every step."""
    options: dict[str, Any] = {
        "data__train": str(write_jsonl(tmp_path / "texts.jsonl", TEXTS)), "precision__compute": "fp64",
        "train__max_steps": 5, "train__check_every": 1, "checkpoint__every": 3,
    }  # fmt: skip
    plain = run_file(tmp_path, **options, run__name="plain")
    alone, stopped = (
        run_file(tmp_path, **options, run__name=name, data__balance_rows=True) for name in ("alone", "stopped")
    )
    assert train(plain).error is None
    ran = train(alone)
    assert ran.error is None and "shared out by cost" in ran.screen
    assert column(alone, "train/loss") == pytest.approx(column(plain, "train/loss"), rel=1e-10)
    assert column(alone, "train/tokens_seen") == column(plain, "train/tokens_seen")
    assert not same(state(alone, 5), state(plain, 5)), "other sums round otherwise"
    assert isinstance(train(stopped, stop_at=5).error, Stopped)
    assert train(stopped).error is None
    assert column(stopped, "train/loss") == column(alone, "train/loss")
    assert same(state(stopped, 5), state(alone, 5))
    plain["train"]["max_steps"], plain["data"]["balance_rows"] = 6, True  # it changes who computes what
    assert train(plain).error is None


def test_the_ledger_finds_rows_that_are_read_by_order() -> None:
    costs, hashes = np.array([1, 9, 3, 8]), [11, 12, 13, 14]
    shared = shares(4, data_ranks=2, micro_batch_size=1, costs=costs)
    layout = Layout.parse("shard2+mb1")
    assert _misread([[2, 12, 13], [2, 14, 11]], hashes, shared, layout, first=0) != []
    read = [[2, *(hashes[place] for place in shared[:, rank].flatten())] for rank in range(2)]
    assert _misread(read, hashes, shared, layout, first=0) == []
    by_order = [[2, 11, 13], [2, 12, 14]]
    found = [str(one) for one in _misread(by_order, hashes, shared, layout, first=0)]
    assert len(found) == 2 and "rank 0" in found[0], found


@pytest.mark.full
def test_a_run_under_cp_has_the_losses_of_one_whose_documents_are_not_ordered(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "data__train": str(write_jsonl(tmp_path / "texts.jsonl", TEXTS)), "precision__compute": "fp64",
        "train__max_steps": 2, "layout__cp": 2, "layout__cp_method": "ring", "checkpoint__every": 2,
    }  # fmt: skip
    plain = run_file(tmp_path, **options, run__name="plain")
    other = run_file(tmp_path, **options, run__name="ordered", data__balance_documents=2)
    assert train(plain).error is None
    ran = train(other)
    assert ran.error is None and "documents ordered for 2 ranks of cp" in ran.screen
    assert column(other, "train/loss") == pytest.approx(column(plain, "train/loss"), rel=1e-10)
    assert column(other, "train/tokens_seen") == column(plain, "train/tokens_seen")
    assert not same(state(other, 2), state(plain, 2)), "other sums round otherwise"
    plain["train"]["max_steps"], plain["data"]["balance_documents"] = 3, 2  # other rows
    assert "data.balance_documents" in str(train(plain).error)
