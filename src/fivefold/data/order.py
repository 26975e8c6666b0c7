"""The order of the rows, and the share of each data rank in a global batch.

The order is one endless sequence fixed by the seed, accessible at any place for a few permutations. A pool is a set of
rows that are read equally often: those of the sources of one weight. It has an endless order of its own, pass after
pass, each a permutation of all its rows. An epoch takes the next part of every pool's order, in proportion to its
weight (one pass of the heaviest), and shuffles the parts together; each pool keeps its order.

By order, micro batch a of rank d of R is rows `[(a * R + d) * M, (a * R + d + 1) * M)` of the batch. All rows have
equally many tokens, so that matmuls take as long for each of them, but attention takes the squared lengths of its
documents. At every collective the ranks wait for the one with the costliest micro batch. By cost, rows are shared out
so that the micro batches that run at the same time cost alike: the batch stays the same, and so does the loss.

Legend: A micro batches of a rank, R data ranks, M rows of a micro batch.
"""

import heapq
from collections.abc import Iterable, Sequence
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
        begin, end = self.begin(epoch), self.begin(epoch + 1)
        parts = [np.empty(0, np.int64)]
        while begin < end:
            number, within = divmod(begin, self.rows)
            parts.append(self._pass(number)[within : within + end - begin])
            begin += len(parts[-1])
        return parts[1] if len(parts) == 2 else np.concatenate(parts)


# ---- the share of a data rank ----------------------------------------------------------------------------------------


def row_cost(lengths: Iterable[int], row_length: int) -> int:
    """The cost of a row's attention: the sum of the squared lengths of its documents. Its padding is one of them.

    The other costs of a row are linear in its tokens, of which all rows have as many: they change no order.
    """
    sizes = [int(length) for length in lengths]
    return sum(size**2 for size in sizes) + (row_length - sum(sizes)) ** 2


def shares(rows: int, *, data_ranks: int, micro_batch_size: int, costs: Int64s | None = None) -> Int64s:
    """The places in a global batch of `rows`, int64 [A, R, M]: of each row of each micro batch of each data rank.

    `costs` int64 [rows]: share the rows out by these; None: by order. A function of its arguments, so that every rank
    finds the same. Raises `ValueError` if the ranks do not divide the batch.
    """
    micro_batches, rest = divmod(rows, data_ranks * micro_batch_size)
    if rest or not micro_batches:
        raise ValueError(
            f"global_batch_size {rows} is no multiple of {data_ranks} data ranks x micro_batch_size {micro_batch_size}"
        )
    if costs is None or data_ranks == 1:
        return np.arange(rows).reshape(micro_batches, data_ranks, micro_batch_size)
    return _alike(_filled(costs, micro_batches * data_ranks), costs, data_ranks)


def waiting(costs: Int64s, shared: Int64s) -> float:
    """The part of the ranks' time that they wait, 0 to 1, if each micro batch begins when the costliest one before it
    has ended: 1 - mean / maximum over ranks, summed over micro batches."""
    by_micro_batch = costs[shared].sum(-1)
    return 1 - float(by_micro_batch.mean(1).sum() / by_micro_batch.max(1).sum())


def _filled(costs: Int64s, count: int) -> Int64s:
    """Put rows into `count` micro batches of equal size and of costs as equal as can be, int64 [count, M]: the
    costliest row first, each into the micro batch that costs the least and has room (Graham's rule, with room)."""
    size = len(costs) // count
    filled: list[list[int]] = [[] for _ in range(count)]
    open_ones = [(0, number) for number in range(count)]
    for row in np.argsort(-costs, kind="stable").tolist():
        cost, number = heapq.heappop(open_ones)
        filled[number].append(row)
        if len(filled[number]) < size:
            heapq.heappush(open_ones, (cost + int(costs[row]), number))
    return np.array(filled)


def _alike(micro_batches: Int64s, costs: Int64s, data_ranks: int) -> Int64s:
    """Let micro batches of similar cost run at the same time, and give the costliest of them to the rank that has had
    the least: [count, M] -> [A, R, M]."""
    totals = costs[micro_batches].sum(-1)
    by_time = np.argsort(-totals, kind="stable").reshape(-1, data_ranks)
    spent = np.zeros(data_ranks, np.int64)
    shared = np.empty_like(by_time)
    for time, numbers in enumerate(by_time):
        ranks = np.argsort(spent, kind="stable")
        shared[time, ranks] = numbers
        spent[ranks] += totals[numbers]
    return micro_batches[shared]
