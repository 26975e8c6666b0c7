"""An optimizer is one object: one of the tests' own is trained, checked, saved, resumed and verified as the others."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fivefold.config import load_config
from fivefold.core.errors import UserError
from fivefold.training.optimizers import build_optimizer
from tests.parallel.test_parity import truth
from tests.parity import Case, assert_proved, build, on_rank, outcome
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training import bodies
from tests.training.sgd import knowing, known
from tests.verification import mutation
from tests.verification.faults import Model


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with known():
        yield


@pytest.mark.full
@pytest.mark.parametrize("layout", [put_off("shard2"), "tp2"])
def test_steps_are_those_of_torch_in_one_process(layout: str) -> None:
    case = Case(f"{layout}+fp64", optimizer="sgd")
    expected = truth(case.with_layout("single"))
    per_rank = run_ranks(2, knowing, on_rank, case)
    assert_proved(
        outcome(case, per_rank, {name: g.shape for name, g in expected.gradients.items()}), expected, per_rank
    )


OPTIONS: dict[str, Any] = {
    "optimizer__name": "sgd", "optimizer__learning_rate": 0.1, "train__max_steps": 6, "train__check_every": 1,
    "checkpoint__every": 3,
}  # fmt: skip


def trained(tree: dict[str, Any], layout: str, **options: Any) -> Exception | None:
    """The error with which a run under `layout` ends."""
    body = partial(bodies.on_rank, tree | {"layout": {**LAYOUTS[layout]}}, **options)
    error: Exception | None = run_ranks(2, knowing, body)[0].error
    return error


LAYOUTS = {"shard2": {"dp_shard": 2}, "tp2": {"dp_shard": 1, "tp": 2}}


@pytest.mark.full
def test_a_run_stops_and_goes_on_to_the_same_bits_and_under_another_layout(tmp_path: Path) -> None:
    """Its standing checks hold after every step."""
    alone, stopped, moved = (bodies.run_file(tmp_path, **OPTIONS, run__name=n) for n in ("alone", "stopped", "moved"))
    assert trained(alone, "shard2") is None
    assert bodies.column(alone, "train/loss")[-1] < bodies.column(alone, "train/loss")[0]
    for tree in (stopped, moved):
        assert isinstance(trained(tree, "shard2", stop_at=5), bodies.Stopped)
    assert trained(stopped, "shard2") is None
    assert bodies.same(bodies.state(stopped, 6), bodies.state(alone, 6))
    assert {name.split("/")[0] for name in bodies.state(alone, 6)} == {"weight", "momentum_buffer"}
    assert trained(moved, "tp2") is None
    assert bodies.column(moved, "train/loss") == pytest.approx(bodies.column(alone, "train/loss"), rel=1e-5)


@pytest.mark.full
def test_a_layout_is_proved_with_it(tmp_path: Path) -> None:
    place = str(mutation.make_subject(Model(optimizer="sgd"), tmp_path, steps=2))
    found = run_ranks(2, knowing, mutation.step_on_rank, place, "tp2", None, True, timeout=mutation.TIMEOUT)[0]
    rows = {row["what"]: row["ok"] for row in found["rows"]}
    assert not found["refused"] and all(rows.values()), rows
    assert "momentum" in rows and "update" in rows


@pytest.mark.full
def test_its_state_is_in_fp32_and_a_smaller_type_is_refused() -> None:
    """It was kept in fp32 all the same, and planned in half."""
    (error,) = run_ranks(1, knowing, refused, Case("single+bf16_states", optimizer="sgd"))
    assert error == "sgd keeps its state in fp32, and cannot keep it in bf16"


def refused(case: Case) -> str:
    """What the error says with which building its optimizer ends."""
    with pytest.raises(UserError) as error:
        build_optimizer(build(case), case.options)
    return str(error.value.what)


def test_its_keys_are_its_own() -> None:
    assert load_config(None, ["optimizer={name: sgd}"]).optimizer.momentum == 0.9
    with pytest.raises(UserError, match="ns_steps is set, which only muon has"):
        load_config(None, ["optimizer.name=sgd", "optimizer.ns_steps=3"])
