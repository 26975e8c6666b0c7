"""Sources of different weights: how often each document is read, in one order that needs no state."""

from collections import Counter
from fractions import Fraction
from itertools import chain, pairwise
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.core.errors import UserError
from fivefold.data import PackedRows, PreparedData, prepare
from fivefold.data.order import RowOrder, permutation
from fivefold.data.store import block_hashes
from tests.data.helpers import byte_tokens, config_for, pieces, write_jsonl

SIZES = [29, 101, 13]  # documents of the three sources
GLOBAL = 12
LAYOUTS = [(1, 12), (2, 3), (3, 4), (4, 1), (12, 1)]  # (data ranks, micro batch) of 12 rows


def documents(source: int, size: int) -> list[str]:
    """Texts that say whose they are, of 4 to 50 characters: each is less than a row."""
    rng = np.random.default_rng(source)
    return [f"{source}:{number}:".ljust(rng.integers(4, 50), "x") for number in range(size)]


def prepared(folder: Path, weights: list[float] | None, sizes: list[int] = SIZES, **changes: Any) -> PreparedData:
    paths = [write_jsonl(folder / f"{i}.jsonl", documents(i, size)) for i, size in enumerate(sizes)]
    extra = [{"weight": weight} for weight in weights] if weights else [{}] * len(paths)
    train = [{"path": str(path), **more} for path, more in zip(paths, extra, strict=True)]
    return prepare(config_for(train, **changes), cache=folder / "cache")


def read(rows: PackedRows, places: range) -> list[str]:
    """The documents at these places of the order, in that order."""
    return [text for place in places for text in read_row(rows, rows._order[place])]


def read_row(rows: PackedRows, row: int) -> list[str]:
    return [bytes(tokens[:-1]).decode() for tokens, _ in pieces(rows.rows([row], row_multiple=1))]


def source_of(document: str) -> int:
    return int(document.split(":")[0])


def rows_of(rows: PackedRows, step: int, ranks: int, micro: int) -> list[list[list[int]]]:
    """What each rank reads at a step: its rows."""
    knobs = {"global_batch_size": GLOBAL, "data_ranks": ranks, "micro_batch_size": micro, "row_multiple": 2}
    shares = [rows.batch(step, data_rank=rank, **knobs) for rank in range(ranks)]
    return [[row for batch in share for row in batch.input_ids.tolist()] for share in shares]


def in_order(dealt: list[list[list[int]]], micro: int) -> list[list[int]]:
    """The rows of the batch, put together from the ranks' shares."""
    chunks = [[share[i : i + micro] for i in range(0, len(share), micro)] for share in dealt]
    return [row for chunk in chain.from_iterable(zip(*chunks, strict=True)) for row in chunk]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("weights", [[1, 2, 0.25], [3, 1, 1], [0.1, 0.7, 0.3]])
def test_a_document_is_read_as_often_as_its_weight_says(tmp_path: Path, weights: list[float], packing: bool) -> None:
    data = prepared(tmp_path, weights, packing=packing)
    order = data.train._order
    for epochs in (1, 2, 5, 16):
        texts = read(data.train, range(order._begin(epochs)))
        seen = Counter(texts)
        for source, size in enumerate(SIZES):
            passes = epochs * Fraction(weights[source]) / Fraction(max(weights))
            counts = {seen[text] for text in documents(source, size)}
            assert counts <= {floor(passes), ceil(passes), floor(passes) + 1}  # one more row, where rounded up
            assert max(counts) - min(counts) <= 1
    tokens = Counter[int]()
    for text in texts:
        tokens[source_of(text)] += len(byte_tokens(text))
    for source, counts in enumerate(data.counts.sources):
        assert counts.tokens == sum(len(byte_tokens(text)) for text in documents(source, SIZES[source]))
        assert counts.share == pytest.approx(
            weights[source]
            * counts.tokens
            / sum(w * c.tokens for w, c in zip(weights, data.counts.sources, strict=True))
        )
        assert tokens[source] / tokens.total() == pytest.approx(counts.share, rel=0.1 if packing else 0.05)
    mean = tokens.total() / order._begin(16)
    assert data.train.tokens_per_row == pytest.approx(mean, rel=0.02)


def test_sources_are_spread_over_an_epoch(tmp_path: Path) -> None:
    data = prepared(tmp_path, [1, 2, 0.25], sizes=[499, 997, 997], packing=False)
    begin, end = (data.train._order._begin(epoch) for epoch in (3, 4))
    quarter = (end - begin) // 4
    for first in range(begin, begin + 4 * quarter, quarter):
        seen = Counter(map(source_of, read(data.train, range(first, first + quarter))))
        for source, counts in enumerate(data.counts.sources):
            assert seen[source] / seen.total() == pytest.approx(counts.share, abs=0.06)


def test_none_is_read_again_before_all_others_of_its_weight_on_any_rank(tmp_path: Path) -> None:
    rows = prepared(tmp_path, [2, 1, 2], packing=False).train
    ranks, seen = 4, Counter[str]()
    for step in range(40):
        dealt = rows_of(rows, step, ranks, 3)
        for row in in_order(dealt, 3):
            text = bytes(token for token in row if token < 256).decode()
            seen[text] += 1
            alike = (0, 2) if source_of(text) != 1 else (1,)
            least = min(seen[other] for source in alike for other in documents(source, SIZES[source]))
            assert seen[text] <= least + 1
    assert len(seen) == sum(SIZES)


def test_rows_hold_documents_of_one_weight(tmp_path: Path) -> None:
    rows = prepared(tmp_path, [2, 1, 2]).train
    together = [{source_of(text) for text in read_row(rows, row)} for row in range(len(rows))]
    assert {frozenset(sources) for sources in together} >= {frozenset({1}), frozenset({0, 2})}
    assert all(len(sources) == 1 or 1 not in sources for sources in together)


@pytest.mark.parametrize("weight", [2, 0.3, 1e300])
def test_equal_weights_are_no_weights_bit_for_bit(tmp_path: Path, weight: float) -> None:
    plain, weighted = (prepared(tmp_path, weights) for weights in (None, [weight] * 3))
    assert plain.fingerprint == weighted.fingerprint
    for step in range(9):
        assert rows_of(plain.train, step, 2, 3) == rows_of(weighted.train, step, 2, 3)
    rows = len(plain.train)
    order = [plain.train._order[place] for place in range(2 * rows)]
    assert order == [*permutation(rows, 7, 0).tolist(), *permutation(rows, 7, 1).tolist()]


def test_only_the_ratios_count_and_the_fingerprint_knows_them(tmp_path: Path) -> None:
    first, scaled, other = (prepared(tmp_path, weights) for weights in ([1, 2, 4], [0.25, 0.5, 1], [1, 2, 3.99]))
    assert first.fingerprint == scaled.fingerprint != other.fingerprint
    for step in range(9):
        assert rows_of(first.train, step, 1, 12) == rows_of(scaled.train, step, 1, 12)


def test_the_order_is_the_same_for_every_layout_and_entered_anywhere(tmp_path: Path) -> None:
    rows, late = (prepared(tmp_path, [1, 2, 0.25]).train for _ in range(2))
    reference = [in_order(rows_of(rows, step, 1, 12), 12) for step in range(23)]
    for ranks, micro in LAYOUTS:
        for step in range(23):
            assert in_order(rows_of(rows, step, ranks, micro), micro) == reference[step]
    assert in_order(rows_of(late, 22, 4, 3), 3) == reference[22]
    assert in_order(rows_of(late, 0, 4, 3), 3) == reference[0]


@pytest.mark.parametrize("weights", [[1, 1e-9, 1], [1e-300, 1, 1e300], [1e9, 1, 1e9]])
def test_tiny_and_huge_weights(tmp_path: Path, weights: list[float]) -> None:
    data = prepared(tmp_path, weights, packing=False)
    places = range(10 * sum(SIZES))
    seen = Counter(map(source_of, read(data.train, places)))
    for source, counts in enumerate(data.counts.sources):
        rarely = weights[source] < max(weights)
        assert seen[source] == 1 if rarely else seen[source] > 100  # rounded up: read from once
        assert counts.share == pytest.approx(seen[source] / len(places), abs=0.01)


def held_out(text: str) -> bool:
    """Whether a validation fraction of a half takes this document."""
    return block_hashes([np.array(byte_tokens(text), np.uint16)], 2**14)[0] < 2**63


@pytest.mark.parametrize("weight", [5, 0.2, 1e300])
def test_a_source_that_the_validation_split_takes_whole(tmp_path: Path, weight: float) -> None:
    gone = write_jsonl(tmp_path / "gone.jsonl", [text for text in documents(0, 40) if held_out(text)])
    there = write_jsonl(tmp_path / "there.jsonl", [text for text in documents(1, 200)])
    sources = [{"path": str(gone), "weight": weight}, {"path": str(there)}]
    data = prepare(config_for(sources, validation=0.5), cache=tmp_path / "cache")
    kept = [text for text in documents(1, 200) if not held_out(text)]
    assert Counter(read(data.train, range(len(data.train)))) == Counter(kept)  # an epoch is all there is
    assert [source.tokens for source in data.counts.sources] == [0, sum(len(byte_tokens(text)) for text in kept)]
    assert [source.share for source in data.counts.sources] == [0, 1]
    assert f"source      {gone}: {data.counts.sources[0].documents} documents, nothing to train on" in (
        data.counts.lines()
    )


def test_what_the_header_says(tmp_path: Path) -> None:
    lines = prepared(tmp_path, [1, 2, 0.25]).counts.lines()
    said = [line for line in lines if line.startswith("source ")]
    tokens = [sum(len(byte_tokens(text)) for text in documents(i, size)) for i, size in enumerate(SIZES)]
    total = tokens[0] + 2 * tokens[1] + 0.25 * tokens[2]
    assert said[1] == (
        f"source      {tmp_path / '1.jsonl'}: 101 documents, {tokens[1]:,} tokens to train on, "
        f"weight 2 = {200 * tokens[1] / total:.1f}% of the tokens read"
    )
    assert len(said) == 3
    (alone,) = (line for line in prepared(tmp_path, [2], [29]).counts.lines() if line.startswith("source "))
    assert alone.startswith(f"source      {tmp_path / '0.jsonl'}: 29 documents, ") and alone.endswith("to train on")
    many = prepared(tmp_path, None, [2] * 15).counts.lines()
    assert [line for line in many if line.startswith("source ")][-1] == "source      ... and 3 more"


def test_a_validation_list_has_no_weights(tmp_path: Path) -> None:
    held = write_jsonl(tmp_path / "held.jsonl", ["held"])
    for weight in ("2", "0.5"):
        with pytest.raises(UserError, match=f"data.validation.weight: {weight}: evaluation reads every row .* once"):
            prepared(tmp_path, None, validation=[{"path": str(held), "weight": weight}])


@pytest.mark.parametrize("seed", range(6))
def test_the_order_is_what_its_definition_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [int(n) for n in rng.choice([0, 1, 2, 7, 61, 211], rng.integers(1, 6))] + [3]
    weights = [float(weight) for weight in rng.choice([0.1, 1 / 3, 1, 2.5, 1e-5], len(rows))]
    order, firsts = RowOrder(rows, weights, seed), np.cumsum([0, *rows])
    heaviest = max(weight for weight, count in zip(weights, rows, strict=True) if count)
    read = [order[place] for place in range(1500)]
    for pool, count in enumerate(rows):
        mine = [row - firsts[pool] for row in read if firsts[pool] <= row < firsts[pool + 1]]
        passes = [permutation(count, seed, number, pool) for number in range(1500 // count + 1)] if count else [[]]
        assert mine == np.concatenate(passes).tolist()[: len(mine)]
    ends = [
        sum(ceil(epoch * n * Fraction(w) / Fraction(heaviest)) for n, w in zip(rows, weights, strict=True) if n)
        for epoch in range(9)
    ]
    assert [order._begin(epoch) for epoch in range(9)] == ends
    assert all(begin < end for begin, end in pairwise(ends))
    assert [order[place] for place in (1499, 0, 77)] == [read[1499], read[0], read[77]]


def test_the_mixed_order_does_not_change_between_versions() -> None:
    """A resumed run must find the rows where it left them: these numbers are part of the format."""
    order = RowOrder([5, 3, 4], [1, 2, 0.5], 1234)
    assert [order[place] for place in range(len(ORDER))] == ORDER


ORDER = [5, 6, 3, 7, 9, 0, 1, 4, 6, 5, 7, 10, 2, 0, 6, 8, 4, 7, 5, 2, 7, 1, 3, 5]
