"""Copies between the device and host memory, beside the kernels that compute. On a CPU a copy is done when it is asked
for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]  # (target, source)


@dataclass
class Copies:
    """Copies under way. They hold what they read and write until the compute stream has met them: the allocator may
    give device memory away again as soon as the compute stream is done with it, and knows nothing of other streams."""

    pairs: Pairs
    event: torch.cuda.Event | None = None

    def meet(self) -> None:
        """What the compute stream is given from here on comes after these copies."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        self.event, self.pairs = None, ()

    def wait(self) -> None:
        """The host reads what was copied."""
        if self.event is not None:
            self.event.synchronize()


class Lane:
    """Copies one after the other, on a stream of their own where the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def is_apart(self) -> bool:
        """Whether copies end some time after they were asked for."""
        return self._stream is not None

    def copy(self, pairs: Pairs) -> Copies:
        """Copy every source to its target, after all that the compute stream was given until now: what it writes to
        the sources, and what it still reads of memory that targets lie in."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return Copies(())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return Copies(pairs, self._stream.record_event())
