"""Packing of pieces into rows, best fit decreasing, without cutting a piece (https://arxiv.org/abs/2404.10830), and the
order of the documents in a row.

Pieces of one length are placed together and rows with the same room are filled together, so the cost depends on the
number of different lengths, not of pieces: a million pieces take about a second.

Documents are ordered such that the ranks of context parallelism attend to equally many pairs. Rank r of N has chunks r
and 2N - 1 - r of the 2N equal chunks of a row. With one document in the row that is the same work for each. With
several, a rank whose chunks hold long documents, or their ends, has more than one with short ones, and all wait for it.
Attention does not cross documents, and a loss is a sum over tokens: any order has the same loss.

Legend: T tokens of a row, N ranks, "pairs" of a query and a key of the same document that is not behind it.
"""

from bisect import bisect_left, insort
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

_WINDOW = 2**20  # pieces considered together: bounds memory, and keeps rows near the file's order


def pack(lengths: NDArray[np.int32], capacity: int) -> tuple[Int64s, Int64s]:
    """Place pieces of `lengths` (1 to `capacity`) into rows of at most `capacity`.

    Returns `offsets` int64 [rows + 1] and `order` int64 [pieces]. Row r holds the pieces from `offsets[r]` to
    `offsets[r + 1]` of `order`, in their own order; rows are in the order of their first piece.
    """
    offsets, orders = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
    for start in range(0, len(lengths), _WINDOW):
        row_of = _best_fit(lengths[start : start + _WINDOW].astype(np.int64), capacity)
        ends, order = _by_row(row_of)
        offsets.append(ends + offsets[-1][-1])
        orders.append(order + start)
    return np.concatenate(offsets), np.concatenate(orders)


def one_per_row(pieces: int) -> tuple[Int64s, Int64s]:
    """The result of `pack` with every piece in a row of its own."""
    return np.arange(pieces + 1, dtype=np.int64), np.arange(pieces, dtype=np.int64)


def _by_row(row_of: Int64s) -> tuple[Int64s, Int64s]:
    """The end of each row and the pieces in row order, rows renumbered by their first piece."""
    first = np.full(int(row_of.max()) + 1, len(row_of), np.int64)
    np.minimum.at(first, row_of, np.arange(len(row_of)))
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    rows = rank[row_of]
    return np.cumsum(np.bincount(rows)), np.argsort(rows, kind="stable")


def _best_fit(lengths: Int64s, capacity: int) -> Int64s:
    """The row of each piece, longest pieces first, each into the row with the least sufficient room."""
    row_of = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    rooms = _Rooms(capacity)
    done = 0
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = done + count
        while done < end:
            rows = rooms.place(size, end - done)
            row_of[by_length[done : done + len(rows)]] = rows
            done += len(rows)
    return row_of


class _Rooms:
    """The rows with room left, grouped by its size."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.rows = capacity, 0
        self.rooms: list[int] = []  # sorted; those with a row
        self.groups: dict[int, list[Int64s]] = {}

    def place(self, size: int, count: int) -> Int64s:
        """Rows for up to `count` pieces of `size`, from those with the least sufficient room; one row per piece."""
        at = bisect_left(self.rooms, size)
        if at == len(self.rooms):
            self._open(-(-count // (self.capacity // size)))
            at = bisect_left(self.rooms, size)
        room = self.rooms.pop(at)
        rows = np.concatenate(self.groups.pop(room))
        each = room // size
        full, rest = min(count // each, len(rows)), 0
        self._put(room - each * size, rows[:full])
        if full < len(rows):
            rest = count - full * each
            self._put(room - rest * size, rows[full : full + 1])
            self._put(room, rows[full + 1 :])
        return np.concatenate([np.repeat(rows[:full], each), np.repeat(rows[full : full + 1], rest)])

    def _open(self, rows: int) -> None:
        self._put(self.capacity, np.arange(self.rows, self.rows + rows, dtype=np.int64))
        self.rows += rows

    def _put(self, room: int, rows: Int64s) -> None:
        if room == 0 or len(rows) == 0:
            return
        if room not in self.groups:
            self.groups[room] = []
            insort(self.rooms, room)
        self.groups[room].append(rows)


# ---- the order of the documents in a row -----------------------------------------------------------------------------

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
