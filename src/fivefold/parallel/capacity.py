"""A capacity: how many tokens of a packed row an expert takes at most; picks beyond it are dropped.

With a factor c, K picks per token, E experts and a row of n real tokens, an expert takes ceil(c * K * n / E) of them,
the first by their position. Padding stands after all of them and takes no capacity. It is per row, so that it is the
same for every layout: ranks that have parts of a row (sequence parallelism, context parallelism) tell each other how
many picks of every expert each of their blocks has, and count on from those that come before.

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
from fivefold.parallel import ops

SHORTEST = 10**6  # a factor is taken as it is written, to so many parts of one


@dataclass(frozen=True)
class Shares:
    """Which tokens of its rows this rank has (`own`), and every rank that has others (`everyone`, in the order in which
    gathering over `groups`, by axis, puts them)."""

    own: Blocks
    everyone: tuple[Blocks, ...]
    groups: tuple[tuple[str, dist.ProcessGroup], ...]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # exact fractions
def capacity(factor: float, picks: int, experts: int, tokens_B: Tensor) -> Tensor:
    """How many tokens an expert takes of rows with `tokens_B` real ones, int64 [B]: exact, of `factor` as written."""
    over, under = Fraction(str(factor)).limit_denominator(SHORTEST).as_integer_ratio()
    return -((-over * picks * tokens_B) // (under * experts))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives, as in attention
@torch.no_grad()
def beyond(chosen_BTE: Tensor, index_BTK: Tensor, capacity_B: Tensor, shares: Shares) -> Tensor:
    """Which picks find their expert full, bool [B, T, K]. `chosen_BTE`: 1 where a real token goes to an expert."""
    before_BTE = _before(chosen_BTE.long(), shares)
    return before_BTE.gather(-1, index_BTK) >= capacity_B[:, None, None]


def _before(chosen_BTE: Tensor, shares: Shares) -> Tensor:
    """How many tokens of the row that come before each one go to each expert, int64 [B, T, E]."""
    parts = torch.split(chosen_BTE, [stop - start for start, stop in shares.own], 1)
    places = [part.cumsum(1) - part for part in parts]
    if not shares.groups:
        return torch.cat(places, 1)
    slots = _slots(shares.everyone)
    counts_BSE = torch.stack([part.sum(1) for part in parts], 1)
    counts_BSE = F.pad(counts_BSE, (0, 0, 0, slots - len(parts)))
    for _, group in shares.groups:
        counts_BSE = ops.gather(counts_BSE, group)
    starts = [start for blocks in shares.everyone for start in _padded(blocks, slots)]
    for at, (first, _) in enumerate(shares.own):
        earlier = [slot for slot, start in enumerate(starts) if start is not None and start < first]
        places[at] = places[at] + counts_BSE[:, earlier].sum(1, keepdim=True)
    return torch.cat(places, 1)


def _slots(everyone: Sequence[Blocks]) -> int:
    """Of how many blocks a rank tells, whether it has as many or not."""
    return max(map(len, everyone))


def _padded(blocks: Blocks, slots: int) -> list[int | None]:
    return [*(start for start, _ in blocks), *[None] * (slots - len(blocks))]
