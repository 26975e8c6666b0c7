"""Layouts compute what the unmodified model computes in one process, where the matrix (test_matrix.py) has not been:
in fp32, whose twenty steps follow; without clipping; and documents that fill their rows, without packing."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tests.parity import Case, Outcome, gradient_error, on_rank, outcome, reference
from tests.pool import run_ranks
from tests.tiers import every, put_off

LAYOUTS = ("single", "shard2", "shard4", "dp2.shard2", "tp2", "tp4", "shard2.tp2")

CASES = [
    put_off(Case("single+mb4+fp64", tied=True, loss_chunks=3)),
    Case("shard2.tp2+zero1+mb2+fp64", max_grad_norm=0.0, packing=False),
    Case("dp2.shard2+zero2+mb2+full+fp32", "qwen3", kv_heads=1, loss_chunks=3),
    Case("tp4+mb4+nosp+fp32", tied=True, kv_heads=1, optimizer="muon"),
]


@lru_cache
def truth(case: Case) -> Outcome:
    """The fp64 reference; it does not depend on the layout or the loss chunks."""
    return reference(case)


def run(case: Case) -> tuple[Outcome, Outcome, list[dict[str, Any]]]:
    expected = truth(Case("single", **{k: getattr(case, k) for k in _REFERENCE_KEYS}))
    per_rank = run_ranks(case.parsed.world, on_rank, case)
    return outcome(case, per_rank, {name: g.shape for name, g in expected.gradients.items()}), expected, per_rank


_REFERENCE_KEYS = (
    "family", "tied", "kv_heads", "packing", "rows", "steps", "max_grad_norm", "optimizer", "overrides", "neftune",
)  # fmt: skip


def case_id(case: Case) -> str:
    extras = f"{case.optimizer}-{case.family}{'-tied' * case.tied}-kv{case.kv_heads}{'-unpacked' * (not case.packing)}"
    return f"{case.layout}-{extras}{'-chunks' * bool(case.loss_chunks)}{'-noclip' * (not case.max_grad_norm)}"


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_layout_equals_one_process(case: Case) -> None:
    found, expected, per_rank = run(case)
    precise = case.parsed.precision == "fp64"
    error, worst = gradient_error(found, expected)
    # In fp32 the gradient of a bias of keys is what is left of terms a hundred times as large: it has 1e-5 to 2e-5.
    assert error <= (1e-10 if precise else 3e-5), worst
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-10 if precise else 1e-6)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10 if precise else 1e-4)
    assert found.norms == pytest.approx(expected.norms, rel=1e-10 if precise else 1e-4)
    if precise:  # the update too: in fp32 Adam's first steps amplify rounding
        for name, weights in expected.weights.items():
            np.testing.assert_allclose(found.weights[name], weights, rtol=0, atol=1e-10, err_msg=name)
    for result in per_rank:
        assert result["ran"] == result["declared"]


def test_clipping_bites() -> None:
    """The cases above would not see a wrong norm otherwise."""
    assert min(truth(Case("single")).norms) > 2 * Case("single").max_grad_norm


@pytest.mark.full
@pytest.mark.parametrize("layout", every(reversed(LAYOUTS), 7))
def test_loss_follows_for_twenty_steps_in_fp32(layout: str) -> None:
    rows = 8 // Case(layout).parsed.data_ranks
    found, expected, _ = run(Case(f"{layout}+mb{rows}+fp32", steps=20))
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
