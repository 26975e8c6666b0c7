"""Every layout of the matrix computes what one process of plain `transformers` computes: the whole proof of
`fivefold verify`, in fp64.

Proved are the weights, what every module computes forward and backward, the gradients raw, reduced and clipped, the
update, the collectives, and the same again to the last bit; and what the layout before it in the list saved is loaded
to the last bit.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fivefold.core.layout import Layout
from fivefold.training.optimizers import build_optimizer
from fivefold.verification.proof import Proof
from fivefold.verification.proof_case import ProofCase
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.results import LayoutResult
from tests import matrix
from tests.allpairs import pairs_of
from tests.matrix import CASES, MatrixCase
from tests.pool import run_ranks
from tests.tiers import covering
from tests.verification.mutation import EVIDENCE, make_subject

SHARE = 0.97  # of all pairs of options, which the cases of every run have; the others follow in a campaign
Saved = dict[Path, tuple[str, Path]]


def proved(place: Path, case: MatrixCase, folder: Path, before: tuple[str, Path]) -> dict[str, Any]:
    """Prove and save on a rank; then load what was saved `before`, by the layout of that name."""
    proof = opened(place, case)
    proof.run()
    proof.save(folder)
    dist.barrier()
    proof.forget()
    proof.optimizer = build_optimizer(proof.model, proof.case.optimizer)
    proof.reload(dict([before]))
    return proof.found.to_json()


def opened(place: Path, case: MatrixCase) -> Proof:
    subject = replace(ProofCase.load(place / "subject.json"), loss_chunks=case.chunks)
    return Proof(subject, Layout.parse(f"{case.layout}+fp64"), ReferenceTensors(place / EVIDENCE), "cpu")


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("subjects")


@pytest.fixture(scope="module")
def saved() -> Saved:
    """subject -> the layout of its last case, and the checkpoint that it left."""
    return {}


@pytest.mark.parametrize("case", covering(CASES, lambda case: pairs_of(case.choice), SHARE), ids=str)
def test_a_layout_computes_what_one_process_computes(case: MatrixCase, saved: Saved, subjects: Path) -> None:
    place = make_subject(case.proved, subjects, steps=1)
    left = case.layout, subjects / str(case).replace("/", "-")
    values = run_ranks(Layout.parse(case.layout).world, proved, place, case, left[1], saved.get(place, left))[0]
    found = LayoutResult.of(json.loads(json.dumps(values)))
    assert found.ok and not found.not_told, found.first_wrong
    saved[place] = left


def test_a_line_says_all_there_is_to_a_case() -> None:
    for case in CASES:
        assert matrix.case_of(case.choice) == case
        assert matrix.is_legal(case.choice)


@pytest.mark.campaign
def test_every_pair_of_options_is_there() -> None:
    """Of all 64 million combinations, none of which is listed here: see `matrix.is_legal`."""
    assert not matrix.needed() - {pair for case in CASES for pair in pairs_of(case.choice)}
