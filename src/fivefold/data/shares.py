"""The share of a data rank in a global batch: which rows are in which of its micro batches.

By order, micro batch a of rank d of R is rows `[(a * R + d) * M, (a * R + d + 1) * M)` of the batch. All rows have
equally many tokens, so that matmuls take as long for each of them, but attention takes the squared lengths of its
documents. At every collective the ranks wait for the one with the costliest micro batch. By cost, rows are shared out
so that the micro batches that run at the same time cost alike: the batch stays the same, and so does the loss.

Legend: A micro batches of a rank, R data ranks, M rows of a micro batch.
"""

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


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
