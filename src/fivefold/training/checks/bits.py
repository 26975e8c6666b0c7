"""A hash of the bits of tensors, computed where they lie: what tells copies apart, and before from after."""

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 2**20  # elements hashed at a time: what bounds the memory for it
GOLDEN, MIX, MIX_AGAIN = -7046029254386353131, -4658895280553007687, -7723592293110705685  # of splitmix64, all odd


def hashes(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """64 bits of each tensor, int64 [tensors], without waiting for the device; 0 for one that is not there or empty.

    The elements as integers times odd numbers, summed mod 2^64: a change of one element always shows, and so does
    another order, but for one case in 2^32 or fewer.
    """
    largest = max((tensor.nbytes for tensor in tensors if tensor is not None), default=0)
    factors = _odd_numbers(min(largest // 2, PIECE), device)
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([_hash(t.to(device), factors) if t is not None and t.numel() else nothing for t in tensors])


def _hash(tensor: Tensor, factors: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    words = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)  # fp64: halves, or a sign is one bit
    value = torch.ones((), dtype=torch.int64, device=flat.device)
    for piece in torch.split(words, PIECE):
        value = value * GOLDEN + (piece * factors[: len(piece)]).sum()
    return value


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Without a pattern, int64 [count]: splitmix64 (Steele, Lea, Flood 2014), with arithmetic shifts."""
    x = torch.arange(1, count + 1, device=device) * GOLDEN
    x = (x ^ (x >> 30)) * MIX
    x = (x ^ (x >> 27)) * MIX_AGAIN
    return (x ^ (x >> 31)) | 1
