"""Dropout as a function of what is dropped: the same elements for every layout, and again in every recomputed forward.

Whether an element is dropped is decided by 32 bits, the product of two odd numbers modulo 2**32:

    bits[b, t, f] = token[b, t] * feature[f]        dropped if bits < p * 2**32

`token` is a hash of (seed, step, row of the global batch, position in the row, site), `feature` one of (seed, site,
feature). A product of hashes costs one operator over all elements; the hashes themselves are as small as a row and a
column. Backward multiplies again, so nothing is saved but `token` and `feature`.

The probabilities of attention are dropped likewise, by a hash of the query and one of (key, head).

Legend: B rows, T positions, D features, H query heads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_GOLDEN = 0x9E3779B9  # spreads consecutive numbers over 32 bits


def key_of(*parts: int | str) -> int:
    """A number of 32 bits, signed, from numbers and names."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "big", signed=True)


def token_hashes(seed: int, step: int, first_row: int, rows: int, length: int, device: torch.device) -> Tensor:
    """Hashes of the tokens of consecutive rows of a global batch: int32 [rows, length]."""
    row_B = torch.arange(first_row, first_row + rows, dtype=torch.int32, device=device)
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


def threshold(p: float) -> int:
    """Signed number of 32 bits below which is the share `p` of all of them."""
    return round(p * 2**32) - 2**31


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
    """`Drop`, without its backward."""
    if p >= 1:
        return torch.zeros_like(x)
    return (x * (1 / (1 - p))).masked_fill_(token.unsqueeze(-1) * feature < threshold(p), 0.0)


# ---- probabilities of attention --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionDrops:
    """Dropped probabilities of attention: hashes of the queries, int32 [B, T], and of keys and heads, int32 [B, T, H];
    both of whole rows."""

    queries: Tensor
    keys: Tensor
    p: float


def attention_drops(tokens: Tensor, key: Tensor, heads: Tensor, p: float) -> AttentionDrops:
    """Drops of a site, from hashes of the tokens of whole rows [B, T]. `heads`: hashes of the query heads [H]."""
    return AttentionDrops(of_site(tokens, key), mixed(mixed(tokens ^ ~key).unsqueeze(-1) ^ heads) | 1, p)


# ---- calls of F.dropout ----------------------------------------------------------------------------------------------


@contextmanager
def dropout_by(function: Callable[..., Tensor]) -> Iterator[None]:
    """Let `function` serve the calls of `F.dropout` in this context."""
    before, F.dropout = F.dropout, function
    try:
        yield
    finally:
        F.dropout = before
