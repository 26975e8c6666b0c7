"""What is measured becomes a hardware file in which the planner finds it again."""

import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from fivefold import calibration
from fivefold.calibration.fit import Collective, Matmul, Measurements, Sizes, _positive, errors, fitted
from fivefold.core.errors import UserError
from fivefold.hardware.cluster import Cluster, to_toml
from fivefold.launch import once
from fivefold.launch.failure import WorkerDied
from fivefold.parallel.collectives import Call
from fivefold.planner.timing import Product, attention_seconds, collective_seconds, matmul_seconds
from tests.commands import fivefold

TINY = Sizes(rows=(16, 64), widths=(32, 64, 128), lengths=(32,), traffic=2**16, messages=(2**12, 2**16), seconds=1e-4)


def found_on(cluster: Cluster) -> Measurements:
    """What probes would find on a machine that is as `cluster` says."""
    chip = replace(cluster.chip, step_fraction=1.0)  # a probe is short: the clocks stay up

    def matmuls() -> Iterator[Matmul]:
        for dtype in ("fp32", "bf16"):
            for rows in (128, 1000, 4096):
                for inputs, outputs in ((1024, 1024), (4096, 4096), (1024, 4096), (100, 700), (300, 160)):
                    took = matmul_seconds(chip, Product(rows, inputs, outputs), dtype)
                    yield dtype, rows, inputs, outputs, took

    inside, between = cluster.node.inside.meet_us * 1e-6, cluster.node.between.meet_us * 1e-6

    def collectives(ranks: range, meeting: float) -> Iterator[Collective]:
        span = cluster.tier_of(ranks)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
            for size in (2**12, 2**18, 2**26):
                call = Call(axis="", kind=kind, bytes=size, phase="forward")
                yield kind, size, collective_seconds(cluster, span, call) - meeting * (kind != "send")

    def between_nodes() -> dict[str, Any]:
        if cluster.nodes == 1:
            return {}
        whole, places = range(cluster.world), range(0, cluster.world, cluster.devices_per_node)
        at = {"between": list(collectives(whole, between)), "one_per_node": list(collectives(places, between))}
        return {**at, "meeting_between": between}

    return Measurements(
        matmuls=list(matmuls()), attention=[("bf16", 1e12, attention_seconds(chip, 1e12, "bf16"))],
        traffic=chip.memory_bytes_per_second, launch=chip.launch_us * 1e-6,
        collectives=list(collectives(range(cluster.devices_per_node), inside)), memory=chip.memory_bytes,
        context=int(chip.context_gib * 2**30), host=chip.host_gbs * 1e9, meeting=inside,
        **between_nodes(),
    )  # fmt: skip


@pytest.mark.parametrize("text", ["8xA100-80", "4xcpu", "2x8xA100-80", "3x2xcpu"])
def test_a_fit_finds_the_machine_again(text: str) -> None:
    """Of one that is slower than the tables say, and has other links."""
    table = Cluster.parse(text)
    slow = replace(
        table,
        chip=replace(
            table.chip.times(0.7), attention_fraction=0.4, launch_us=21.0, tile=(64, 64), tile_fill=128,
        ),
        node=replace(
            table.node,
            inside=replace(
                table.node.inside, gbs=0.3 * table.node.inside.gbs, latency_us=55.0,
                meet_us=1230.0 * table.chip.is_host,
            ),
            between=replace(
                table.node.between, gbs=0.1 * table.node.between.gbs, latency_us=780.0, decay=0.0,
                meet_us=4560.0 * table.chip.is_host, one_per_node=0.6,
            ),
        ),
    )  # fmt: skip
    mine = Cluster.of_toml(to_toml({"cluster": table.text, **fitted(table, [found_on(slow)] * 2)}))
    if table.chip.is_host:  # as many processes as cores: each has its own
        assert (mine.node.cores, mine.crowding) == (table.devices_per_node, 1)
    found = found_on(mine), found_on(slow)
    assert [each[-1] for each in found[0].matmuls] == pytest.approx([each[-1] for each in found[1].matmuls], rel=0.02)
    for dtype in ("fp32", "bf16"):
        assert mine.chip.flops_per_second(dtype) == pytest.approx(slow.chip.flops_per_second(dtype), rel=0.01)
    assert mine.chip.memory_bytes_per_second == pytest.approx(slow.chip.memory_bytes_per_second, rel=0.01)
    assert (mine.chip.attention_fraction, mine.chip.launch_us) == (pytest.approx(0.4, rel=0.01), 21.0)
    inside = mine.node.inside
    assert inside.bytes_per_second == pytest.approx(slow.node.inside.bytes_per_second, rel=0.02)
    assert inside.latency_us == pytest.approx(55, rel=0.02)
    assert inside.meet_us == pytest.approx(slow.node.inside.meet_us)
    if table.nodes > 1:
        between = mine.node.between
        assert between.bytes_per_second == pytest.approx(slow.node.between.bytes_per_second, rel=0.05)
        assert between.latency_us == pytest.approx(780, rel=0.05)
        assert between.one_per_node == pytest.approx(0.6, rel=0.02)
        assert (between.meet_us, between.decay) == (pytest.approx(slow.node.between.meet_us), 0)


def test_two_factors_are_positive_and_heed_no_outlier() -> None:
    """Latency 1 and 2 a byte, of which two of six measurements took three times as long; and a small message
    that took less than its bytes would, which least squares explain by a latency below 0."""
    bytes_of = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    took = 1 + 2 * bytes_of
    took[[2, 4]] *= 3
    latency, per_byte = _positive(np.array([np.ones(6), bytes_of]).T / took[:, None])
    assert (latency, per_byte) == pytest.approx((1, 2), rel=0.05)
    latency, per_byte = _positive(np.array([[1.0, 1.0], [1.0, 10.0]]) / np.array([[0.5], [10.0]]))
    assert latency == 1e-9 and 0.5 <= per_byte <= 0.6


def test_a_hop_without_latency_is_a_number_of_a_file() -> None:
    """Where bytes explain more than all of the seconds, as on a busy machine."""
    table = Cluster.parse("2x2xcpu")
    found = found_on(table)
    odd = replace(found, between=[(kind, size, size * 1e-6) for kind, size, _ in found.between])
    mine = Cluster.of_toml(to_toml({"cluster": table.text, **fitted(table, [odd])}))
    assert mine.node.between.latency_us == 0 < mine.node.between.bytes_per_second


def test_what_is_far_off_its_fit_is_told() -> None:
    """All matmuls but one take half as long again: the median says it. Links alone are enough to measure again."""
    table = Cluster.parse("4xcpu")
    right = found_on(replace(table, chip=replace(table.chip, step_fraction=1.0)))
    slow = [(*each[:-1], each[-1] * (1.5 if at else 1)) for at, each in enumerate(right.matmuls)]
    alone = replace(table, chip=replace(table.chip, step_fraction=1.0))
    assert errors(alone, [replace(right, matmuls=slow)]) == pytest.approx((0.5, 0.0), abs=1e-6)
    rng = np.random.default_rng(0)
    noisy = [(*each[:-1], each[-1] * 10 ** float(rng.uniform(-1, 1))) for each in right.collectives]
    told = "measure again while nothing else runs"
    assert told not in calibration.written(table, [right])[1].closing
    assert told in calibration.written(table, [replace(right, collectives=noisy)])[1].closing


def test_what_is_faster_than_its_data_sheet_is_a_new_peak() -> None:
    table = Cluster.parse("2xcpu")
    fast = replace(table, chip=table.chip.times(5))
    mine = fitted(table, [found_on(fast)])["chip"]
    assert (
        mine["peak_tflops"]["fp32"] == pytest.approx(5 * 0.2 * 0.5, rel=0.01) and mine["matmul_fraction"]["fp32"] == 1
    )
    assert mine["peak_tflops"]["fp64"] == 0.1, "what is not measured stays"


def test_processes_share_the_cores_of_a_machine(tmp_path: Path) -> None:
    """On 2 cores, 1 process has two, 2 have one each, and each of 4 a half."""
    file = tmp_path / "mine.toml"

    def cluster(devices: int) -> Cluster:
        file.write_text(f'cluster = "{devices}xcpu"\n[node]\ncores = 2\n')
        return Cluster.parse(str(file))

    rates = [cluster(devices).chip.flops_per_second("fp32") or 0 for devices in (1, 2, 4)]
    assert [rate / rates[1] for rate in rates] == [2, 1, 0.5]
    assert [cluster(devices).crowding for devices in (1, 2, 4)] == [1, 1, 2]
    assert cluster(4).node.inside.latency_us == 2 * cluster(2).node.inside.latency_us


@pytest.mark.full
def test_the_command_writes_a_file_that_plan_takes(tmp_path: Path) -> None:
    with patch.object(Sizes, "of", staticmethod(lambda device: TINY)):
        said = fivefold(["calibrate", "--device", "cpu", "--nproc", "2", "--write", "mine.toml"], tmp_path)
    assert "matmul fp32, TFLOP/s" in said and "plan MODEL --cluster mine.toml" in said
    mine = Cluster.parse(str(tmp_path / "mine.toml"))
    assert (mine.text, mine.node.cores) == ("1x2xcpu", 2)
    assert (tmp_path / "mine.toml").read_text().startswith("# Measured by fivefold calibrate on ")
    said = fivefold(["plan", "qwen3-0.6b", "--cluster", "mine.toml", "--seq-length", "256"], tmp_path)
    assert "1x2xcpu" in said


def test_calibrate_is_called_once_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with --nodes on each rank."""
    with pytest.raises(UserError, match="ranks that torchrun or srun has started"):
        calibration.calibrate(device="cpu", nodes=True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="starts its own workers"):
        calibration.calibrate(device="cpu")


def test_what_a_killed_one_leaves_the_next_removes_and_a_log_that_is_named_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def dies(crew: object, request: dict[str, Any], **_: object) -> None:
        assert (Path(request["result"]).parent / ".owner").exists()
        raise WorkerDied("rank 0 was killed by SIGKILL", fix="look at its log")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(once, "Workers", lambda *_, **__: nullcontext())
    monkeypatch.setattr(once, "start_workers", dies)
    with pytest.raises(WorkerDied):
        calibration.calibrate(device="cpu", nproc=2)
    assert len(list(tmp_path.glob("fivefold-calibrate-*"))) == 1
