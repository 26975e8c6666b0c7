"""Where every token goes: the properties that a wrong loader breaks while the loss looks fine."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fivefold.data import IGNORE, PackedRows
from tests.data.helpers import SEQ, byte_tokens, pieces, prepare_texts, random_texts, segments, whole

LAYOUTS = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 3), (6, 2), (12, 1)]  # (data ranks, micro batch) of 12 rows


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_an_input_once_and_every_token_but_the_first_a_target_once(
    tmp_path: Path, seed: int, packing: bool
) -> None:
    texts = random_texts(seed)
    data = prepare_texts(tmp_path, texts, packing=packing)
    expected: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    alone = 0
    for document in map(byte_tokens, texts):
        for start in range(0, len(document), SEQ):
            inputs, targets = document[start : start + SEQ], document[start + 1 : start + SEQ + 1]
            alone += not targets
            expected[tuple(inputs), tuple(targets)] += bool(targets)
    seen = Counter((tuple(tokens), tuple(targets)) for batch in whole(data.train) for tokens, targets in pieces(batch))
    assert seen == +expected
    counts = data.counts
    assert counts.train.without_target == alone > 0
    assert counts.documents == len(texts)
    assert counts.tokens == sum(len(byte_tokens(text)) for text in texts) == counts.train.tokens + alone
    assert counts.train.split == sum(len(byte_tokens(text)) > SEQ for text in texts) > 0
    assert counts.train.targets == sum(len(byte_tokens(text)) - 1 for text in texts)
    assert counts.train.padding == counts.train.rows * SEQ - counts.train.tokens
    assert sum(batch.tokens for batch in whole(data.train)) == counts.train.tokens
    assert sum(batch.targets for batch in whole(data.train)) == counts.train.targets


@pytest.mark.parametrize("row_multiple", [1, 2, 8, 61])
def test_a_micro_batch_is_what_its_bounds_say(tmp_path: Path, row_multiple: int) -> None:
    data = prepare_texts(tmp_path, random_texts(1))
    length = -(-SEQ // row_multiple) * row_multiple
    for batch in whole(data.train, micro_batch_size=3, row_multiple=row_multiple):
        shapes = {array.shape for array in (batch.input_ids, batch.labels, batch.position_ids)}
        assert shapes == {(3, length)}
        assert {array.dtype for array in (batch.input_ids, batch.labels, batch.position_ids)} == {np.dtype(np.int64)}
        assert batch.cu_seqlens.dtype == np.int32
        assert (np.diff(batch.cu_seqlens) > 0).all() and batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == 3 * length
        assert {0, length, 2 * length} <= set(batch.cu_seqlens.tolist())
        for tokens, labels, positions in segments(batch):
            assert positions == list(range(len(tokens)))
            assert labels[:-1] in (tokens[1:], [IGNORE] * (len(tokens) - 1))
            if all(label == IGNORE for label in labels):
                assert set(tokens) == {data.tokenizer.eos_token_id}  # padding


@pytest.mark.parametrize("documents", [59, 5])  # several batches an epoch, and several epochs a batch
def test_the_order_is_the_same_for_every_layout_and_ranks_share_nothing(tmp_path: Path, documents: int) -> None:
    rows = prepare_texts(tmp_path, random_texts(2, documents), packing=False).train
    assert len(rows) % 12
    reference = [_rows_of(rows, step, 1, 12) for step in range(7)]
    for ranks, micro in LAYOUTS:
        for step in range(7):
            assert _rows_of(rows, step, ranks, micro) == reference[step]


def test_an_epoch_is_every_row_once_and_the_next_one_another_order(tmp_path: Path) -> None:
    rows = prepare_texts(tmp_path, random_texts(3)).train
    order = [rows._order[place] for place in range(3 * len(rows))]
    epochs = [order[start : start + len(rows)] for start in range(0, len(order), len(rows))]
    assert all(sorted(epoch) == list(range(len(rows))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_late_step_read_at_once_is_the_step_reached_by_reading_on(tmp_path: Path) -> None:
    texts = random_texts(4)
    reader, seeker = (prepare_texts(tmp_path, texts).train for _ in range(2))
    read = [_rows_of(reader, step, 2, 3) for step in range(40)]
    assert _rows_of(seeker, 39, 2, 3) == read[39]
    assert _rows_of(seeker, 0, 2, 3) == read[0]


def test_the_seed_fixes_the_order_and_nothing_else(tmp_path: Path) -> None:
    texts = random_texts(5)
    first, again, other = (prepare_texts(tmp_path, texts, seed=seed) for seed in (7, 7, 8))
    assert first.fingerprint == other.fingerprint
    same, same_too, differs = ([data.train._order[i] for i in range(97)] for data in (first, again, other))
    assert same == same_too != differs


def test_the_order_does_not_change_between_versions(tmp_path: Path) -> None:
    """A resumed run must find the rows where it left them: these numbers are part of the format."""
    from fivefold.data.order import permutation

    assert permutation(11, 1234, 0).tolist() == PERMUTATION
    assert permutation(11, 1234, 1).tolist() != PERMUTATION


PERMUTATION = [8, 9, 7, 3, 0, 1, 4, 2, 10, 5, 6]


def test_a_batch_that_the_ranks_do_not_divide_is_refused(tmp_path: Path) -> None:
    rows = prepare_texts(tmp_path, random_texts(0)).train
    with pytest.raises(ValueError, match="12 is no multiple of 5 data ranks x micro_batch_size 1"):
        _rows_of(rows, 0, 5, 1)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 2), (3, 1), (4, 5)])
def test_evaluation_deals_every_row_once_in_as_many_micro_batches_on_every_rank(
    tmp_path: Path, ranks: int, micro: int
) -> None:
    rows = prepare_texts(tmp_path, random_texts(6)).train
    knobs = {"data_ranks": ranks, "micro_batch_size": micro, "row_multiple": 4}
    dealt = [whole(rows, data_rank=rank, **knobs) for rank in range(ranks)]
    assert len({len(batches) for batches in dealt}) == 1
    flat = [row for micros in zip(*dealt, strict=True) for batch in micros for row in batch.input_ids.tolist()]
    alone = [batch.input_ids.tolist()[0] for batch in whole(rows, row_multiple=4)]
    assert flat[: len(alone)] == alone
    assert all(set(row) == {256} for row in flat[len(alone) :])
    assert sum(batch.targets for batches in dealt for batch in batches) == rows.counts.targets
    assert sum(batch.tokens for batches in dealt for batch in batches) == rows.counts.tokens


def test_evaluation_stops_with_the_row_that_reaches_the_limit(tmp_path: Path) -> None:
    rows = prepare_texts(tmp_path, random_texts(6)).train
    every = [batch.tokens for batch in whole(rows)]
    for limit in (1, every[0], every[0] + 1, 499, sum(every), 10**9):
        read = [batch.tokens for batch in whole(rows, max_tokens=limit)]
        assert read == every[: len(read)]
        assert sum(read) >= min(limit, sum(every)) and sum(read[:-1]) < limit


def _rows_of(rows: PackedRows, step: int, ranks: int, micro: int) -> list[list[int]]:
    """The rows of a step in the order of the batch, put together from what each rank reads."""
    knobs = {"global_batch_size": 12, "data_ranks": ranks, "micro_batch_size": micro, "row_multiple": 2}
    shares = [rows.batch(step, data_rank=rank, **knobs) for rank in range(ranks)]
    return [row for micros in zip(*shares, strict=True) for batch in micros for row in batch.input_ids.tolist()]
