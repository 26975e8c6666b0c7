"""Copies between the device and host memory, overlapping compute kernels. On a CPU a copy is done when it is
requested."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]  # (target, source)


@dataclass
class Copies:
    """Copies in flight. They hold their sources and targets until the compute stream has waited for them: the allocator
    may reuse device memory as soon as the compute stream is done with it, and knows nothing of other streams."""

    pairs: Pairs
    event: torch.cuda.Event | None = None

    def meet(self) -> None:
        """Make all later work of the compute stream wait for these copies."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        self.event, self.pairs = None, ()

    def wait(self) -> None:
        """Make the host wait for these copies."""
        if self.event is not None:
            self.event.synchronize()


class Lane:
    """Copies one after the other, on a separate stream if the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def is_apart(self) -> bool:
        """True if copies end some time after they were requested."""
        return self._stream is not None

    def copy(self, pairs: Pairs) -> Copies:
        """Copy every source to its target, after all work that the compute stream has so far: its writes to the
        sources, and its reads of memory that targets reuse."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return Copies(())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return Copies(pairs, self._stream.record_event())
