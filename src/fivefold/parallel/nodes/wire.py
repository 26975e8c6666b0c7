"""Weights and gradients in eight bits on the wire: each block of a row is divided by its scale and rounded.

A block is a part of a row of the whole parameter (`block_length`), so that no layout that separates rows cuts one, and
a weight is the same under all of them. Vectors, and rows without blocks, are sent as they are. What a rank sends to
another:

    scales    one for each block, in fp32 (fp64 where that is computed in): the largest magnitude / 127 (`STEPS`)
    others    parameters without blocks, in the dtype of what is coded
    codes     int8
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST, TINY = 127, torch.finfo(torch.float32).tiny  # in place of the scale of a block of zeros
# What the largest magnitude of a block becomes. Half of it, which sums of a few coarse numbers often are, is then no
# tie that the last bit of a sum decides, and so the order of that sum.
STEPS = MOST + 2**-12


@dataclass(frozen=True)
class Part:
    """A parameter's part of what a rank sends: so many `numbers`, in blocks of so many; 0: sent as they are."""

    numbers: int
    block: int


class Int8Wire:
    """Code of a unit whose shard on every rank has these `parts`, one after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts, self._sizes = parts, [part.numbers for part in parts]
        self._codes = sum(part.numbers for part in parts if part.block)
        self._scales = sum(part.numbers // part.block for part in parts if part.block)

    def encode(self, values: Tensor) -> Tensor:
        """Code shards, [shards, numbers], one by one: uint8 [shards, bytes]."""
        wide, scales, others, codes = wide_dtype(values.dtype), list[Tensor](), list[Tensor](), list[Tensor]()
        for part, own in zip(self._parts, torch.split(values, self._sizes, 1), strict=True):
            if not part.block:
                others.append(own.contiguous())
                continue
            blocks = own.reshape(len(own), -1, part.block).to(wide)
            scale = blocks.abs().amax(2, keepdim=True) / STEPS
            blocks = blocks / scale.clamp(min=TINY)
            codes.append(blocks.round_().clamp_(-MOST, MOST).to(torch.int8).view(len(own), -1))
            scales.append(scale.view(len(own), -1))
        return torch.cat([part.view(torch.uint8) for part in (*scales, *others, *codes)], 1)

    def decode(self, coded: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        """Write what each rank has coded, [ranks, bytes], to `values` [ranks, numbers]. `dtype`: of what was coded."""
        ranks, wide = len(values), wide_dtype(dtype)
        ends = [wide.itemsize * self._scales, coded.shape[1] - self._codes]
        scales, others, codes = (section.contiguous() for section in coded.tensor_split(ends, 1))
        of_scales, of_codes = iter(self._blocks(scales.view(wide))), iter(self._coded(codes.view(torch.int8)))
        plain = [part.numbers for part in self._parts if not part.block]
        of_others = iter(torch.split(others.view(dtype), plain, 1))
        for part, own in zip(self._parts, torch.split(values, self._sizes, 1), strict=True):
            if part.block:
                blocks = next(of_codes).reshape(ranks, -1, part.block).to(wide)
                own.copy_((blocks * next(of_scales).unsqueeze(-1)).view(ranks, -1))
            else:
                own.copy_(next(of_others))

    def _blocks(self, scales: Tensor) -> Sequence[Tensor]:
        return torch.split(scales, [part.numbers // part.block for part in self._parts if part.block], 1)

    def _coded(self, codes: Tensor) -> Sequence[Tensor]:
        return torch.split(codes, [part.numbers for part in self._parts if part.block], 1)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales and of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
