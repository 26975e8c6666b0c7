"""What a run says of its machine: terms that make up the step are scaled, each by its share and its doubt."""

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.calibration import learn
from fivefold.calibration.learn import DOUBTS, Factors, StepMeasurement, corrected, explained, seen_in
from fivefold.calibration.learn import _start as start_of
from fivefold.core import history
from fivefold.core.errors import UserError
from fivefold.hardware.cluster import Cluster, to_toml
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Estimate, Workload, estimate_layout
from fivefold.planner.of_run import cluster_of
from fivefold.planner.price import PriceList
from fivefold.planner.timing import OF_TERMS
from tests.commands import fivefold
from tests.planner.settings import facts

RUN = """
model: {name_or_path: demo, overrides: {hidden_size: 32, intermediate_size: 48, head_dim: 8, num_hidden_layers: 2}}
tokenizer: {name_or_path: byte}
data: {train: notes.txt, validation: 0, seq_length: 512}
train: {max_steps: 6, global_batch_size: 4, device: cpu}
precision: {compute: fp32}
eval: {every: 0}
layout: shard2+fp32
run: {name: small}
"""
LAYOUT = Layout.parse("shard2.tp4+mb1")


def planned(cluster: Cluster) -> Estimate:
    return estimate_layout(PriceList(facts("llama", 8), cluster), LAYOUT, Workload(2048, 16))


def learned(tree: dict[str, Any], seconds: float) -> tuple[Factors, Estimate]:
    """After a run of so many seconds a step."""
    factors = Factors(dict.fromkeys(DOUBTS, 0.0), DOUBTS)
    for _ in range(5):
        now = planned(Cluster.of_toml(to_toml(corrected(tree, factors.logs))))
        factors = explained(now, StepMeasurement(seconds, 0.02, None), factors.logs)
    return factors, planned(Cluster.of_toml(to_toml(corrected(tree, factors.logs))))


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.5])
def test_the_step_is_explained(slower: float) -> None:
    before = planned(Cluster.parse("8xA100-80"))
    factors, after = learned({"cluster": "8xA100-80"}, before.step_seconds * slower)
    assert abs(log(after.step_seconds / before.step_seconds / slower)) < 0.05
    assert all(log(slower) * each >= -1e-6 for each in factors.logs.values())
    assert all(0 < factors.doubts[term] <= DOUBTS[term] for term in DOUBTS)


def test_a_term_moves_by_its_share_and_its_doubt() -> None:
    """Half of a step is matmuls, known to 12 %, and half links, known to 40 %: the links have 11 parts of 12."""
    before = planned(Cluster.parse("8xA100-80"))
    halves = tuple(
        replace(row, amount=0.5 * (row.item in ("matmuls", "tp"))) for row in before.rows if row.part == "time"
    )
    found = explained(replace(before, rows=halves), StepMeasurement(1.1, 1e-9, None), dict.fromkeys(DOUBTS, 0.0))
    assert found.logs["links"] / found.logs["matmuls"] == pytest.approx((0.4 / 0.12) ** 2)
    assert sum(found.logs.values()) / 2 == pytest.approx(log(1.1))
    assert found.logs["host"] == 0 and found.doubts["host"] == DOUBTS["host"]
    assert found.doubts["links"] < 0.3 * DOUBTS["links"] and found.doubts["matmuls"] > 0.9 * DOUBTS["matmuls"]


def test_tables_say_what_takes_longer() -> None:
    """Matmuls twice as long: half of the rate, of which attention reaches a larger part; it takes four times as long.
    Memory twice, the host three times; links send half as much and have twice the latency."""
    longer = {"matmuls": 2, "attention": 4, "memory traffic": 2, "host": 3, "links": 2}
    tables = corrected({"cluster": "8xA100-80"}, {term: log(factor) for term, factor in longer.items()})
    usual = Cluster.parse("8xA100-80")
    chip, node = tables["chip"], tables["node"]
    assert chip["matmul_fraction"]["bf16"] == pytest.approx(usual.chip.matmul_fraction["bf16"] / 2, rel=0.01)
    assert chip["attention_fraction"] == pytest.approx(usual.chip.attention_fraction / 2, rel=0.01)
    assert chip["memory_bandwidth_gbs"] == pytest.approx(usual.chip.memory_bandwidth_gbs / 2, rel=0.01)
    assert chip["host_scale"] == pytest.approx(3 * usual.chip.host_scale, rel=0.01)
    assert node["inside"]["gbs"] == pytest.approx(usual.node.inside.gbs / 2, rel=0.01)
    assert node["between"]["latency_us"] == pytest.approx(2 * usual.node.between.latency_us, rel=0.01)


def test_devices_that_share_cores_are_corrected_as_one_by_itself() -> None:
    """4 processes on 2 cores: a file that corrects nothing says the same machine; links twice as slow take twice as
    long to send, to hop and to meet."""
    tree = {"cluster": "4xcpu", "node": {"cores": 2}}
    usual, same = (Cluster.of_toml(to_toml(each)) for each in (tree, corrected(tree, dict.fromkeys(DOUBTS, 0.0))))
    assert same.chip.flops_per_second("fp32") == pytest.approx(usual.chip.flops_per_second("fp32"), rel=0.01)
    assert same.chip.memory_bytes_per_second == pytest.approx(usual.chip.memory_bytes_per_second, rel=0.01)
    assert same.node.inside.latency_us == pytest.approx(usual.node.inside.latency_us, rel=0.01)
    slow = Cluster.of_toml(to_toml(corrected(tree, {**dict.fromkeys(DOUBTS, 0.0), "links": log(2)})))
    assert slow.node.inside.meet_us == pytest.approx(2 * usual.node.inside.meet_us, rel=0.01) != 0
    assert slow.node.inside.bytes_per_second == pytest.approx(usual.node.inside.bytes_per_second / 2, rel=0.01)


def test_matmuls_that_are_faster_than_the_data_sheet_are_a_new_peak() -> None:
    """Four times as fast: more than all of the peak."""
    usual = Cluster.parse("8xA100-80")
    logs = {**dict.fromkeys(DOUBTS, 0.0), "matmuls": log(1 / 4)}
    found = Cluster.of_toml(to_toml(corrected({"cluster": "8xA100-80"}, logs)))
    assert found.chip.matmul_fraction["bf16"] == 1
    assert found.chip.flops_per_second("bf16") == pytest.approx(4 * usual.chip.flops_per_second("bf16"), rel=0.01)


def test_the_noise_of_a_median_falls_with_the_number_of_steps(tmp_path: Path) -> None:
    """Nine steps, of which six are 10 % off: 1.48 x 0.1 / 3."""
    took = [9.0, 9.0, *(exp(each) for each in (0, 0, 0, 0.1, 0.1, 0.1, -0.1, -0.1, -0.1))]
    rows = [{"step": step, "perf/step_seconds": each} for step, each in enumerate(took, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = seen_in(tmp_path)
    assert (found.seconds, found.noise) == (1.0, pytest.approx(1.48 * 0.1 / 3))


def test_what_a_run_measured_is_of_its_newest_start(tmp_path: Path) -> None:
    """Of steps 1 to 9 and, after a restart, 10 to 19: the first two of the start, which set up, are left out."""
    steps = [{"step": n, "perf/step_seconds": 9.0 if n < 10 else 5.0 if n < 12 else 2.0} for n in range(1, 20)]
    peaks = [{**each, "memory/peak_gib": 7.0 if each["step"] < 10 else 3.0} for each in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in peaks))
    spans = SimpleNamespace(spans=lambda: [(None, 0, 9), (None, 9, None)])
    with patch.object(learn.history, "load", lambda _: spans):
        assert learn.seen_in(tmp_path) == StepMeasurement(2.0, 0.02, 3.0)


def test_every_item_of_time_is_a_term_or_follows_from_them() -> None:
    items = {row.item for row in planned(Cluster.parse("8xA100-80")).rows if row.part == "time"}
    assert items - {"bubble"} <= {item for those in OF_TERMS.values() for item in those}


@pytest.mark.full
def test_the_command_corrects_a_file_by_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("one two three\n" * 1000)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "mine.toml").write_text('cluster = "2xcpu"\n[node]\ncores = 2\n')
    fivefold(["train", "run.yaml"], tmp_path)
    said = fivefold(["calibrate", "--from", "runs/small", "--cluster", "mine.toml", "--write", "new.toml"], tmp_path)
    assert "shard2+fp32 on 1x2xcpu" in said and "a step took" in said and "host" in said
    old, new = (Cluster.parse(str(tmp_path / name)) for name in ("mine.toml", "new.toml"))
    assert (new.text, new.node.cores) == (old.text, 2) and new.chip.host_scale != old.chip.host_scale
    metrics = tmp_path / "runs/small/metrics.jsonl"
    rows = [{**json.loads(line), "memory/peak_reserved_gib": 2.0} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = fivefold(["calibrate", "--from", "runs/small", "--cluster", "mine.toml", "--write", "new.toml"], tmp_path)
    tensors = float(said.split("tensors were planned to have ")[1].split()[0])
    assert Cluster.parse(str(tmp_path / "new.toml")).chip.slack == pytest.approx(2 / tensors, rel=0.01)
    wrong = fivefold(["calibrate", "--from", "runs/small", "--cluster", "8xH100"], tmp_path, code=2)
    assert wrong == ""


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    from fivefold.calibration.learn import learn

    with pytest.raises(UserError):
        learn(tmp_path / "nothing")


@pytest.mark.parametrize("seconds", [None, 0, -1, float("nan"), float("inf"), 1e308, "fast", [1], 10**400])
def test_steps_of_damaged_metrics_are_left_out(tmp_path: Path, seconds: Any) -> None:
    rows = [{"step": step, "perf/step_seconds": 0.5, "memory/peak_gib": seconds} for step in range(1, 7)]
    rows += [{"step": 7, "perf/step_seconds": seconds}, {"step": 8}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not isinstance(seconds, str | list) and seconds != 10**400:  # these rows are damaged as a whole
        assert seen_in(tmp_path) == StepMeasurement(0.5, 0.02, None)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[-2:] * 5))
    with pytest.raises(UserError, match="too few steps"):
        seen_in(tmp_path)


def test_a_start_without_a_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text('{"event": "start", "step": 0, "data": 3}\n')
    with pytest.raises(UserError, match="does not say where it ran"):
        start_of(tmp_path)
    assert "data" not in history.load(tmp_path).starts[-1].about


@pytest.mark.parametrize("said", ["a", [1], -1, 0, 8, 1e30, None])
def test_a_damaged_number_of_devices_is_as_if_none_were_said(said: Any) -> None:
    assert cluster_of(4, "cpu", {"devices_per_node": said}).text == "1x4xcpu"
    assert cluster_of(4, "cpu", {"devices_per_node": 2}).text == "2x2xcpu"
