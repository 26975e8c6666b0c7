"""The order of the rows: one endless sequence fixed by the seed, accessible at any place for a few permutations.

A pool is a set of rows that are read equally often: those of the sources of one weight. It has an endless order of its
own, pass after pass, each a permutation of all its rows. An epoch takes the next part of every pool's order, in
proportion to its weight (one pass of the heaviest), and shuffles the parts together; each pool keeps its order.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

_WORD = 2**64


def permutation(rows: int, seed: int, epoch: int, stream: int = 0) -> Int64s:
    """The order of epoch `epoch`, int64 [rows]; independent for each `stream`.

    Sorted words of Philox: numpy promises never to change that stream, unlike that of `Generator.permutation`.
    """
    key, counter = np.array([seed % _WORD, epoch], np.uint64), np.array([0, 0, 0, stream], np.uint64)
    return np.argsort(np.random.Philox(counter=counter, key=key).random_raw(rows), kind="stable")


class RowOrder:
    """Epoch after epoch; a batch may straddle two (or many, if rows are few).

    Pool p is `rows[p]` rows, numbered after those of the pools before it, of weight `weights[p]`; pools may be empty.
    The first e epochs contain `ceil(e * rows * weight / largest weight)` rows of a pool: every place is computed, and
    there is no state to keep.
    """

    def __init__(self, rows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.seed = seed
        heaviest = max(Fraction(weight) for weight, count in zip(weights, rows, strict=True) if count)
        firsts = np.cumsum([0, *rows]).tolist()
        self._pools = [
            _Pool(first, count, count * Fraction(weight) / heaviest, seed, stream)
            for stream, (first, count, weight) in enumerate(zip(firsts, rows, weights, strict=False))
        ]
        self.per_epoch = Fraction(sum(pool.per_epoch for pool in self._pools))
        self._epoch = lru_cache(maxsize=2)(self._mixed)  # the current one and the next: 8 bytes a row each

    def __getitem__(self, place: int) -> int:
        """The row at `place` (0, 1, ...) of the endless order."""
        epoch = int(place / self.per_epoch)  # or some earlier one, where pools were rounded up
        while self._begin(epoch) > place:
            epoch -= 1
        return int(self._epoch(epoch)[place - self._begin(epoch)])

    def _begin(self, epoch: int) -> int:
        return sum(pool.begin(epoch) for pool in self._pools)

    def _mixed(self, epoch: int) -> Int64s:
        parts = [pool.part(epoch) for pool in self._pools]
        if len(parts) == 1:
            return parts[0]
        sizes = [len(part) for part in parts]
        pool_of = np.repeat(np.arange(len(parts)), sizes)[permutation(sum(sizes), self.seed, epoch, len(parts))]
        rows = np.empty(len(pool_of), np.int64)
        rows[np.argsort(pool_of, kind="stable")] = np.concatenate(parts)
        return rows


class _Pool:
    """Rows `first` to `first + rows`; an epoch reads `per_epoch` of them, at most all."""

    def __init__(self, first: int, rows: int, per_epoch: Fraction, seed: int, stream: int) -> None:
        self.rows, self.per_epoch = rows, per_epoch
        self._pass = lru_cache(maxsize=1)(lambda number: first + permutation(rows, seed, number, stream))

    def begin(self, epoch: int) -> int:
        """Number of places of the pool's own order that the epochs before `epoch` used."""
        return ceil(epoch * self.per_epoch)

    def part(self, epoch: int) -> Int64s:
        """The rows that `epoch` takes."""
        begin, end = self.begin(epoch), self.begin(epoch + 1)
        parts = [np.empty(0, np.int64)]
        while begin < end:
            number, within = divmod(begin, self.rows)
            parts.append(self._pass(number)[within : within + end - begin])
            begin += len(parts[-1])
        return parts[1] if len(parts) == 2 else np.concatenate(parts)
