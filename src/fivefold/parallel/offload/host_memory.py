"""Memory of this machine beside the device's, page-locked if a GPU copies to it. Copies to and from it overlap compute
kernels on a GPU; on a CPU they are done when they are requested."""

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SEGMENT = 32 * 2**20  # bytes of a segment, at least
_FINE = 64  # sizes between two powers of two: a block is at most a sixty-fourth larger than what is asked for


class HostMemory:
    """Blocks of bytes. A freed block is used again. `locks`: page-locked, for a GPU to copy to while it computes."""

    def __init__(self, *, locks: bool) -> None:
        self._locks = locks
        self._segments: list[Tensor] = []
        self._left = torch.empty(0, dtype=torch.uint8)  # of the last segment
        self._free: dict[int, list[Tensor]] = {}
        self.bytes = 0  # of all segments
        if locks:
            weakref.finalize(self, _unlock, self._segments)

    def reserve(self, size: int) -> None:
        """Make room for blocks of `size` bytes in all, now."""
        if size > len(self._left):
            self._grow(size)

    def take(self, size: int) -> Tensor:
        """Take a block, uint8 [size], not initialised."""
        rounded = _rounded(size)
        if self._free.get(rounded):
            return self._free[rounded].pop()[:size]
        if rounded > len(self._left):
            self._grow(max(rounded, SEGMENT))
        block, self._left = self._left[:rounded], self._left[rounded:]
        return block[:size]

    def give_back(self, block: Tensor) -> None:
        """Free a block that nothing reads any more, once the copies in flight have ended."""
        rounded = _rounded(len(block))
        whole = block.as_strided((rounded,), (1,))
        self._free.setdefault(rounded, []).append(whole)

    def _grow(self, size: int) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        segment = allocate(size, torch.uint8)
        if self._locks:
            page_lock(segment)
        self._segments.append(segment)
        self._left = segment
        self.bytes += size


def allocate(size: int, dtype: torch.dtype) -> Tensor:
    """Allocate `size` numbers in this machine's memory, not initialised."""
    return torch.empty(size, dtype=dtype)


def page_lock(buffer: Tensor) -> None:
    """Page-lock a buffer, until `unlock`, so that a GPU copies to and from it by itself. (torch's own page-locked
    memory would be rounded up to a power of two, up to twice as much, and kept by its allocator when freed.)"""
    _check(_runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))


def unlock(buffer: Tensor) -> None:
    _check(_runtime().cudaHostUnregister(buffer.data_ptr()))


def _unlock(buffers: list[Tensor]) -> None:
    while buffers:
        unlock(buffers.pop())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(error: object) -> None:
    torch.cuda.check_error(int(error))  # type: ignore[call-overload]


def _rounded(size: int) -> int:
    """Size of the block for so many bytes: whole pages, and few sizes, so that blocks are used again."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 1 - _FINE.bit_length() + 1))
    return -(-max(size, 1) // step) * step


def most_bytes(size: int, blocks: int) -> int:
    """Most bytes that so many blocks of `size` bytes in all may take."""
    return size + size // _FINE + blocks * mmap.PAGESIZE


# ---- copies ----------------------------------------------------------------------------------------------------------

Pairs = Sequence[tuple[Tensor, Tensor]]  # (target, source)


@dataclass
class CopiesInFlight:
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
        """Make the host wait for these copies, and all later work of the compute stream."""
        if self.event is not None:
            self.event.synchronize()
        self.meet()


class Lane:
    """Copies one after the other, on a separate stream if the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def is_apart(self) -> bool:
        """True if copies end some time after they were requested."""
        return self._stream is not None

    def copy(self, pairs: Pairs) -> CopiesInFlight:
        """Copy every source to its target, after all work of the compute stream: its writes, and reads of targets."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return CopiesInFlight(())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return CopiesInFlight(pairs, self._stream.record_event())
