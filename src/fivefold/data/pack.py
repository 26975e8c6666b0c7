"""Packing of pieces into rows: best fit decreasing, without cutting a piece (https://arxiv.org/abs/2404.10830).

Pieces of one length are placed together and rows with the same room are filled together, so the cost depends on the
number of different lengths, not of pieces: a million pieces take about a second.
"""

from bisect import bisect_left, insort

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
