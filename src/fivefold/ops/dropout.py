"""Dropout and noise as functions of what is dropped: the same elements for every layout, and again in every recomputed
forward.

Whether an element is dropped is decided by 32 bits, the product of two odd numbers modulo 2**32:

    bits[b, t, f] = token[b, t] * feature[f]        of all signed numbers the share p is dropped, from -2**31 on

`token` is a hash of (seed, step, row of the global batch, position in the row, site), `feature` one of (seed, site,
feature). A product of hashes costs one operator over all elements; the hashes themselves are as small as a row and a
column. Backward multiplies again, so nothing is saved but `token` and `feature`.

The probabilities of attention are dropped likewise, by a hash of the query and one of (key, head). The same bits are
uniform noise.

Legend: B rows, T positions, D features, H query heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a type -> numbers of its bits
_GOLDEN = 0x9E3779B9  # spreads consecutive numbers over 32 bits


def key_of(*parts: int | str) -> int:
    """A number of 32 bits, signed, from numbers and names."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "big", signed=True)


def token_hashes(seed: int, step: int, rows: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Hashes of the tokens of the `rows` of a global batch, which are numbered in it: int32 [rows, length]."""
    row_B = torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)
    position_T = torch.arange(length, dtype=torch.int32, device=device)
    of_rows = mixed(row_B * _signed(_GOLDEN) ^ key_of(seed, step))
    return mixed(of_rows.unsqueeze(-1) + position_T * _signed(_GOLDEN))


def feature_hashes(seed: int, site: str, features: Tensor) -> Tensor:
    """Odd hashes of the `features`, global numbers int32 [D], of a site: int32 [D]."""
    return mixed(features * _signed(_GOLDEN) ^ key_of(seed, site, "features")) | 1


def of_site(tokens: Tensor, key: Tensor) -> Tensor:
    """Odd hashes of tokens at the site with a `key`."""
    return mixed(tokens ^ key) | 1


def mixed(bits: Tensor) -> Tensor:
    """Mix 32-bit numbers, one to one: `lowbias32` of https://nullprogram.com/blog/2018/07/31."""
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x21F0AAAD
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * _signed(0xD35A2D97)
    return bits ^ (bits >> 15 & 0x1FFFF)


def _signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


def kept(bits: Tensor, p: float) -> Tensor:
    """Turn 32-bit numbers in place into masks: all ones where an element is kept, zero where it is dropped.

    Sign bits do what a comparison with `drop_below` would, at a twentieth of its time on a CPU: the lowest bit is left
    out, so that the difference to the bound does not overflow.
    """
    bits.bitwise_right_shift_(1).bitwise_not_()
    return bits.add_(round(p * 2**31) - 2**30).bitwise_right_shift_(31)


def drop_below(p: float) -> int:
    """Signed 32-bit number below which an element is dropped. With p = 1 the largest is kept, times 0."""
    return min(2 * round(p * 2**31) - 2**31, 2**31 - 1)


def kept_scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def scaled(mask: Tensor, x: Tensor, p: float) -> Tensor:
    """Elements of `x` that a mask keeps, times 1 / (1 - p), in a new tensor or in place of the mask."""
    number = _NUMBERS[x.dtype.itemsize]
    return mask.to(number).bitwise_and_(x.view(number)).view(x.dtype).mul_(kept_scale(p))


class Drop(torch.autograd.Function):
    """x [.., D] without the elements that `token` [..] and `feature` [D] drop; the others times 1 / (1 - p)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, feature: Tensor, p: float) -> Tensor:
        # Not by `save_for_backward`: a recomputed forward stops at the last tensor saved in this way, so it would run a
        # collective before it again.
        ctx.token, ctx.feature, ctx.p = token, feature, p
        return dropped(x, token, feature, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return dropped(grads[0], ctx.token, ctx.feature, ctx.p), None, None, None


def dropped(x: Tensor, token: Tensor, feature: Tensor, p: float) -> Tensor:
    return scaled(kept(token.unsqueeze(-1) * feature, p), x, p)


# ---- probabilities of attention --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionDrops:
    """Dropped probabilities of attention: hashes of the queries, int32 [B, T], and of keys and heads, int32 [B, T, H];
    both of whole rows."""

    queries: Tensor
    keys: Tensor
    p: float

    def as_one_row(self) -> "AttentionDrops":
        """Drops of the tokens of all rows, one row after the other: [1, B * T]."""
        return AttentionDrops(self.queries.flatten().unsqueeze(0), self.keys.flatten(0, 1).unsqueeze(0), self.p)


def attention_drops(tokens: Tensor, key: Tensor, heads: Tensor, p: float) -> AttentionDrops:
    """Drops of a site, from hashes of the tokens of whole rows [B, T]. `heads`: hashes of the query heads [H]."""
    return AttentionDrops(of_site(tokens, key), mixed(mixed(tokens ^ ~key).unsqueeze(-1) ^ heads) | 1, p)


# ---- noise -----------------------------------------------------------------------------------------------------------


def uniform(bits: Tensor, low: float, high: float, dtype: torch.dtype) -> Tensor:
    """Numbers of `dtype` between `low` and `high`, from numbers of 32 bits."""
    wide = bits.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return wide.mul_((high - low) / 2**32).add_((high + low) / 2).to(dtype)


# ---- calls of F.dropout and Tensor.uniform_ --------------------------------------------------------------------------


class CallsServed(TorchFunctionMode):
    """Let `drop` and `fill` serve the calls of `F.dropout` and `Tensor.uniform_` in this context, on this thread alone.
    What they call themselves is torch's."""

    def __init__(self, drop: Callable[..., Tensor], fill: Callable[..., Tensor]) -> None:
        super().__init__()
        self.drop, self.fill = drop, fill

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        served = self.drop if func is F.dropout else self.fill if func is Tensor.uniform_ else func
        return served(*args, **(kwargs or {}))
