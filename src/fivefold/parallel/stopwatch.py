"""When the slots of a pipeline step ran on this rank.

On a CPU the wall clock measures the slots. On a GPU a slot is only queued, so CUDA events between the slots measure
them. The time that a slot waits for hidden states or a gradient ends at its start, and is kept apart.
"""

import time

import torch
import torch.distributed as dist

from fivefold.core.schedule import Slot, Timed

Mark = float | torch.cuda.Event


class Stopwatch:
    """Starts at zero on all ranks of a group at once, which all make one."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._is_cuda = device.type == "cuda"
        dist.barrier(group)
        self._synchronize()
        self._slots: list[Slot] = []
        self._marks: list[Mark] = []
        self._zero = self._now()

    def asked(self, slot: Slot) -> None:
        """The rank has come to `slot`, which may have to wait."""
        self._slots.append(slot)
        self._marks.append(self._now())

    def mark(self) -> None:
        """What the slot needs is here; and again, when the slot is done."""
        self._marks.append(self._now())

    def timed(self, rank: int) -> list[Timed]:
        """The slots with their seconds since zero. Waits for the device."""
        self._synchronize()
        seconds = [self._seconds(mark) for mark in self._marks]
        of_slots = zip(self._slots, seconds[::3], seconds[1::3], seconds[2::3], strict=True)
        return [Timed(rank, slot, start, end, start - asked) for slot, asked, start, end in of_slots]

    def _now(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, mark: Mark) -> float:
        if isinstance(self._zero, float) or isinstance(mark, float):
            assert isinstance(self._zero, float) and isinstance(mark, float)
            return mark - self._zero
        return float(self._zero.elapsed_time(mark)) / 1000  # milliseconds

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
