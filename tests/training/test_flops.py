"""Peaks of devices by the names that CUDA and ROCm give them, and the weights of a model of experts."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import AutoConfig

from fivefold.config import RunConfig
from fivefold.hardware.chip import bf16_peak
from fivefold.hardware.cluster import to_toml
from fivefold.launch.world import World
from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of
from fivefold.models.flops import Costs
from fivefold.training.part import LiveRun, RunProgress, measured_tflops

PEAKS = {
    "NVIDIA GB300": 2500.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA B300 SXM6 AC": 2250.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA GH200 144G HBM3e": 989.4,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H800": 989.4,
    "NVIDIA H800 PCIe": 756.0,
    "NVIDIA H20": 148.0,
    "NVIDIA H20-3e": 148.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A800-SXM4-80GB": 312.0,
    "NVIDIA A800 80GB PCIe": 312.0,
    "NVIDIA A30": 165.0,
    "NVIDIA A40": 149.7,
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI300A": 980.6,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI325X": 1307.4,
    "AMD Instinct MI350X": 2306.9,
    "AMD Instinct MI355X": 2516.6,
    "Tesla V100-SXM2-32GB": None,
    "Tesla T4": None,
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb": None,
    "NVIDIA GeForce GTX 1080 Ti": None,
}


def test_a_device_is_known_by_its_name(subtests: pytest.Subtests) -> None:
    for name, peak in PEAKS.items():
        with subtests.test(msg=name):
            assert bf16_peak(name) == peak


def test_experts_per_token_may_differ_by_layer() -> None:
    """HunYuan's config may have a list: two layers of one expert and of three cost as much as two layers of two."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 101, "num_experts": 4,
    }  # fmt: skip
    listed, plain, one = (
        Costs.of(facts_of(build_meta(AutoConfig.for_model("hunyuan_v1_moe", **sizes, moe_topk=picks))))
        for picks in ([1, 3], 2, 1)
    )
    assert listed.per_token == plain.per_token
    assert plain.per_token - one.per_token == 6 * 2 * 3 * 32 * 24


def test_the_matmul_rate_of_a_cpu_is_that_of_its_calibration_file(tmp_path: Path) -> None:
    """Measured on each of four cores; two workers have two of them each, eight half a one."""
    file = tmp_path / "hardware.toml"
    tables = {
        "cluster": "4xcpu", "chip": {"doubt": 1, "peak_tflops": {"fp32": 0.2}, "matmul_fraction": {"fp32": 0.5}},
        "node": {"cores": 4},
    }  # fmt: skip
    file.write_text(to_toml(tables))
    rates = [measured_tflops(str(file), "fp32", workers) for workers in (1, 2, 4, 8)]
    assert rates == pytest.approx([0.4, 0.2, 0.1, 0.05])
    job: Any = Mock(
        spec=LiveRun,
        progress=RunProgress(),
        config=RunConfig.model_validate({"layout": {"hardware": str(file)}, "precision": {"compute": "fp32"}}),
    )
    job.world = World(rank=0, size=8, local_rank=0, local_size=2)
    job.measured_tflops, job.peak_tflops = LiveRun.measured_tflops.func(job), None  # type: ignore[attr-defined]
    assert job.measured_tflops == pytest.approx(0.2)
    job.costs, job.log = Costs(per_token=400_000_000_000, per_squared_length=0, parameters=1), Mock(began=0.0)
    result = Mock(tokens=2, squared_lengths=0, metrics={"kl": float("nan")}, loss=1.0, grad_norm=1.0)
    result.balance.metrics, job.log.seconds_before = dict, 0.0
    row = LiveRun.row(job, result, 0.1, seconds=1.0, waited=0.0)  # 0.8 TFLOP in a second on eight workers
    assert row["perf/matmul_pct"] == pytest.approx(50) and row["perf/mfu_pct"] is None and row["kl"] is None
    assert measured_tflops("", "fp32", 2) is None
    assert measured_tflops(str(tmp_path / "gone.toml"), "fp32", 2) is None
    assert measured_tflops("8xH100", "bf16", 8) is None  # a GPU
    assert measured_tflops("4xcpu", "fp32", 4) is None  # a guess
