"""The estimated time of a rehearsed step: the planner's items, and what was counted beside them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fivefold.config import load_config
from fivefold.core.errors import UserError
from fivefold.hardware.cluster import Cluster
from fivefold.planner.estimate import Estimate, Workload
from fivefold.planner.plan import estimate
from fivefold.rehearsal.launch import _planned
from fivefold.rehearsal.report import ExpectedStep, Rehearsal, ms, or_why
from fivefold.rehearsal.request import OutOfMemory, Phase, Seen, SentOverAxis
from fivefold.report.findings import to_html

CLUSTER, LAUNCH = Cluster.parse("8xH100"), 7e-6  # seconds of one launch, of the file of H100
PLANNED = estimate("llama-3.2-1b", CLUSTER, Workload(8192, 16), "shard4.tp2")
SENT = (SentOverAxis("tp", "all_gather", 10, 64, 10, 64, 8), SentOverAxis("tp", "reduce_scatter", 5, 64, 5, 64, 1))


def seen(launches: int | None, syncs: int | None = 0, *, rank: int = 0, name: str = "step 2") -> Seen:
    phase = Phase(name=name, allocated=9, reserved=9, after=9, launches=launches, syncs=syncs, compiles=0, seconds=0.25)
    return Seen(rank=rank, phases=(replace(phase, name="step 1", launches=10**7), phase), sent=SENT)


def expected(*ranks: Seen) -> ExpectedStep:
    found = ExpectedStep.of(PLANNED, ranks, "step 2")
    assert found is not None
    return found


def test_launches_that_the_device_outlasts_add_nothing_and_syncs_add_theirs() -> None:
    found = expected(seen(1000, 50))
    assert found.longer == "device" and found.launch_floor == pytest.approx(1000 * LAUNCH)
    assert found.step_seconds == pytest.approx(PLANNED.step_seconds + 50 * LAUNCH)
    assert found.mfu == pytest.approx(PLANNED.flops / found.step_seconds / 8 / 989.4e12)
    low, high = found.mfu_interval
    assert low < found.mfu < high < PLANNED.flops / PLANNED.step_interval[0] / 8 / 989.4e12


def test_launches_that_outlast_the_device_are_the_step() -> None:
    """A million of them take 7 s, and the planned step is far shorter."""
    found = expected(seen(10**6, 3))
    assert found.longer == "launches" and found.step_seconds == pytest.approx((10**6 + 3) * LAUNCH)
    assert found.mfu < PLANNED.mfu / 2
    assert "launches take longer" in " ".join(found.verdict)


def test_a_slower_host_launches_slower() -> None:
    cluster = replace(CLUSTER, chip=replace(CLUSTER.chip, host_scale=2.0))
    found = ExpectedStep.of(replace(PLANNED, cluster=cluster), (seen(1000),), "step 2")
    assert found is not None and found.launch_floor == pytest.approx(2 * 1000 * LAUNCH)


def test_time_that_is_saved_is_told_like_time_that_is_taken() -> None:
    assert [ms(each) for each in (12.3454, -12.3454, 0.01234, -0.01234)] == ["12,345", "-12,345", "12.3", "-12.3"]


def test_what_the_device_is_idle_in_is_not_its_time() -> None:
    planned = estimate("llama-3.2-1b", CLUSTER, Workload(8192, 16), "pp2.shard4")
    found = ExpectedStep.of(planned, (seen(1),), "step 2")
    assert found is not None and planned.seconds["bubble"] > 0
    idle = planned.seconds["bubble"] + planned.seconds.get("host", 0.0)
    assert found.device_seconds == pytest.approx(planned.step_seconds - idle)


def test_the_rank_that_launches_most_is_told() -> None:
    found = expected(seen(100, rank=0), seen(300, rank=4), seen(200, rank=6))
    assert (found.seen.rank, found.counted and found.counted.launches) == (4, 300)


def test_where_kernels_were_not_seen_it_is_the_planners_alone() -> None:
    found = expected(seen(None, None))
    assert found.step_seconds == PLANNED.step_seconds and found.mfu == pytest.approx(PLANNED.mfu)
    assert "not seen" in found.verdict[1]
    assert found.to_json()["longer"] is None


def test_there_is_none_of_a_step_that_did_not_end() -> None:
    short = OutOfMemory("step 2", 1, "a line", 1, 1, ())
    for broken in (replace(seen(9), failed="x"), replace(seen(9), out_of_memory=short), seen(9, name="save")):
        assert ExpectedStep.of(PLANNED, (seen(9), broken), "step 2") is None


def test_it_is_told_as_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    """On the screen, in JSON and on the page."""
    told = Rehearsal("llama", "shard4.tp2", CLUSTER, 2, (seen(2000, 7),), planned=PLANNED)
    told.show(Console(width=80))
    screen = capsys.readouterr().out
    assert max(map(len, screen.splitlines())) <= 80
    assert (
        "not measured" in screen and "estimated MFU" in screen and "a launch floor of 14 ms" in " ".join(screen.split())
    )
    values = json.loads(told.to_json())["estimate"]
    assert values["is_estimate"] and values["launches"] == 2000 and values["syncs"] == 7
    assert values["planned_seconds"] == PLANNED.seconds
    assert "estimated MFU, not measured" in to_html(told.findings())


def test_why_there_is_none_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    told = Rehearsal("llama", "shard8", CLUSTER, 2, (seen(9),), unplanned="nobody knows")
    told.show(Console(width=80))
    assert "No estimate of MFU: nobody knows." in capsys.readouterr().out
    assert json.loads(told.to_json())["estimate"] is None


def test_an_error_of_the_planner_is_the_reason() -> None:
    def refuses() -> Estimate:
        raise UserError("nobody knows", fix="measure it")

    assert or_why(refuses) == (None, "nobody knows") and or_why(lambda: PLANNED) == (PLANNED, "")


@pytest.mark.parametrize(("synthetic", "vocabulary"), [(True, 128_256), (False, 300)])
def test_the_layout_of_the_run_is_priced(synthetic: bool, vocabulary: int, tmp_path: Path) -> None:
    """With the vocabulary that is rehearsed: the model's own of synthetic text, else the tokenizer's."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "{model: {name_or_path: llama-3.2-1b, init: random}, tokenizer: {name_or_path: byte}, layout: shard4.tp2,"
        " data: {seq_length: 8192}, train: {global_batch_size: 16}}"
    )
    config = load_config(file, [])
    found, why = _planned(
        config, config.layout.resolve(8), CLUSTER, None if synthetic else vocabulary, synthetic=synthetic
    )
    assert found is not None and not why
    assert (found.step_seconds == pytest.approx(PLANNED.step_seconds)) is synthetic
    assert found.workload == PLANNED.workload
