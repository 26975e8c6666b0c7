"""An objective is facts, a loss and a formula by hand: one written from the docs' row compares with its reference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fivefold.config import ObjectiveSection, load_config
from fivefold.core.errors import UserError
from fivefold.core.objectives import OBJECTIVES, ObjectiveFacts
from fivefold.training.objectives import LOSSES, Ratings, pair_losses
from fivefold.verification.by_hand import PAIRS, RATED, preference_loss
from fivefold.verification.proof_case import ProofCase
from tests.pool import run_ranks
from tests.verification import mutation
from tests.verification.faults import Model

HINGE = ObjectiveFacts(needs_reference=True, uses_means=False)


def hinge(objective: ObjectiveSection, answers: Tensor, gains: Tensor, _: Ratings | None) -> Tensor:
    """The hinge of SLiC on the gains over the reference, as TRL's `loss_type: hinge`."""
    return torch.relu(1 - objective.beta * (gains[:, 0] - gains[:, 1]))


def by_hand(case: ProofCase, sums: Tensor, means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rewards = case.objective.beta * (sums - torch.from_numpy(case.compared_with()).to(sums))
    return (1 - (rewards[:, 0] - rewards[:, 1])).clamp(min=0), rewards, sums


@contextmanager
def known(facts: ObjectiveFacts = HINGE) -> Iterator[None]:
    """Inside, the library has it."""
    with patch.dict(OBJECTIVES, hinge=facts), patch.dict(LOSSES, hinge=hinge), patch.dict(PAIRS, hinge=by_hand):
        yield


def knowing(facts: ObjectiveFacts, body: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with known(facts):
        return body(*args, **options)


def test_every_objective_has_facts_a_loss_and_a_formula() -> None:
    assert {*OBJECTIVES} == {*LOSSES} == {*PAIRS, *RATED}
    assert {*RATED} == {name for name, facts in OBJECTIVES.items() if facts.is_rated}


def test_a_loss_without_facts_is_an_error_and_so_is_one_without_a_formula() -> None:
    with (
        patch.dict(LOSSES, hinge=hinge),
        pytest.raises(UserError, match=r"objective\.name is 'hinge'; it should be 'sft'"),
    ):
        load_config(None, ["objective.name=hinge"])
    with pytest.raises(TypeError, match="needs_reference"):
        ObjectiveFacts()  # type: ignore[call-arg]
    with known(), patch.dict(PAIRS):
        del PAIRS["hinge"]
        with pytest.raises(ValueError, match="hinge has no formula by hand"):
            preference_loss(_case("hinge"), torch.zeros(1, 2), torch.ones(1, 2))


def _case(objective: str) -> ProofCase:
    case: ProofCase = object.__new__(ProofCase)
    object.__setattr__(case, "objective", ObjectiveSection(name=objective))
    return case


def test_it_compares_with_its_reference() -> None:
    with known():
        objective = ObjectiveSection(name="hinge", beta=0.5)
        policy, reference = torch.tensor([[-3.0, -4.0], [-9.0, -1.0]]), torch.tensor([[-2.0, -7.0], [-9.0, -2.0]])
        with pytest.raises(ValueError, match="hinge needs the log-probabilities of a reference model"):
            pair_losses(objective, policy, torch.ones(2, 2))
        found = pair_losses(objective, policy, torch.ones(2, 2), reference)
        assert found.loss_P.tolist() == [1 - 0.5 * (-1 - 3), 1 - 0.5 * (0 - 1)]
        config = load_config(None, ["objective.name=hinge"]).objective
        assert config.compares and config.has_answers and not config.is_rated
        with pytest.raises(UserError, match="reference is none, and hinge compares with one"):
            load_config(None, ["objective={name: hinge, reference: none}"])


@pytest.mark.full
@pytest.mark.parametrize(("layout", "compares"), [("tp2", True), ("tp2", False)])
def test_a_layout_is_proved_with_it_and_without_its_reference_it_is_not(
    tmp_path: Path, layout: str, compares: bool
) -> None:
    facts = ObjectiveFacts(needs_reference=compares, uses_means=False)
    with known():
        place = str(mutation.make_subject(Model(objective="hinge"), tmp_path, steps=2))
    found = run_ranks(2, knowing, facts, mutation.step_on_rank, place, layout, None, True, timeout=mutation.TIMEOUT)[0]
    rows = {row["what"]: row["ok"] for row in found["rows"]}
    of_objective = [ok for what, ok in rows.items() if "objective" in what or "preference" in what or "loss" in what]
    assert rows and not found["refused"] and all(of_objective) == compares, rows
