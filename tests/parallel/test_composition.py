"""The folds together compute what the unmodified model computes in one process, send what they declare, and share their
checkpoints. The cases are those of `tests/compositions.py`; docs/evidence/compositions.md has what each was off by."""

from functools import lru_cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from fivefold.parallel.layout import DEGREES
from tests.checkpoint.ranks import load_and_save, train_and_save
from tests.checkpoint.test_reshard import equal, whole
from tests.compositions import PAIRS, QUADRUPLES, TRIPLES, folds
from tests.parity import Case, Outcome, assert_proved, on_rank, outcome, reference
from tests.pool import run_ranks
from tests.tiers import put_off

CASES = [*PAIRS, *TRIPLES, *QUADRUPLES]


@lru_cache
def truth(case: Case) -> Outcome:
    """The fp64 reference, which does not know the layout."""
    return reference(case)


# Three folds and experts on eight ranks; the rest, whose options meet in the matrix, in a campaign.
TIERED = [case if case.layout.startswith("shard2.tp2.pp2.ep2+etp+zero1") else put_off(case) for case in CASES]


@pytest.mark.full
@pytest.mark.parametrize("case", TIERED, ids=lambda case: f"{case.layout}-{case.family}{'-tied' * case.tied}")
def test_folds_compose(case: Case) -> None:
    expected = truth(case.with_layout("single"))
    per_rank = run_ranks(case.parsed.world, on_rank, case)
    found = outcome(case, per_rank, {name: gradient.shape for name, gradient in expected.gradients.items()})
    assert_proved(found, expected, per_rank)


def test_every_pair_of_folds_is_there() -> None:
    paired = {frozenset(pair) for case in CASES for pair in combinations(folds(case), 2)}
    assert paired == {frozenset(pair) for pair in combinations(DEGREES, 2)}
    assert all(len(folds(case)) == 2 for case in PAIRS if "ep" not in folds(case))
    assert len([case for case in TRIPLES if len(folds(case)) == 3]) >= 12
    assert len([case for case in QUADRUPLES if len(folds(case)) == 4 and case.parsed.world == 8]) >= 2


@pytest.mark.parametrize(
    "lever",
    [{"recompute": "selective"}, {"recompute": "full"}, {"offload_activations": True}, {"offload_optimizer": True}],
    ids=str,
)
def test_every_fold_meets_what_saves_memory(lever: dict[str, object]) -> None:
    ((name, value),) = lever.items()
    assert {fold for case in CASES if getattr(case.parsed, name) == value for fold in folds(case)} == set(DEGREES)


WAY = ("tp2.pp2", "shard4", "shard4.ep2", "cp2.tp2.ep4", "cp2.tp2.ep2+etp", "cp2.pp2.ep2", "single")


@pytest.mark.campaign  # the matrix saves and loads beside its steps
def test_a_checkpoint_goes_from_fold_to_fold(tmp_path: Path) -> None:
    """Each layout loads what the one before saved, and saves it again: all hold the bits of the first, and all
    train on alike."""
    case = Case(f"{WAY[0]}+fp64", family="qwen3_moe")
    states = run_ranks(case.parsed.world, train_and_save, case, tmp_path / "0", 2, 2)
    expected, losses = whole(states), states[0].losses
    assert {name.split()[0] for name in expected} == {"weight", "exp_avg", "exp_avg_sq"}
    for number, text in enumerate(WAY[1:], 1):
        other = case.with_layout(f"{text}+fp64")
        before = tmp_path / str(number - 1) / "step-000002"
        states = run_ranks(other.parsed.world, load_and_save, other, before, tmp_path / str(number), 2)
        assert equal(whole(states), expected), text
        assert all(state.steps == {2.0} for state in states)
        np.testing.assert_allclose(states[0].losses, losses, rtol=1e-10, err_msg=text)
