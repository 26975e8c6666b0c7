"""A check of the devices: does a rank compute much more slowly than the others, step after step?

In a step all ranks wait for the slowest one, so no time of a step tells which that is. Here each rank multiplies the
same matrices alone, a few milliseconds long. A rank that is slow in several checks in a row is a straggler: a device
that is too hot, or shared, or broken.
"""

import time
from statistics import median_low

import torch

from fivefold.training.checks.findings import gather

SLOW = 2.0  # times the median of all ranks; of two ranks, the faster one
IN_A_ROW = 3  # checks
_TRIES = 5  # the fastest counts: another process may interrupt one
_SIZE = {"cpu": 256, "cuda": 4096}


class Pace:
    """The pace of the ranks, as the checks of a start have seen it."""

    def __init__(self) -> None:
        self._slow: dict[int, int] = {}  # rank -> checks in a row

    def check(self, device: torch.device) -> list[str]:
        """Measure all ranks together. Returns a text for each new straggler, the same on every rank."""
        seconds = gather(torch.tensor([_seconds(device)], dtype=torch.float64, device=device)).flatten().tolist()
        return self.see(seconds)

    def see(self, seconds: list[float]) -> list[str]:
        """As `check`, from the seconds of each rank."""
        usual = median_low(seconds)
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank, took in enumerate(seconds) if took > SLOW * usual > 0}
        new = [rank for rank, times in self._slow.items() if times == IN_A_ROW]
        return [f"rank {rank} computes {seconds[rank] / usual:.1f} times as slowly as the usual one" for rank in new]

    @property
    def stragglers(self) -> list[int]:
        """The ranks that are slow at present."""
        return [rank for rank, times in self._slow.items() if times >= IN_A_ROW]


def _seconds(device: torch.device) -> float:
    """The seconds of a product of matrices on this rank."""
    size, dtype = _SIZE.get(device.type, 256), torch.float32 if device.type == "cpu" else torch.bfloat16
    x, found = torch.ones(size, size, device=device, dtype=dtype), []
    for _ in range(_TRIES):
        began = time.perf_counter()
        torch.mm(x, x)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)
