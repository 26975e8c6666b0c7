"""Memory besides the device's: of this machine, page-locked if a GPU copies to it, or of a file.

A file is for a device that is the CPU itself, or for a machine with little memory: the kernel writes its pages to disk
and reclaims them when others need them. It has no name, and is gone with the process, however that ends.
"""

import errno
import mmap
import os
import shutil
import tempfile
import weakref
from bisect import bisect_right
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import UserError
from fivefold.core.files import take_space
from fivefold.core.units import human_bytes

HOST = "host"  # of `offload_to`: not a folder
SEGMENT = 32 * 2**20  # bytes of a segment, at least
_FINE = 64  # sizes between two powers of two: a block is at most a sixty-fourth larger than what is asked for


class HostMemory:
    """Blocks of bytes at `place`: `host`, or a folder for a file. A freed block is used again.

    `locks`: page-locked, for a GPU to copy to while it computes. Raises `UserError` if the folder cannot be written or
    its disk is full.
    """

    def __init__(self, place: str, *, locks: bool) -> None:
        self._place, self._locks = place, locks and place == HOST
        self._file = None if place == HOST else _file(Path(place))
        if self._file is not None:
            weakref.finalize(self, os.close, self._file)
        self.is_file = self._file is not None
        self._segments: list[tuple[Tensor, mmap.mmap | None]] = []
        self._starts: list[int] = []  # addresses of the segments of a file, in order
        self._left = torch.empty(0, dtype=torch.uint8)  # of the last segment
        self._free: dict[int, list[Tensor]] = {}
        self._locked: list[Tensor] = []
        self.bytes = 0  # of all segments
        weakref.finalize(self, _unlock, self._locked)

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

    def rest(self, block: Tensor) -> None:
        """Mark a block that is not read soon: pages of a file need not stay in this process."""
        if self._file is not None and block.nbytes:
            segment = self._sorted()[bisect_right(self._starts, block.data_ptr()) - 1]
            assert segment[1] is not None
            start = block.data_ptr() - segment[0].data_ptr()
            segment[1].madvise(mmap.MADV_DONTNEED, start, block.nbytes)

    def _sorted(self) -> list[tuple[Tensor, mmap.mmap | None]]:
        if len(self._starts) != len(self._segments):
            self._segments.sort(key=lambda segment: segment[0].data_ptr())
            self._starts = [segment[0].data_ptr() for segment in self._segments]
        return self._segments

    def _grow(self, size: int) -> None:
        size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if self._file is None:
            found, mapped = allocate(size, torch.uint8), None
            if self._locks:
                page_lock(found)
                self._locked.append(found)
        else:
            self._lengthen(size)
            mapped = mmap.mmap(self._file, size, offset=self.bytes)
            found = torch.frombuffer(mapped, dtype=torch.uint8)
        self._segments.append((found, mapped))
        self._left = found
        self.bytes += size

    def _lengthen(self, size: int) -> None:
        """Extend the file by so many bytes, on the disk too."""
        assert self._file is not None
        try:
            take_space(self._file, self.bytes, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = shutil.disk_usage(self._place).free
            raise UserError(
                f"memory.offload_to {self._place}: {human_bytes(size)} more are needed there, and {human_bytes(free)} "
                "are free",
                fix="name a folder on a larger disk, or free space",
                more="docs/explain/memory.md",
            ) from error


def allocate(size: int, dtype: torch.dtype) -> Tensor:
    """Allocate `size` numbers in this machine's memory, not initialised."""
    return torch.empty(size, dtype=dtype)


def page_lock(buffer: Tensor) -> None:
    """Page-lock a buffer, until `unlock`, so that a GPU copies to and from it by itself. (torch's own page-locked
    memory would be rounded up to a power of two, up to twice as much, and kept by its allocator when freed.)"""
    _check(_runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))


def unlock(buffer: Tensor) -> None:
    """Undo `page_lock`."""
    _check(_runtime().cudaHostUnregister(buffer.data_ptr()))


def _unlock(buffers: list[Tensor]) -> None:
    while buffers:
        unlock(buffers.pop())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(error: object) -> None:
    torch.cuda.check_error(int(error))  # type: ignore[call-overload]


def _file(folder: Path) -> int:
    """Create a file without a name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(prefix="fivefold-offload-", dir=folder)
        os.unlink(name)
        return file
    except OSError as error:
        raise UserError(
            f"memory.offload_to {folder} cannot be written: {error.strerror}", fix="name a folder of yours on a disk"
        ) from error


def _rounded(size: int) -> int:
    """Size of the block for so many bytes: whole pages, and few sizes, so that blocks are used again."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 1 - _FINE.bit_length() + 1))
    return -(-max(size, 1) // step) * step


def most_bytes(size: int, blocks: int) -> int:
    """Most bytes that so many blocks of `size` bytes in all may take."""
    return size + size // _FINE + blocks * mmap.PAGESIZE
