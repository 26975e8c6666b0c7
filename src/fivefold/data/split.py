"""From documents to the pieces that rows are made of: the validation split, and the cut at `seq_length`.

    block   16,384 tokens of a document (the last one shorter); goes to one side by the hash of its tokens
    span    the longest run of blocks of one document that are on one side: what training sees as a document
    piece   at most seq_length tokens of a span: never cut again, whole in one row

The label of a position is the next token of its span, also across a cut: a cut costs context but no target.
Positions are tokens counted over all the stores of a side, one store after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.data.store import BLOCK, TokenStore

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """The blocks of all the stores of a side, in order: int64, int64, int64 and uint64 [blocks]."""

    start: Int64s
    length: Int64s
    document: Int64s
    hash: NDArray[np.uint64]


@dataclass(frozen=True)
class Pieces:
    """int64 start, int32 length, and whether the last position has a target, bool: [pieces]."""

    start: Int64s
    length: NDArray[np.int32]
    has_next: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def targets(self) -> NDArray[np.int32]:
        """Targets in each piece, int32 [pieces]."""
        return (self.length - ~self.has_next).astype(np.int32)

    def select(self, keep: NDArray[np.bool_]) -> "Pieces":
        return Pieces(self.start[keep], self.length[keep], self.has_next[keep])


def blocks_of(stores: Sequence[TokenStore]) -> Blocks:
    """The blocks of the stores, as one sequence."""
    offsets = [np.zeros(1, np.int64)]
    for store in stores:
        offsets.append(np.asarray(store.offsets[1:]) + offsets[-1][-1])
    bounds = np.concatenate(offsets)
    lengths = np.diff(bounds)
    which, within = _repeat_and_count(-(-lengths // BLOCK))
    start = bounds[which] + within * BLOCK
    length = np.minimum(BLOCK, bounds[which + 1] - start)
    return Blocks(start, length, which, np.concatenate([store.block_hashes for store in stores]))


def bases_of(stores: Sequence[TokenStore]) -> Int64s:
    """Where each store starts in the count over all of them, int64 [stores]."""
    sizes = [store.meta.tokens for store in stores]
    return np.cumsum(sizes, dtype=np.int64) - sizes


def store_at(bases: Int64s, start: int | Int64s) -> Int64s:
    """Which store the token at `start` is of, counted from 0; never an empty one."""
    return np.searchsorted(bases, start, side="right") - 1


def held_out(blocks: Blocks, fraction: float) -> NDArray[np.bool_]:
    """Which blocks are validation, bool [blocks]: those whose hash is below `fraction` of its range.

    Equal blocks have equal hashes and so stay on one side. If there are two different blocks of two or more tokens,
    each side gets one: the smallest hash is validation, the largest is training.
    """
    if fraction <= 0:
        return np.zeros(len(blocks.hash), np.bool_)
    mask: NDArray[np.bool_] = blocks.hash < np.uint64(min(int(fraction * 2**64), 2**64 - 1))
    candidates = blocks.hash[blocks.length > 1]
    if len(candidates) == 0 or candidates.min() == candidates.max():
        return np.zeros(len(blocks.hash), np.bool_)
    chosen = mask[blocks.length > 1]
    if not chosen.any():
        mask |= blocks.hash == candidates.min()
    elif chosen.all():
        mask &= blocks.hash != candidates.max()
    return mask


def spans_of(blocks: Blocks, side: NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
    """Start and length of each span on the side where `side` is true: int64 [spans] each."""
    same = (blocks.document[1:] == blocks.document[:-1]) & side[1:] & side[:-1]
    first = side & ~np.concatenate([[False], same])
    last = side & ~np.concatenate([same, [False]])
    start = blocks.start[first]
    return start, blocks.start[last] + blocks.length[last] - start


def pieces_of(start: Int64s, length: Int64s, seq_length: int) -> Pieces:
    """The spans cut every `seq_length` tokens."""
    which, within = _repeat_and_count(-(-length // seq_length))
    left = length[which] - within * seq_length
    size = np.minimum(left, seq_length).astype(np.int32)
    return Pieces(start[which] + within * seq_length, size, left > seq_length)


def _repeat_and_count(counts: Int64s) -> tuple[Int64s, Int64s]:
    """counts [2, 0, 3] -> which [0, 0, 2, 2, 2] and within [0, 1, 0, 1, 2]."""
    which = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return which, np.arange(len(which), dtype=np.int64) - first[which]
