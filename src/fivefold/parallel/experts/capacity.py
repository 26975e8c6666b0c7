"""Capacity of experts: the most tokens of a packed row that an expert takes; picks beyond it are dropped.

With a factor c, K picks per token, E experts and a row of n real tokens, an expert takes the first ceil(c * K * n / E)
tokens that pick it, by position. Padding follows the real tokens and takes no capacity. The capacity is per row, so
every layout drops the same picks. Ranks with parts of a row (sequence or context parallelism) gather the picks of each
expert in each of their blocks, and count on from the blocks before their own.

Legend: B rows, T tokens of a row (those of this rank), L of the whole row, E experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.models.offdiagonal import Blocks
from fivefold.parallel.tensor.mappings import gather

SHORTEST = 10**6  # largest denominator of a factor, which is taken as it is written


@dataclass(frozen=True)
class Shares:
    """Token blocks of a row: `own` of this rank, and `everyone`, of all ranks with a part of the row, in the order of a
    gather over one of `groups` after the other."""

    own: Blocks
    everyone: tuple[Blocks, ...]
    groups: tuple[dist.ProcessGroup, ...]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # exact fractions
def capacity(factor: float, top_k: int, experts: int, tokens_B: Tensor) -> Tensor:
    """Tokens that an expert takes of rows with `tokens_B` real ones, int64 [B]: exact, for `factor` as written."""
    over, under = Fraction(str(factor)).limit_denominator(SHORTEST).as_integer_ratio()
    return -((-over * top_k * tokens_B) // (under * experts))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives, as in attention
@torch.no_grad()
def beyond(chosen_BTE: Tensor, index_BTK: Tensor, capacity_B: Tensor, shares: Shares) -> Tensor:
    """Find the picks whose expert is full, bool [B, T, K]. `chosen_BTE`: 1 where a real token goes to an expert."""
    before_BTE = _before(chosen_BTE.long(), shares)
    return before_BTE.gather(-1, index_BTK) >= capacity_B[:, None, None]


def _before(chosen_BTE: Tensor, shares: Shares) -> Tensor:
    """Count, for each token and expert, the earlier tokens of the row that go to this expert, int64 [B, T, E]."""
    parts = torch.split(chosen_BTE, [stop - start for start, stop in shares.own], 1)
    before = [part.cumsum(1) - part for part in parts]
    if not shares.groups:
        return torch.cat(before, 1)
    slots = _slots(shares.everyone)
    counts_BSE = torch.stack([part.sum(1) for part in parts], 1)
    counts_BSE = F.pad(counts_BSE, (0, 0, 0, slots - len(parts)))
    for group in shares.groups:
        counts_BSE = gather(counts_BSE, group)
    starts = [start for blocks in shares.everyone for start in _padded(blocks, slots)]
    for at, (first, _) in enumerate(shares.own):
        earlier = [slot for slot, start in enumerate(starts) if start is not None and start < first]
        before[at] = before[at] + counts_BSE[:, earlier].sum(1, keepdim=True)
    return torch.cat(before, 1)


def _slots(everyone: Sequence[Blocks]) -> int:
    """Number of blocks that each rank sends counts for: the most that any rank has."""
    return max(map(len, everyone))


def _padded(blocks: Blocks, slots: int) -> list[int | None]:
    return [*(start for start, _ in blocks), *[None] * (slots - len(blocks))]
