"""The order of the documents in a row: such that the ranks of context parallelism attend to equally many pairs.

Rank r of N has chunks r and 2N - 1 - r of the 2N equal chunks of a row. With one document in the row that is the same
work for each. With several, a rank whose chunks hold long documents, or their ends, has more than one with short ones,
and all wait for it. Attention does not cross documents, and a loss is a sum over tokens: any order has the same loss.

Legend: T tokens of a row, N ranks, "pairs" of a query and a key of the same document that is not behind it.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

_MOVED = 16  # documents of a row that are moved, the longest: the others hardly count
_PLACES = 64  # that each of them tries


def pairs_by_rank(lengths: Int64s, row_length: int, ranks: int) -> Int64s:
    """The pairs that attention computes on each rank, int64 [N], for documents of `lengths` in this order. Padding at
    the end of the row is a document too. `row_length`: if 2N does not divide it, the row is padded until it does."""
    edges = _edges(row_length, ranks)
    starts, before = np.zeros(len(lengths) + 1, np.int64), np.zeros(len(lengths) + 1, np.int64)  # the last: of padding
    np.cumsum(lengths, out=starts[1:])
    np.cumsum(lengths * (lengths + 1) // 2, out=before[1:])
    document = np.searchsorted(starts, edges, "right") - 1
    into = edges - starts[document]  # tokens of that document before the edge
    chunks = np.diff(before[document] + into * (into + 1) // 2)
    shares: Int64s = chunks[:ranks] + chunks[: ranks - 1 : -1]
    return shares


def ordered(lengths: Int64s, row_length: int, ranks: int) -> Int64s:
    """The order of documents, int64, in which the busiest of `ranks` has as few pairs as was found: never more than in
    the order that they have. The longest ones are moved, one after the other, each to the best of its places."""
    order = np.arange(len(lengths))
    if ranks == 1 or len(lengths) == 1:
        return order
    least = _work(lengths, row_length, ranks)
    for moved in np.argsort(-lengths, kind="stable")[:_MOVED]:
        rest = order[order != moved]
        for place in np.unique(np.linspace(0, len(rest), min(_PLACES, len(rest) + 1)).astype(np.int64)):
            tried = np.insert(rest, place, moved)
            work = _work(lengths[tried], row_length, ranks)
            if work < least:
                least, order = work, tried
    return order


def order_rows(
    lengths: NDArray[np.signedinteger[Any]], offsets: Int64s, order: Int64s, row_length: int, ranks: int
) -> Int64s:
    """The result `order` of `pack` with the pieces of each row `ordered`."""
    if ranks == 1:
        return order
    found = order.copy()
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        row = order[start:end]
        found[start:end] = row[ordered(lengths[row].astype(np.int64), row_length, ranks)]
    return found


def for_ranks(ranks: int) -> list[dict[str, int]]:
    """The addition of `ranks` to a key of rows in the cache: nothing for rows as they are packed."""
    return [{"documents_for": ranks}] if ranks > 1 else []


def _work(lengths: Int64s, row_length: int, ranks: int) -> tuple[int, float]:
    """The cost that is made small: the pairs of the busiest rank, then how unequal all of them are."""
    pairs = pairs_by_rank(lengths, row_length, ranks)
    return int(pairs.max()), float(np.square(pairs, dtype=np.float64).sum())


@lru_cache(maxsize=64)
def _edges(row_length: int, ranks: int) -> Int64s:
    """The ends of the chunks, from 0."""
    chunk = -(-row_length // (2 * ranks))
    return np.arange(2 * ranks + 1, dtype=np.int64) * chunk
