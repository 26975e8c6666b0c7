"""Peak memory of this process, as `memory/peak_gib` means it, and what is said when that of a GPU does not suffice."""

import re
from pathlib import Path

import torch

from fivefold.core.errors import RunFailed

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak since construction (build it before the model): CUDA's allocator, or the resident set less its start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        self.start_kib = _resident("VmRSS")
        try:
            _CLEAR.write_text("5")  # resets VmHWM
        except OSError:
            self.start_kib = self.start_kib and max(self.start_kib, _resident("VmHWM") or 0)

    @property
    def gib(self) -> float | None:
        """GiB, or None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        peak = _resident("VmHWM")
        return None if peak is None or self.start_kib is None else max(0, peak - self.start_kib) / 2**20

    @property
    def reserved_gib(self) -> float | None:
        """GiB that CUDA's allocator took of the GPU, fragments included; None elsewhere."""
        return torch.cuda.max_memory_reserved(self.device) / 2**30 if self.device.type == "cuda" else None


def out_of_gpu_memory(error: BaseException, rank: int) -> RunFailed | None:
    """What a GPU's want of memory means to the user; None for another error. It would come again: no restart helps."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    asked, has = (re.search(pattern, str(error)) for pattern in (_ASKED, _HAS))
    tried = f": {asked[1]} more were asked for" if asked else ""
    there = f", {has[2]} of {has[1]} were free" if has else ""
    return RunFailed(
        f"rank {rank}: the memory of its GPU does not suffice{tried}{there}",
        fix="set memory.recompute: full, lower train.micro_batch_size or data.seq_length, or put the model over more "
        "GPUs with layout.dp_shard or layout.tp",
        more="--debug shows where",
    )


_ASKED = r"Tried to allocate ([\d.]+ \w+)"
_HAS = r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free"


def _resident(key: str) -> int | None:
    """A field of /proc/self/status in KiB."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(key + ":")), None)
