"""Every layout of the matrix computes what one process of plain `transformers` computes: the whole proof of
`fivefold verify`, in fp64.

Proved are the weights, what every module computes forward and backward, the gradients raw, reduced and clipped, the
update, the collectives, and the same again to the last bit; and what the layout before it in the list saved is loaded
to the last bit.
"""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fivefold.training.optimizers import build_optimizer
from fivefold.verification.results import LayoutResult
from tests import matrix
from tests.allpairs import Pair, pairs_of
from tests.matrix import CASES, choice_of
from tests.pool import run_ranks
from tests.tiers import covering
from tests.verification.cases import ProvedCase, name_of
from tests.verification.core import core
from tests.verification.faults import Model
from tests.verification.mutation import make_subject, opened

SHARE = 0.75  # of all pairs of options, which the cases of every run have; the others follow in a campaign
PLAIN = {"family", "tied", "kv_heads", "optimizer", "changes", "is_chunked"}  # what of a model a choice knows
Saved = dict[str, tuple[str, Path]]


def proved(place: Path, layout: str, folder: Path, before: tuple[str, Path]) -> dict[str, Any]:
    """Prove and save on a rank; then load what was saved `before`, by the layout of that name."""
    proof = opened(str(place), layout)
    proof.run()
    proof.save(folder)
    dist.barrier()
    proof.forget()
    proof.optimizer = build_optimizer(proof.model, proof.case.optimizer)
    proof.reload(dict([before]))
    return proof.found.to_json()


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("subjects")


@pytest.fixture(scope="module")
def saved() -> Saved:
    """model -> the layout of its last case, and the checkpoint that it left."""
    return {}


def of_the_core() -> Iterator[Pair]:
    """The pairs that `make test` proves already, in steps of a model with nothing besides."""
    for case in core():
        others = {each.name for each in fields(Model) if getattr(case.model, each.name) != each.default} - PLAIN
        if case.kind == "step" and not others and case.model.optimizer in matrix.OPTIONS["optimizer"]:
            yield from pairs_of(choice_of(case))


@pytest.mark.full
@pytest.mark.parametrize(
    "case", covering(CASES, lambda case: pairs_of(choice_of(case)), SHARE, known=of_the_core()), ids=str
)
def test_a_layout_computes_what_one_process_computes(case: ProvedCase, saved: Saved, subjects: Path) -> None:
    place, model = make_subject(case.model, subjects, steps=1), name_of(replace(case.model, is_chunked=True))
    left = case.layout, subjects / str(case).replace("/", "-")
    values = run_ranks(case.ranks, proved, place, case.layout, left[1], saved.get(model, left))[0]
    found = LayoutResult.of(json.loads(json.dumps(values)))
    assert found.ok and not found.not_told, found.first_wrong
    saved[model] = left


def test_a_line_says_all_there_is_to_a_case() -> None:
    for case in CASES:
        assert matrix.case_of(choice_of(case)) == case
        assert matrix.is_legal(choice_of(case))


@pytest.mark.campaign
def test_every_pair_of_options_is_there() -> None:
    """Of all 64 million combinations, none of which is listed here: see `matrix.is_legal`."""
    assert not matrix.needed() - {pair for case in CASES for pair in pairs_of(choice_of(case))}
