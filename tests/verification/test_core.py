"""The core of the proofs: what each of its cases compares is right in every `make test`.

`benchmarks/fault_matrix.py` chooses them: the few cases that together see every planted fault.
"""

from pathlib import Path

import pytest

from tests.verification.cases import ProvedCase
from tests.verification.core import MOST_OF_FOUR, SEEN, all_cases, core, read_matrix
from tests.verification.faults import FAULTS
from tests.verification.mutation import prove

STEPS = 2
ANEW = "python benchmarks/fault_matrix.py plants what is new, and chooses the core anew"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the subjects lie: one for every model."""
    return tmp_path_factory.mktemp("subjects")


@pytest.mark.core
@pytest.mark.parametrize("case", core(), ids=str)
def test_the_core_is_right(case: ProvedCase, folder: Path) -> None:
    outcome = prove(case.kind, case.model, case.layout, folder, steps=STEPS)
    assert not outcome.is_killed, outcome.row or outcome.found.refused
    assert outcome.found.rows


def test_the_core_sees_every_fault() -> None:
    """As measured, when each was planted there."""
    rows, _ = read_matrix()
    seen = {name for case in core() for name, letter in rows.get(str(case), {}).items() if letter in SEEN}
    assert seen == FAULTS.keys(), ANEW


def test_the_core_is_small() -> None:
    assert len(core()) <= 44
    assert sum(case.ranks > 2 for case in core()) <= MOST_OF_FOUR


def test_a_line_says_all_there_is_to_a_case() -> None:
    for case in all_cases():
        assert ProvedCase.parse(str(case)) == case
