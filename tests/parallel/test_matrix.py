"""Every layout of the matrix computes what one process of plain `transformers` computes: the whole proof of
`fivefold verify`, in fp64.

Proved are the weights, what every module computes forward and backward, the gradients raw, reduced and clipped, the
update, the collectives, and the same again to the last bit; and what the layout before it in the list saved is loaded
to the last bit.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from fivefold.core.layout import Layout
from fivefold.verification.proof import Proof
from fivefold.verification.proof_case import ProofCase
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.results import LayoutResult
from tests import matrix
from tests.allpairs import pairs_of
from tests.matrix import CASES, MatrixCase
from tests.pool import run_ranks
from tests.verification.mutation import EVIDENCE, make_subject

GROUPS = [list(group) for _, group in groupby(CASES, lambda case: case.proved)]
BEFORE = {case: group[at - 1] if at else case for group in GROUPS for at, case in enumerate(group)}
Saved = Callable[[MatrixCase], tuple[LayoutResult, Path]]


def proved_and_saved(place: Path, case: MatrixCase, folder: Path) -> dict[str, Any]:
    proof = opened(place, case)
    proof.run()
    proof.save(folder)
    return proof.found.to_json()


def loaded(place: Path, case: MatrixCase, wrote: str, folder: Path) -> dict[str, Any]:
    proof = opened(place, case)
    proof.forget()
    proof.reload({wrote: folder})
    return proof.found.to_json()


def opened(place: Path, case: MatrixCase) -> Proof:
    subject = replace(ProofCase.load(place / "subject.json"), loss_chunks=case.chunks)
    return Proof(subject, Layout.parse(f"{case.layout}+fp64"), ReferenceTensors(place / EVIDENCE), "cpu")


def found_of(values: dict[str, Any]) -> LayoutResult:
    return LayoutResult.of(json.loads(json.dumps(values)))


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("subjects")


@pytest.fixture(scope="module")
def saved(subjects: Path) -> Saved:
    """case -> (what its proof found, the checkpoint that it left)."""

    @cache
    def prove(case: MatrixCase) -> tuple[LayoutResult, Path]:
        place, folder = make_subject(case.proved, subjects, steps=1), subjects / str(case).replace("/", "-")
        world = Layout.parse(case.layout).world
        return found_of(run_ranks(world, proved_and_saved, place, case, folder)[0]), folder

    return prove


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layout_computes_what_one_process_computes(case: MatrixCase, saved: Saved, subjects: Path) -> None:
    found, _ = saved(case)
    assert found.ok and not found.not_told, found.first_wrong
    before = BEFORE[case]
    place, world = make_subject(case.proved, subjects, steps=1), Layout.parse(case.layout).world
    found = found_of(run_ranks(world, loaded, place, case, before.layout, saved(before)[1])[0])
    assert found.ok, found.first_wrong


def test_a_line_says_all_there_is_to_a_case() -> None:
    for case in CASES:
        assert matrix.case_of(case.choice) == case
        assert matrix.is_legal(case.choice)


@pytest.mark.campaign
def test_every_pair_of_options_is_there() -> None:
    """Of all 64 million combinations, none of which is listed here: see `matrix.is_legal`."""
    assert not matrix.needed() - {pair for case in CASES for pair in pairs_of(case.choice)}
