"""Each benchmark runs, at a toy size. What it measures is not judged here."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.fixture
def speed_report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("speed_report")


@pytest.mark.campaign
def test_training_speed(tmp_path: Path, speed_report: ModuleType) -> None:
    target, names = tmp_path / "speed.json", "fivefold,Trainer,fivefold tp2"
    done = run("training_speed", "--quick", "--precisions", "fp32", "--contenders", names, "--json", str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(target.read_text())
    rows = {row["contender"]: row for row in result["rows"]}
    assert list(rows) == ["plain loop", "fivefold", "Trainer", "fivefold tp2"]
    for row in rows.values():
        assert row["tokens_per_second"] > 0
        assert row["loss_difference"] < 1e-6  # the same model on the same rows: only then is a ratio of speeds one
    docs = tmp_path / "docs.md"
    docs.write_text(f"before\n{speed_report.BEGIN}\nreplaced\n{speed_report.END}\nafter\n")
    speed_report.write_docs(result, docs)
    text = docs.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "replaced" not in text
    assert "| fivefold tp2, 2 processes |" in text


def test_the_docs_have_the_place_for_the_tables(speed_report: ModuleType) -> None:
    text = speed_report.DOCS.read_text(encoding="utf-8")
    assert text.count(speed_report.BEGIN) == text.count(speed_report.END) == 1


@pytest.mark.campaign
def test_same_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    done = run("same_curve", "--quick", "--precisions", "fp32", "--steps", "3", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    curves = json.loads((tmp_path / "out" / "same_curve.json").read_text())["curves"]
    assert [len(losses) for losses in curves.values()] == [3, 3]
    assert (tmp_path / "out" / "same_curve.png").stat().st_size > 10_000


@pytest.mark.campaign
def test_long_context() -> None:
    done = run("long_context", "--quick", "--part", "step")
    assert done.returncode == 0, done.stdout + done.stderr
    step = json.loads(done.stdout)["step"]
    assert step["layout"].startswith("cp2") and step["length"] == 512
    assert step["peak_gib"] > 0 and step["loss"] > 0


@pytest.mark.campaign
def test_start_time() -> None:
    done = run("start_time", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    (start,) = json.loads(done.stdout)["this"]["starts"]
    assert 0 < start["launcher_cpu_seconds"] < start["cpu_seconds"]


@pytest.mark.campaign
def test_gpu_train(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    done = run("gpu_train", "--device", "cpu", "--tiny", "--warmup", "1", "--steps", "2", "--json", str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(target.read_text())
    assert result["tokens_per_step"] == 64 and len(result["steps"]) == 2 and result["mfu_pct"] is None


@pytest.mark.campaign
def test_gpu_levers() -> None:
    done = run("gpu_levers", "--device", "cpu", "--tiny", "--only", "1b 8K x 2 single")
    assert "failed" not in done.stdout, done.stdout + done.stderr
    assert "1b 8K x 2 single+fp8_rowwise: " in done.stdout and "x the speed of bf16" in done.stdout


def test_longer_rows_than_those_that_do_not_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    levers = importlib.import_module("gpu_levers")
    cells = list(levers.cells())
    line = [cell for cell in cells if cell.line == ("llama-3.2-1b", "single", True, 1)]
    found = {str(line[0]): {"step_seconds": 1.0}, str(line[1]): {"does not fit": True}}
    assert [levers.skipped(cell, cells, found) is not None for cell in line[:4]] == [False, False, True, True]
    name = "llama-3.2-1b 8K x 2 single"
    measured = {name: {"step_seconds": 3.0}, f"{name}+fp8": {"step_seconds": 2.0}}
    assert list(levers.ratios(measured)) == [f"{name}+fp8: 1.50x the speed of bf16"]


def test_what_runs_beside_compute_is_told_from_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    overlap = importlib.import_module("overlap")

    def kernel(name: str, start: float, length: float, **said: str) -> dict[str, object]:
        return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "args": said}

    gather = {"Process Group Name": "7", "Collective name": "_allgather_base"}
    events = [
        kernel("gemm", 0, 100), kernel("softmax", 90, 20), kernel("gemm", 300, 100),
        kernel("ncclDevKernel_AllGather_RING_LL", 50, 100, **gather),
        kernel("ncclDevKernel_AllGather_RING_LL", 350, 100, **gather),
        kernel("ncclDevKernel_SendRecv(x)", 500, 30, **{"Process Group Name": "8"}),
        {"ph": "X", "cat": "cpu_op", "name": "nccl:all_gather", "ts": 0, "dur": 900},
    ]  # fmt: skip
    found = overlap.overlaps(events, {"7": "dp_shard", "8": "cp"}.get)
    assert [(each.axis, each.kind, each.count) for each in found] == [
        ("dp_shard", "_allgather_base", 2), ("cp", "SendRecv(x)", 1),
    ]  # fmt: skip
    assert [(each.milliseconds, each.covered) for each in found] == [
        (pytest.approx(0.2), pytest.approx(0.11)), (pytest.approx(0.03), 0.0),
    ]  # fmt: skip


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refused(name, *arguments)`: what a benchmark says that is refused, in this process: one of its own imports torch
    for four seconds first."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            sys.exit(importlib.import_module(name).main())
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run


def test_gpu_train_refuses_a_layout() -> None:
    done = run("gpu_train", "--device", "cpu", "--tiny", "--layout", "tp3")
    assert done.returncode == 2 and "tp" in done.stderr and "Traceback" not in done.stderr


def test_gpu_train_refuses_a_cpu(refused: Callable[..., str]) -> None:
    assert "--device cpu only goes with --tiny" in refused("gpu_train", "--device", "cpu")


def test_gpu_train_needs_a_gpu(refused: Callable[..., str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    said = refused("gpu_train")
    assert "needs a CUDA GPU" in said and "--tiny" in said


def test_training_speed_refuses_unknown_names(refused: Callable[..., str]) -> None:
    assert "7B: choose from 1M, 6M, 15M, 110M" in refused("training_speed", "--sizes", "7B")


@pytest.mark.campaign
def test_faults() -> None:
    done = run("faults", "--only", "weights_rounded_on_import", "moments_swapped", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed 2/2, named rightly 2/2" in done.stdout


def test_the_page_of_faults_is_what_was_measured_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    faults = importlib.import_module("faults")
    result = json.loads((faults.RESULTS / "faults.json").read_text())
    rows = [faults.Row(**row) for row in result["rows"]]
    text = faults.DOCS.read_text(encoding="utf-8")
    assert faults.table(rows) in text and faults.totals(rows).capitalize() in text
    assert {row.name for row in rows} == set(faults.FAULTS)
    assert all(row.killed for row in rows) and all(result["controls"].values())


@pytest.mark.campaign
def test_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    done = run("reliability/damage", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    for kind, count in {"flips": 200, "cuts": 20, "swaps": 5}.items():
        assert result[kind]["refused"] == result[kind]["done"] == count
        assert result[kind]["tensor named"] == result[kind]["in tensors"]


@pytest.mark.campaign
def test_stall() -> None:
    done = run("reliability/stall", "--quick", "--repeats", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["asynchronous_stall_seconds"] > 0


@pytest.mark.campaign
def test_memory() -> None:
    done = run("reliability/memory", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    peaks = json.loads(done.stdout)["peak_over_model"]
    assert [len(ranks) for ranks in peaks.values()] == [2, 2, 1]


@pytest.mark.campaign
def test_finetune_speed() -> None:
    pytest.importorskip("trl")
    done = run("finetune_speed", "--quick", "--only", "dpo+lora")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| dpo+lora | 2 |" in done.stdout
