"""What a step is measured by: the row that `metrics.jsonl` has of it, and the peak of memory. Names have groups:
`train/loss`."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from fivefold.training.run import Trainer
    from fivefold.training.step import StepResult

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def row(job: "Trainer", result: "StepResult", rate: float, *, seconds: float, waited: float) -> dict[str, Any]:
    """Of the step that was done, at this learning rate: it took `seconds`, of them `waited` for its rows."""
    tokens_per_second = result.tokens / seconds
    flops_done = job.costs.per_token * result.tokens + job.costs.per_squared_length * result.squared_lengths
    tflops = flops_done / seconds / job.world.size / 1e12
    peak = job.peak_tflops
    return {
        "step": job.step,
        "train/loss": finite(result.loss),
        "train/grad_norm": finite(result.grad_norm),
        "train/learning_rate": rate,
        "train/tokens_seen": job.tokens_seen,
        "train/skipped_steps": job.skipped,
        "perf/tokens_per_second": tokens_per_second,
        "perf/tokens_per_second_per_device": tokens_per_second / job.world.size,
        "perf/tflops_per_device": tflops,
        "perf/mfu_pct": 100 * tflops / peak if peak else None,
        "perf/step_seconds": seconds,
        "perf/data_wait_pct": 100 * waited / seconds,
        "perf/elapsed_seconds": job.log.seconds_before + time.monotonic() - job.began,
        **result.balance.metrics(),
        **{name: finite(number) for name, number in result.metrics.items()},
    }


def finite(number: float) -> float | None:
    """JSON has no infinities: they become null."""
    return number if math.isfinite(number) else None


class PeakMemory:
    """Peak since construction (build it before the model): CUDA's allocator, or the resident set less its start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        self.start_kib = resident("VmRSS")
        try:
            _CLEAR.write_text("5")  # resets VmHWM
        except OSError:
            self.start_kib = self.start_kib and max(self.start_kib, resident("VmHWM") or 0)

    @property
    def gib(self) -> float | None:
        """GiB, or None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        peak = resident("VmHWM")
        return None if peak is None or self.start_kib is None else max(0, peak - self.start_kib) / 2**20

    @property
    def reserved_gib(self) -> float | None:
        """GiB that CUDA's allocator took of the GPU, fragments included; None elsewhere."""
        return torch.cuda.max_memory_reserved(self.device) / 2**30 if self.device.type == "cuda" else None

    def over_ranks(self) -> dict[str, float | None]:
        """The largest peaks over ranks, GiB, as a row has them."""
        mine = {"memory/peak_gib": self.gib}
        if self.reserved_gib is not None:
            mine["memory/peak_reserved_gib"] = self.reserved_gib
        peaks = torch.tensor([-1.0 if each is None else each for each in mine.values()], device=self.device)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        return {name: None if peak < 0 else peak for name, peak in zip(mine, peaks.tolist(), strict=True)}


def resident(key: str) -> int | None:
    """A field of /proc/self/status in KiB."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(key + ":")), None)
