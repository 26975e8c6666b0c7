"""A model that fivefold has never seen: its partition is derived; unlisted it is tried first."""

from functools import lru_cache

import pytest

from tests.parallel import toy
from tests.parity import Case, Outcome, assert_proved, outcome, reference
from tests.pool import run_ranks
from tests.tiers import every, put_off

pytestmark = pytest.mark.full

LEARNT = (("learnt_scale", True),)
OWN_LINEARS = (("own_linears", True),)


@lru_cache
def truth(case: Case) -> Outcome:
    return reference(case)


def check(case: Case, *, listed: bool) -> None:
    toy.register()
    expected = truth(case.with_layout("single"))
    per_rank = run_ranks(case.parsed.world, toy.on_rank, case, listed)
    found = outcome(case, per_rank, {name: g.shape for name, g in expected.gradients.items()})
    assert_proved(found, expected, per_rank)


@pytest.mark.parametrize(
    ("layout", "tied"),
    [put_off("tp2", False), ("tp2+nosp", True), put_off("tp4", True), ("shard2.tp2+full", False)],
)
@pytest.mark.parametrize("listed", every([False, True], 2), ids=["tried", "listed"])
def test_a_model_that_nobody_knows(layout: str, tied: bool, listed: bool) -> None:
    check(Case(f"{layout}+mb4+fp64", family="toy", tied=tied, loss_chunks=3), listed=listed)


@pytest.mark.parametrize("layout", [put_off("tp2"), "tp2+nosp+full", "pp2+zb"])
def test_a_class_derived_from_linear_is_one_and_keeps_its_own_forward(layout: str) -> None:
    """Split as columns and rows; a row's bias is added once."""
    check(Case(f"{layout}+mb4+fp64", family="toy", overrides=OWN_LINEARS), listed=True)


@pytest.mark.parametrize("layout", every(["shard2", "dp2", "single"], 3))
@pytest.mark.parametrize("overrides", [put_off(()), LEARNT], ids=["fixed", "learnt scale"])
def test_without_a_family_a_model_trains_under_data_parallelism(layout: str, overrides: tuple) -> None:
    """The learnt scale is a parameter of the causal model itself, neither of its base nor of its head."""
    check(Case(f"{layout}+mb4+fp64", family="toy", loss_chunks=3, overrides=overrides), listed=False)


def test_a_parameter_without_a_role_is_refused_by_name() -> None:
    for error in run_ranks(2, toy.refusal, Case("tp2", family="toy", overrides=LEARNT), True):
        assert error.startswith("UserError: tp 2 is refused") and "temperature_norm" in error


def test_heads_that_tp_cannot_deal_are_refused_with_the_arithmetic() -> None:
    case = Case("tp2", family="toy", kv_heads=1, overrides=(("num_attention_heads", 3),))
    for error in run_ranks(2, toy.refusal, case, True):
        assert "tp=2 does not fit num_attention_heads=3, num_key_value_heads=1" in error and "try tp 1, 3" in error
