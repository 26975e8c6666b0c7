"""CPU memory for copies of a checkpoint's slices, so that training can continue while they are written.

One flat buffer per dtype, exactly as large as the saved data. For a GPU it is page-locked in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.parallel.offload import host_memory
from fivefold.parallel.offload.host_memory import page_lock, unlock


class Staging:
    """Copies of tensors. The memory is kept for later copies, until `free`."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._locked: list[Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy each of `tensors` to the CPU, to memory that training does not touch. Copies from a GPU are complete
        after a synchronisation with the device."""
        used = dict.fromkeys(self.take(tensors), 0)
        found = []
        for tensor in tensors:
            start = used[tensor.dtype]
            used[tensor.dtype] = stop = start + tensor.numel()
            copy = self._buffers[tensor.dtype][start:stop].view(tensor.shape)
            found.append(copy.copy_(tensor, non_blocking=True))
        return found

    def take(self, tensors: Sequence[Tensor], more: int = 0) -> dict[torch.dtype, int]:
        """Allocate memory for these tensors, and `more` bytes of the first one's dtype. Returns the number of elements
        per dtype."""
        needed: dict[torch.dtype, int] = {}
        for tensor in tensors:
            needed[tensor.dtype] = needed.get(tensor.dtype, 0) + tensor.numel()
        if more:
            first = tensors[0].dtype
            needed[first] += more // first.itemsize
        self._make_room(needed, lock=any(tensor.is_cuda for tensor in tensors))
        return needed

    def free(self) -> None:
        """Free the memory. The copies must not be used afterwards."""
        for buffer in self._locked:
            unlock(buffer)
        self._locked.clear()
        self._buffers.clear()

    def _make_room(self, needed: dict[torch.dtype, int], *, lock: bool) -> None:
        if all(dtype in self._buffers and self._buffers[dtype].numel() >= size for dtype, size in needed.items()):
            return
        self.free()
        for dtype, size in needed.items():
            self._buffers[dtype] = buffer = host_memory.allocate(size, dtype)
            if lock and size:
                page_lock(buffer)
                self._locked.append(buffer)
