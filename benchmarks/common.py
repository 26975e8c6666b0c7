"""What the benchmarks share: model shapes, one set of weights and rows for every contender, ranks, the machine."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fivefold.config import OptimizerSection
from fivefold.data.batch import MicroBatch, Piece, assemble
from fivefold.launch.world import LOOPBACK, cores, multiplies_bf16, threads_per_worker
from fivefold.models.build import build_meta
from fivefold.models.sources import RandomInit

RESULTS = Path(__file__).parent / "results"
SEED = 1234
LEARNING_RATE = 3e-4
OPTIONS = OptimizerSection(learning_rate=LEARNING_RATE)


# What a CPU can be timed in: without bf16 instructions (AVX2 at most) one bf16 step takes minutes, whoever runs it.
PRECISIONS = ("fp32", "bf16") if multiplies_bf16("cpu") else ("fp32",)


class RankFailed(Exception):
    """A rank of a contender failed; the message is its last line, `log` all it wrote."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


# ---- models and rows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A Llama and its global batch: `rows` x `length` tokens a step; `steps` are timed by default."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    rows: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.rows * self.length

    def hf_config(self) -> Any:
        """A tied Llama."""
        return AutoConfig.for_model(
            "llama", hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.heads, vocab_size=self.vocabulary,
            max_position_embeddings=self.length, tie_word_embeddings=True, use_cache=False,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip

    def matmuls(self) -> list[tuple[int, int, int, int]]:
        """(count, m, k, n) of the linears of one forward pass."""
        m, h, i = self.tokens, self.hidden, self.intermediate
        block = [(4, m, h, h), (2, m, h, i), (1, m, i, h)]
        return [(self.layers * count, m, k, n) for count, m, k, n in block] + [(1, m, h, self.vocabulary)]


SHAPES = {
    "1M": Shape(128, 384, 4, 4, 256, length=64, rows=12, steps=60),  # where models of single characters live
    "6M": Shape(256, 768, 6, 16, 2048, length=512, rows=4, steps=8),
    "15M": Shape(288, 768, 6, 6, 32_000, length=1024, rows=4, steps=3),
    "110M": Shape(768, 2048, 12, 12, 32_000, length=1024, rows=2, steps=1),
    "tiny": Shape(32, 64, 2, 2, 256, length=32, rows=4, steps=2),
}


def micro_batch(shape: Shape, step: int, *, packed: bool, data_rank: int = 0, data_ranks: int = 1) -> MicroBatch:
    """This data rank's rows of step `step`: random tokens, one document a row, or (`packed`) four of unequal length."""
    rng = np.random.default_rng([SEED, step])
    rows = rng.integers(0, shape.vocabulary, (shape.rows, shape.length), dtype=np.uint16)
    length = shape.length
    cuts = [length // 2, length // 2 + length // 3, length - length // 16] if packed else []
    mine = shape.rows // data_ranks
    pieces = [[Piece(d, d[1:]) for d in np.split(row, cuts)] for row in rows[data_rank * mine :][:mine]]
    return assemble(pieces, row_length=length, pad_id=0)


def plain_model(hf_config: Any, seed: int = SEED) -> Any:
    """The unmodified `transformers` model with SDPA attention, in fp32, with the weights fivefold draws for `seed`."""
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa", dtype=torch.float32)
    source = RandomInit(build_meta(hf_config), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.whole(name))
    return model


# ---- time -----------------------------------------------------------------------------------------------------------


class Clock:
    """Wall and CPU seconds of each step, reading its batch included, and its loss."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.losses: list[float] = []

    def tick(self, loss: float | None = None) -> None:
        """Once before the first step; then at the end of every step."""
        self.marks.append((time.perf_counter(), time.process_time()))
        if loss is not None:
            self.losses.append(loss)

    def callback(self) -> Any:
        """A callback of a Trainer of `transformers` that ticks at its steps, and keeps the losses that it logs."""
        from transformers import TrainerCallback

        clock = self

        class Ticks(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                clock.tick()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.tick()

            def on_log(self, _: Any, __: Any, ___: Any, logs: dict[str, float], **____: Any) -> None:
                if "loss" in logs:
                    clock.losses.append(float(logs["loss"]))

        return Ticks()

    def result(self, *, warmup: int) -> dict[str, Any]:
        """Medians over the steps after the warm-up."""
        wall, cpu = ([b[i] - a[i] for a, b in zip(self.marks, self.marks[1:], strict=False)][warmup:] for i in (0, 1))
        return {"step_seconds": median(wall), "cpu_seconds": median(cpu), "steps": wall, "losses": self.losses}


def best_gflops(m: int, k: int, n: int, dtype: torch.dtype, device: str = "cpu", repeats: int = 5) -> float:
    """The fastest of several [m, k] x [k, n] matmuls, GFLOP/s."""
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        a @ b
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2e-9 * m * k * n / min(seconds[1:])


# ---- ranks as fresh processes ---------------------------------------------------------------------------------------


def run_ranks(script: Path, request: dict[str, Any], *, ranks: int, timeout: float = 1800.0) -> list[dict[str, Any]]:
    """Run `python script REQUEST OUT` in `ranks` fresh processes as one world; what each wrote to OUT, by rank.

    The cores are shared out among the ranks. Raises `RankFailed`.
    """
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"rank-{rank}.json") for rank in range(ranks)]
        port, processes = _free_port(), []
        for rank, out in enumerate(outs):
            command = [sys.executable, str(script), json.dumps(request), str(out)]
            with out.with_suffix(".log").open("w") as log:
                env = _rank_environment(rank, ranks, port)
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        _wait(processes, [out.with_suffix(".log") for out in outs], time.monotonic() + timeout)
        return [json.loads(out.read_text()) for out in outs]


def _rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    ours["OMP_NUM_THREADS"] = threads_per_worker(ranks)
    kept = {key: value for key, value in os.environ.items() if key not in {*ours, "MASTER_ADDR"}}
    alone = {"OMP_NUM_THREADS"} if ranks == 1 else set(ours)
    world = {key: str(value) for key, value in ours.items() if key in alone}
    return {**kept, **world, "MASTER_ADDR": LOOPBACK, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _wait(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline: float) -> None:
    """Until all have ended; the first failure, or the deadline, ends the others."""
    try:
        while any(process.poll() is None for process in processes):
            failed = [i for i, process in enumerate(processes) if process.poll()]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        failed = [i for i, process in enumerate(processes) if process.poll() != 0]
        if failed:
            text = logs[failed[0]].read_text()
            raise RankFailed(next((x.strip() for x in reversed(text.splitlines()) if x.strip()), "no output"), text)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


# ---- the machine ----------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """The processor, the versions, the commit and the moment."""
    cpu, memory = _field("/proc/cpuinfo", "model name"), _field("/proc/meminfo", "MemTotal")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    )
    return {
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_gib": round(int(memory.split()[0]) / 2**20, 1) if memory else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "accelerate")},
        "commit": commit.stdout.strip() or None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def isa_limit_gflops(precision: str) -> float | None:
    """What the instruction set could do at the nominal clock on all cores, GFLOP/s; None where it is not known.

    Per core and cycle: two 512-bit (or 256-bit) fused multiply-add ports in fp32; AMX tiles, or AVX-512 BF16, in bf16.
    """
    flags, mhz = _field("/proc/cpuinfo", "flags").split(), _field("/proc/cpuinfo", "cpu MHz")
    per_cycle = {
        "fp32": {"avx512f": 64, "avx2": 32},
        "bf16": {"amx_bf16": 2048, "avx512_bf16": 128},
    }[precision]
    best = next((flops for flag, flops in per_cycle.items() if flag in flags), None)
    return float(mhz) * 1e-3 * best * cores() if best and mhz else None


def slug(name: str) -> str:
    """A name as part of a file name: `NVIDIA H200` is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _field(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
