"""The inputs of a proof hide nothing, and every layout deals out all of them."""

from dataclasses import replace

import pytest
import torch

from fivefold.config import ObjectiveSection, OptimizerSection
from fivefold.parallel.layout import Layout
from fivefold.verification.by_hand import answer_log_probs
from fivefold.verification.proof_case import ProofCase, lengths, micro_batches, row_numbers, rows_for


def subject(tmp_path, rows: int = 8) -> ProofCase:  # type: ignore[no-untyped-def]
    return ProofCase(
        folder=tmp_path, model_class="X", vocabulary=101, rows=rows, row_length=61, steps=2, seed=5,
        optimizer=OptimizerSection(),
    )  # fmt: skip


def test_documents_are_unequal_packed_and_fit(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rows = subject(tmp_path).documents(0)
    sizes = [[len(document.tokens) for document in row] for row in rows]
    assert all(sum(row) <= 61 for row in sizes)
    assert len({sum(row) for row in sizes}) > 4  # unequal numbers of targets
    assert max(map(len, sizes)) >= 3 and min(map(sum, sizes)) == 2 and any(1 in row for row in sizes)
    other = subject(tmp_path).documents(1)
    assert any((a.tokens != b.tokens).any() for a, b in zip(rows[0], other[0], strict=True))
    goes_on = {
        len(document.tokens) for row in rows for document in row if len(document.targets) == len(document.tokens)
    }
    assert goes_on == {61}  # a document that fills a row has a target for its last token
    masks = [document.trained for row in rows for document in row if document.trained is not None]
    assert len(masks) > 4 and all(mask.any() and (len(mask) < 3 or not mask.all()) for mask in masks if len(mask))


@pytest.mark.parametrize("row", [8, 23, 61, 128, 1000])
def test_lengths_fit_in_any_row(row: int) -> None:
    from fivefold.verification.proof_case import _ROWS

    for parts in _ROWS:
        assert sum(lengths(parts, row)) <= row


@pytest.mark.parametrize("layouts", [["single"], ["dp2.shard2+mb2", "tp2"], ["shard3", "shard2+mb4"]])
def test_every_layout_gets_every_row_once_in_two_micro_batches(tmp_path, layouts: list[str]) -> None:  # type: ignore[no-untyped-def]
    parsed = [Layout.parse(text) for text in layouts]
    one = subject(tmp_path, rows_for(parsed))
    for layout in parsed:
        dealt = [row_numbers(one.documents(0), layout, rank, 61) for rank in range(layout.data_ranks)]
        assert sorted(row for rank in dealt for batch in rank for row in batch) == list(range(one.rows))
        assert all(len(rank) >= 2 for rank in dealt)
        batches = micro_batches(one.documents(0), layout, 0, one.row_length)
        assert batches[0].input_ids.shape[1] % layout.row_multiple == 0
        total = sum(
            b.targets for rank in range(layout.data_ranks) for b in micro_batches(one.documents(0), layout, rank, 61)
        )
        assert total == one.targets(0)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_pair_fills_a_row_that_has_one_scale(tmp_path, objective: str) -> None:  # type: ignore[no-untyped-def]
    """Its answers are as long, so that the reference computes both as one batch, and nothing is padding."""
    one = replace(subject(tmp_path), row_length=64, whole_rows=True, objective=ObjectiveSection(name=objective))
    rows = [row for row in one.pairs() if row]
    assert [[len(piece.tokens) for piece in row] for row in rows] == [[32, 32]] * len(rows) and len(rows) > 4
    assert len({int(piece.trained.sum()) for row in rows for piece in row if piece.trained is not None}) > 3
    assert len(one.compared_with()) == len(rows)
    given = list[int]()

    def logits_of(ids_BT: torch.Tensor) -> torch.Tensor:
        given.append(ids_BT.numel())
        return torch.nn.functional.one_hot(ids_BT, 101).double()

    together = answer_log_probs(one, logits_of, torch.float64)
    assert given == [64] * len(rows)
    alone = answer_log_probs(replace(one, whole_rows=False, row_length=10_000), logits_of, torch.float64)
    assert together[0].shape == (len(rows), 2) and len(alone[0]) > len(rows)


def test_a_subject_goes_through_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    one = subject(tmp_path)
    one.save(tmp_path / "subject.json")
    assert ProofCase.load(tmp_path / "subject.json") == one
