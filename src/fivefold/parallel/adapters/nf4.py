"""Frozen weights in four bits: NF4 (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), as in `bitsandbytes`.

64 numbers in a row share a scale, their largest absolute value. Each number divided by it becomes the nearest of 16
levels. A row of I numbers is stored as I / 2 bytes of codes, two to a byte with the first in the high half, and then
I / 64 scales in fp32: 9 I / 16 bytes, 4.5 bits a number. So a weight [O, I] is stored as bytes [O, 9 I / 16], split by
rows like the weight. A piece of whole blocks has the same codes as the whole.

Example: 64 numbers whose largest absolute value is 2 are 32 bytes and the scale 2.0.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel.adapters.settings import NF4_BLOCK, nf4_numbers

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_LEAST = 1e-38  # a block of zeros is divided by this
_AT_ONCE = 2**24  # numbers dequantised at once: 64 MiB in fp32


def quantise(weight: Tensor) -> Tensor:
    """Quantise a weight [O, I] from fp32 to uint8 [O, 9 I / 16]; I is a multiple of 64."""
    blocks = weight.detach().float().reshape(len(weight), -1, NF4_BLOCK)
    scales = blocks.abs().amax(dim=-1)
    scaled = (blocks * (1.0 / scales.clamp(min=_LEAST)).unsqueeze(-1)).clamp(-1, 1).flatten(-2)
    levels = torch.tensor(LEVELS, device=weight.device)
    codes = torch.bucketize(scaled, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)
    return torch.cat([(codes[:, ::2] << 4) | codes[:, 1::2], scales.contiguous().view(torch.uint8)], dim=-1)


def put(packed: Tensor, columns: slice, weight: Tensor) -> None:
    """Write `weight` [O, C] as the numbers `columns` of rows [O, 9 I / 16]. Both edges are multiples of 64."""
    codes = nf4_numbers(packed.shape[-1]) // 2
    first, last, _ = columns.indices(2 * codes)
    own, half = quantise(weight), (last - first) // 2
    packed[:, first // 2 : last // 2] = own[:, :half]
    packed[:, codes + first // 16 : codes + last // 16] = own[:, half:]


def restored(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise rows [O, 9 I / 16] to the weight [O, I]: level times scale in fp32, in `dtype`."""
    found: Tensor = _restored_as(packed, torch.empty(0, dtype=dtype, device=packed.device))
    return found


# One operator instead of elementwise ones: a compiler would save their dequantised weights for backward, the whole
# model in 16 bits. With the gradient as `like`, backward cannot be given what forward computed.
@torch.library.custom_op("fivefold::from_nf4", mutates_args=())
def _restored_as(packed: Tensor, like: Tensor) -> Tensor:
    """Dequantise to the dtype of `like`."""
    numbers = nf4_numbers(packed.shape[-1])
    out = torch.empty(len(packed), numbers, dtype=like.dtype, device=packed.device)
    pairs, most = _pairs(packed.device), max(1, _AT_ONCE // numbers)
    for rows, into in zip(*(torch.split(tensor, most) for tensor in (packed, out)), strict=True):
        levels = F.embedding(rows[:, : numbers // 2].int(), pairs).view(len(rows), -1, NF4_BLOCK)
        scales = rows[:, numbers // 2 :].contiguous().view(torch.float32)
        into.copy_((levels * scales.unsqueeze(-1)).view_as(into))
    return out


@_restored_as.register_fake
def _(packed: Tensor, like: Tensor) -> Tensor:
    return packed.new_empty(len(packed), nf4_numbers(packed.shape[-1]), dtype=like.dtype)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two levels of every byte, fp32 [256, 2]."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=-1)


class Nf4:
    """`Products` of frozen 4-bit weights [O, I]. Backward saves only the bytes, and dequantises the weight again."""

    put = staticmethod(put)

    def outputs(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return tuple(torch.matmul(x, _restored_as(weight, x).T) for weight in weights), (x.new_empty(0),)

    def input_again(self, x: Tensor, scales: Sequence[Tensor]) -> Tensor:
        return x.new_empty(0)

    def gradients(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor], *, wants_input: bool
    ) -> tuple[Tensor | None, Callable[[], tuple[Tensor, ...]]]:
        def later() -> tuple[Tensor, ...]:
            raise AssertionError("a weight in four bits is frozen")

        if not wants_input:
            return None, later
        parts = [torch.matmul(grad, _restored_as(weight, grad)) for grad, weight in zip(grads, weights, strict=True)]
        return sum(parts[1:], start=parts[0]), later


def round_trip(weight: Tensor) -> Tensor:
    """Quantise a weight [O, I] to four bits and back, fp32."""
    return restored(quantise(weight), torch.float32)
