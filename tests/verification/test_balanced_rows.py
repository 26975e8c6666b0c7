"""Proofs of rows that are shared out by their cost: the batch of a step is the same, and so is all that follows."""

from pathlib import Path

import pytest

from fivefold.parallel.layout import Layout
from fivefold.verification.proof_case import ProofCase, row_numbers
from tests.verification.cases import ProvedCase
from tests.verification.mutation import make_subject, prove

pytestmark = pytest.mark.full


def test_a_layout_is_proved_with_balanced_rows(tmp_path: Path) -> None:
    """Under a preference objective. The core proves it with dropout, which follows from the places of rows."""
    case = ProvedCase.parse("step shard2+mb2 llama-dpo-balanced")
    proved = prove(case.kind, case.model, case.layout, tmp_path, steps=2)
    assert proved.found.rows and not proved.is_killed, proved.row or proved.found.refused
    subject = ProofCase.load(make_subject(case.model, tmp_path, steps=2) / "subject.json")
    plain, balanced = (
        row_numbers(subject.documents(0), Layout.parse(case.layout), 0, subject.row_length, balance=balance)
        for balance in (False, True)
    )
    assert subject.balance_rows and plain != balanced
