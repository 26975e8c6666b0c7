"""Rows of published measurements as the planner's words."""

import csv
from pathlib import Path

import pytest
from benchmarks.planner_accuracy import tau
from benchmarks.published import read

from fivefold.parallel.layout import Layout

ROW = {
    "source": "2205.05198", "model": "GPT 175B", "params_b": "175", "layers": "96", "hidden": "12288", "heads": "96",
    "kv_heads": "96", "ffn": "49152", "vocab": "51200", "seq_len": "2048", "gpu": "A100-80GB", "num_gpus": "64",
    "gpus_per_node": "8", "interconnect": "", "dp_shard": "1", "dp_replicate": "1", "tp": "8", "sp": "0", "pp": "8",
    "vpp": "3", "schedule": "interleaved_1f1b", "cp": "1", "ep": "1", "micro_batch": "1", "global_batch": "64",
    "precision": "fp16", "recompute": "full", "tokens_per_s_per_gpu": "113", "peak_mem_gb": "", "notes": "",
}  # fmt: skip


def rows_of(folder: Path, *rows: dict[str, str]) -> Path:
    with (folder / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_a_row_says_model_cluster_and_layout(tmp_path: Path) -> None:
    (row,), left = read(rows_of(tmp_path, ROW, ROW))
    assert row.layout == Layout.parse("tp8.pp8+interleaved+v3+full+nosp")
    assert (row.engine, row.cluster.text, row.tokens_per_second, row.memory_gb) == (
        "megatron-2022",
        "8x8xA100-80",
        113,
        None,
    )
    assert not row.shape.gated and row.shape.parameters == pytest.approx(175, rel=0.01)
    assert left == {"said twice": 1}


@pytest.mark.parametrize(("change", "why"), [
    ({"micro_batch": ""}, "micro_batch is not said"),
    ({"num_gpus": "60"}, "its degrees do not make its devices"),
    ({"precision": "nvfp4"}, "precision nvfp4"),
    ({"gpu": "TPU-v5e"}, "chip is not known"),
])  # fmt: skip
def test_a_row_that_does_not_say_enough_is_left_out(tmp_path: Path, change: dict[str, str], why: str) -> None:
    rows, left = read(rows_of(tmp_path, ROW | change))
    assert not rows and left == {why: 1}


def test_tau_counts_pairs_in_order() -> None:
    assert tau([1, 2, 3], [10, 20, 30]) == 1
    assert tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)
