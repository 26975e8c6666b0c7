"""Rows shared out over ranks by what they cost: the same batch, less waiting."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.data import PreparedData
from fivefold.data.order import row_cost, shares, waiting
from tests.data.helpers import SEQ, prepare_texts, random_texts, segments
from tests.data.test_ledger import LAYOUTS
from tests.data.test_preferences import LISTS
from tests.data.test_preferences import read as read_pairs
from tests.data.test_stream import corpus, small, streamed

__all__ = ["small"]  # a fixture


def by_hand(costs: list[int], ranks: int, size: int) -> list[list[list[int]]]:
    found: list[list[list[int]]] = shares(
        len(costs), data_ranks=ranks, micro_batch_size=size, costs=np.array(costs)
    ).tolist()
    return found


def test_shares_found_by_hand() -> None:
    # Each row is a micro batch. 9 and 8 run together, then 3 and 1: the rank that had 8 gets the 3.
    assert by_hand([1, 9, 3, 8], ranks=2, size=1) == [[[1], [3]], [[0], [2]]]
    # 9 + 1 and 5 + 4, each two rows, one time.
    assert by_hand([5, 1, 9, 4], ranks=2, size=2) == [[[2, 1], [0, 3]]]
    # 16 + 1 beside 6 + 1; then 5 + 1 and 3 + 2, the larger for the rank that had less.
    assert by_hand([3, 16, 1, 6, 5, 2, 1, 1], ranks=2, size=2) == [[[1, 7], [3, 6]], [[0, 5], [4, 2]]]


@pytest.mark.parametrize("tail", [0.0, 1.0, 2.5])
@pytest.mark.parametrize(("ranks", "size", "times"), [(2, 1, 8), (4, 2, 4), (8, 4, 1), (3, 5, 7), (16, 1, 4)])
def test_every_row_has_one_place_and_ranks_wait_no_longer(ranks: int, size: int, times: int, tail: float) -> None:
    rows = ranks * size * times
    for seed in range(20):
        costs = (1e4 * np.exp(tail * np.random.default_rng(seed).normal(size=rows))).astype(np.int64)
        plain = shares(rows, data_ranks=ranks, micro_batch_size=size)
        shared = shares(rows, data_ranks=ranks, micro_batch_size=size, costs=costs)
        assert shared.shape == plain.shape == (times, ranks, size)
        assert sorted(shared.flatten().tolist()) == plain.flatten().tolist() == list(range(rows))
        assert waiting(costs, shared) <= waiting(costs, plain) + 1e-12
        assert shared.tolist() == shares(rows, data_ranks=ranks, micro_batch_size=size, costs=costs.copy()).tolist()


def test_waiting_is_the_time_that_all_but_the_costliest_are_idle() -> None:
    costs = np.array([4, 1, 2, 2])
    assert waiting(costs, np.array([[[0], [1]], [[2], [3]]])) == 1 - 9 / 12
    assert waiting(costs, np.array([[[0], [1]]])) == 1 - 5 / 8


def test_the_cost_of_a_row_is_that_of_the_segments_of_its_micro_batch(tmp_path: Path) -> None:
    """Padding is a segment of its own, which attention computes too."""
    texts = prepare_texts(tmp_path, random_texts(1)).train
    (tmp_path / "pairs").mkdir()
    pairs = read_pairs(tmp_path / "pairs", [LISTS] * 5, seq_length=211).train
    for rows in (texts, pairs):
        for row in range(len(rows.sample)):
            sizes = [len(tokens) for tokens, _, _ in segments(rows.rows([row], row_multiple=1))]
            assert rows.cost(row) == sum(size**2 for size in sizes) == row_cost(sizes, rows.seq_length)
    assert row_cost([SEQ - 1], SEQ) == (SEQ - 1) ** 2 + 1


def streaming(folder: Path) -> PreparedData:
    return streamed(corpus(folder), folder / "cache")[0]


def packed(folder: Path) -> PreparedData:
    return prepare_texts(folder, random_texts(2))


@pytest.mark.parametrize("data_of", [packed, streaming])
def test_ranks_read_the_batch_of_the_step_whatever_their_number(tmp_path: Path, data_of: Any) -> None:
    rows, moved = data_of(tmp_path).train, 0
    for ranks, size in LAYOUTS:
        for step in range(3):
            knobs = {"global_batch_size": 12, "data_ranks": ranks, "micro_batch_size": size, "row_multiple": 2}
            plain, shared = (
                [batch for rank in range(ranks) for batch in rows.batch(step, data_rank=rank, balance=balance, **knobs)]
                for balance in (False, True)
            )
            assert sorted(row for batch in shared for row in batch.rows) == sorted(r for one in plain for r in one.rows)
            in_order = rows.in_order(range(step * 12, step * 12 + 12))
            assert all([in_order[place] for place in one.places] == one.rows.tolist() for one in (*plain, *shared))
            costs = np.array([rows.cost(row) for row in in_order])  # of this step
            by_cost = shares(12, data_ranks=ranks, micro_batch_size=size, costs=costs)
            assert [one.places.tolist() for one in shared] == by_cost.swapaxes(0, 1).reshape(-1, size).tolist()
            assert {batch.input_ids.shape for batch in shared} == {batch.input_ids.shape for batch in plain}
            moved += [one.rows.tolist() for one in plain] != [one.rows.tolist() for one in shared]
    assert moved > len(LAYOUTS)
