"""Saving in the background: what is on the disk is the moment of the call, and a failure is told, not published."""

from pathlib import Path

import pytest

from fivefold.checkpoint import Checkpoint, newest
from tests.checkpoint.ranks import fail_behind, load_and_train, save_behind, save_over
from tests.checkpoint.test_reshard import equal, whole
from tests.parity import Case
from tests.pool import run_ranks

pytestmark = pytest.mark.full

CASE = Case("shard2+fp32")


def test_what_is_written_later_never_reaches_the_disk(tmp_path: Path) -> None:
    ranks = run_ranks(2, save_behind, CASE, tmp_path)
    before, after = (whole([states[i] for states in ranks]) for i in (0, 1))
    assert not equal(before, after)
    found = run_ranks(2, load_and_train, CASE, [newest(tmp_path)], 2)
    assert equal(whole([states[0] for states in found]), before)
    assert found[0][0].losses == ranks[0][0].losses  # and training went on as if nothing had been saved


def test_a_failure_is_told_once_and_never_published(tmp_path: Path) -> None:
    for told, names, later, again in run_ranks(2, fail_behind, CASE, tmp_path):
        assert told.startswith("RunFailed") and "No space left" in told and "rank 1" in told
        assert names == [] and later == ["step-000002"] and again == "None"
    assert Checkpoint.open(tmp_path / "step-000002").step == 2


def test_one_save_waits_for_the_one_before(tmp_path: Path) -> None:
    assert run_ranks(2, save_over, CASE, tmp_path) == [["step-000002", "step-000003"]] * 2
