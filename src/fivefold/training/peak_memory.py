"""The peak memory of a run."""

from pathlib import Path

import torch
import torch.distributed as dist

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak since construction (build it before the model): CUDA's allocator, or the resident set minus its start."""

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
        """Peak in GiB; None if the system does not report it."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        peak = resident("VmHWM")
        return None if peak is None or self.start_kib is None else max(0, peak - self.start_kib) / 2**20

    @property
    def reserved_gib(self) -> float | None:
        """Peak in GiB reserved by CUDA's allocator, fragmentation included; None on a CPU."""
        return torch.cuda.max_memory_reserved(self.device) / 2**30 if self.device.type == "cuda" else None

    def over_ranks(self) -> dict[str, float | None]:
        """The largest peaks over all ranks in GiB, as entries of a metrics row."""
        mine = {"memory/peak_gib": self.gib}
        if self.reserved_gib is not None:
            mine["memory/peak_reserved_gib"] = self.reserved_gib
        peaks = torch.tensor([-1.0 if value is None else value for value in mine.values()], device=self.device)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        return {name: None if peak < 0 else peak for name, peak in zip(mine, peaks.tolist(), strict=True)}


def resident(key: str) -> int | None:
    """A field of /proc/self/status in KiB."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(key + ":")), None)
