"""Documents of a row in an order that suits context parallelism: the same rows, less waiting."""

from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.data.pack import ordered, pack, pairs_by_rank
from fivefold.parallel.ranks import tokens_by_rank
from tests.data.helpers import pieces, prepare_texts, random_texts
from tests.data.test_stream import corpus, small, streamed

__all__ = ["small"]  # a fixture

RANKS = 4


def tailed(length: int, count: int, seed: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Packed rows of documents with a long tail: the lengths in each."""
    drawn = length / 32 * np.exp(1.5 * np.random.default_rng(seed).normal(size=64 * count))
    lengths = np.clip(drawn, 2, length).astype(np.int32)
    offsets, order = pack(lengths, length)
    return [lengths[order[a:b]].astype(np.int64) for a, b in pairwise(offsets)][:count]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_pairs_are_those_of_the_tokens_that_a_rank_has(ranks: int) -> None:
    """Counted token by token, with the tokens that `parallel` gives to each rank."""
    length = 12 * ranks
    for lengths in tailed(length - 1, 12, seed=ranks):
        seen = np.concatenate([np.arange(1, size + 1) for size in (*lengths, length - lengths.sum())])
        found = [sum(int(seen[a:b].sum()) for a, b in blocks) for blocks in tokens_by_rank(length, ranks)]
        assert pairs_by_rank(lengths, length - 1, ranks).tolist() == found  # padded to `length`


@pytest.mark.parametrize(("ranks", "left"), [(2, 0.75), (4, 0.43), (16, 0.35)])
def test_every_document_is_there_once_and_the_busiest_rank_has_no_more_to_do(ranks: int, left: float) -> None:
    """`left`: the part of the waiting; with one document moved it is 0.76, 0.43 and 0.46."""
    before, after, mean = 0, 0, 0.0
    for lengths in tailed(4096, 40, seed=5):
        order = ordered(lengths, 4096, ranks)
        assert sorted(order.tolist()) == list(range(len(lengths)))
        plain, better = (pairs_by_rank(one, 4096, ranks) for one in (lengths, lengths[order]))
        assert better.max() <= plain.max()
        before, after, mean = before + int(plain.max()), after + int(better.max()), mean + float(better.mean())
    assert after - mean < left * (before - mean), "waiting"


def test_the_order_of_few_documents_is_nearly_the_best_that_there_is() -> None:
    for lengths in [one for one in tailed(512, 60, seed=3) if 3 <= len(one) <= 6]:
        best = min(pairs_by_rank(lengths[list(every)], 512, 2).max() for every in permutations(range(len(lengths))))
        assert pairs_by_rank(lengths[ordered(lengths, 512, 2)], 512, 2).max() <= 1.1 * best


def streaming(folder: Path, **changes: Any) -> Any:
    text = folder / "a.jsonl"
    return streamed(text if text.exists() else corpus(folder), folder / "cache", **changes)[0]


def whole(folder: Path, **changes: Any) -> Any:
    return prepare_texts(folder, random_texts(2), **changes)


@pytest.mark.parametrize("data_of", [whole, streaming])
def test_rows_have_the_same_documents_in_another_order(tmp_path: Path, data_of: Any) -> None:
    plain, other = data_of(tmp_path), data_of(tmp_path, balance_documents=RANKS)
    assert plain.fingerprint != other.fingerprint, "else a run would go on with it, and a cache would be taken for it"
    rows = range(len(plain.train.sample))
    each = [[pieces(data.train.rows([row], row_multiple=1)) for row in rows] for data in (plain, other)]
    assert [sorted(row) for row in each[0]] == [sorted(row) for row in each[1]]
    assert each[0] != each[1]
    assert plain.counts.train == other.counts.train
