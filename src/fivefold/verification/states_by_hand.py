"""Optimizer state in bf16 or 8 bits in the reference: every number is rounded by a search in a table.

It shares only the block length and the choice of a parameter's type with `training/optimizers/states.py`. The random
numbers are drawn with numpy.
"""

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fivefold.core.optimizers import StateDtype, block_length

_WORDS = np.arange(0x7F80, dtype=np.uint32) << np.uint32(16)  # all bf16 below infinity, as the upper half of fp32


def kept(values: Tensor, name: str, kind: str, step: int, dtype: StateDtype) -> Tensor:
    """Round a kind of state of the whole parameter `name` after `step` steps; the result has the type of `values`."""
    if dtype == "fp32":
        return values
    rows = values.detach().cpu().reshape(-1, values.shape[-1])
    at_random = uniform(name, step, *rows.shape) if kind == "exp_avg_sq" else None
    if dtype == "bf16":
        chance = None if at_random is None else 1 - at_random  # to match `states.py`, where large numbers round up
        left = _rounded(rows.to(torch.float32).double(), numbers_of_bf16(), chance)
    else:
        left = _in_blocks(rows, at_random)
    return left.to(values.dtype).view_as(values).to(values.device)


def _in_blocks(rows: Tensor, at_random: Tensor | None) -> Tensor:
    table = tree(signed=at_random is None).to(rows.dtype)
    found = torch.zeros_like(rows)
    length = block_length(rows.shape[-1])
    for first in range(0, rows.shape[-1], length):
        block = slice(first, first + length)
        largest = rows[:, block].abs().max(1, keepdim=True).values
        parts = rows[:, block] / largest.masked_fill(largest == 0, 1)
        left = _rounded(parts, table, None if at_random is None else at_random[:, block])
        if at_random is not None:
            left = torch.where((parts > 0) & (left == 0), table[1], left)
        found[:, block] = left * largest
    return found


def _rounded(values: Tensor, table: Tensor, at_random: Tensor | None) -> Tensor:
    """Round to the nearest number of the sorted `table`; with `at_random`, to one of the two neighbours by chance."""
    size = values if float(table[0]) < 0 else values.abs()
    above = torch.searchsorted(table, size.contiguous()).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    if at_random is None:
        is_even = above % 2 == 0
        is_up = ((high - size) < (size - low)) | (((high - size) == (size - low)) & is_even)
    else:
        is_up = (size == high) | ((size - low) / (high - low) > at_random)
    return torch.where(is_up, high, low) * (1 if size is values else values.sign())


@lru_cache
def numbers_of_bf16() -> Tensor:
    """All finite numbers of bf16 from zero up, fp64."""
    return torch.from_numpy(_WORDS.view(np.float32).astype(np.float64))


@lru_cache
def tree(*, signed: bool) -> Tensor:
    """The dynamic tree of 8 bits, fp64: the midpoints of evenly spaced numbers in each of seven decades, 0 and 1."""
    found = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        found += [middles, -middles] if signed else [middles]
    return torch.cat(found).sort().values


def uniform(name: str, step: int, rows: int, width: int) -> Tensor:
    """Random numbers in (0, 1) for a whole parameter, fp64 [rows, width]: (n + 0.5) / 65,536 for integers n."""
    golden = np.uint32(0x9E3779B9)
    key = np.uint32(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little"))
    with np.errstate(over="ignore"):
        of_step = _hash(np.array([step], dtype=np.uint32) * golden ^ key)
        of_rows = _hash(np.arange(rows, dtype=np.uint32) ^ of_step)
        each = _hash(of_rows[:, None] ^ (np.arange(width, dtype=np.uint32) * golden))
    return torch.from_numpy(((each & np.uint32(0xFFFF)) + 0.5) / 65536.0)


def _hash(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Hash 32-bit unsigned integers with lowbias32."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    mixed: npt.NDArray[np.uint32] = x ^ (x >> np.uint32(16))
    return mixed
