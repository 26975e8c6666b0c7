"""Every layout computes what the unmodified model computes in one process (design, section 6).

Cases cover layouts x ZeRO x sequence parallel x accumulation x packing x ties x head counts x families x precision
by all-pairs. fp64 is the proof (1e-10; what is seen is 1e-14), fp32 the confirmation.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tests.allpairs import all_pairs
from tests.parity import Case, Outcome, gradient_error, on_rank, outcome, reference
from tests.pool import run_ranks
from tests.tiers import every

LAYOUTS = ("single", "shard2", "shard4", "dp2.shard2", "tp2", "tp4", "shard2.tp2")
ROWS = 16

OPTIONS: dict[str, Any] = {
    "layout": LAYOUTS,
    "family": ("llama", "qwen3"),
    "zero": (1, 2, 3),
    "sequence_parallel": (True, False),
    "accumulation": (1, 4),
    "packing": (True, False),
    "tied": (True, False),
    "kv_heads": (1, 2, 4),
    "precision": ("fp64", "fp32"),
    "recompute": ("none", "full"),
    "loss_chunks": (None, 3),
    "max_grad_norm": (0.5, 0.0),
    "optimizer": ("adamw", "muon"),
}


def is_legal(choice: dict[str, Any]) -> bool:
    """Options that do nothing under a layout are not varied there."""
    return "tp" in choice["layout"] or choice["sequence_parallel"]


def case_of(choice: dict[str, Any]) -> Case:
    plain = Case(choice["layout"]).parsed
    micro = ROWS // (plain.data_ranks * choice["accumulation"])
    text = f"{choice['layout']}+zero{choice['zero']}+mb{micro}+{choice['precision']}"
    text += "" if choice["sequence_parallel"] else "+nosp"
    text += "+full" if choice["recompute"] == "full" else ""
    named = ("family", "tied", "kv_heads", "packing", "loss_chunks", "max_grad_norm", "optimizer")
    return Case(text, rows=ROWS, **{name: choice[name] for name in named})


CASES = [case_of(choice) for choice in all_pairs(OPTIONS, legal=is_legal)]


@lru_cache
def truth(case: Case) -> Outcome:
    """The fp64 reference; it does not depend on the layout or the loss chunks."""
    return reference(case)


def run(case: Case) -> tuple[Outcome, Outcome, list[dict[str, Any]]]:
    expected = truth(Case("single", **{k: getattr(case, k) for k in _REFERENCE_KEYS}))
    per_rank = run_ranks(case.parsed.world, on_rank, case)
    return outcome(case, per_rank, {name: g.shape for name, g in expected.gradients.items()}), expected, per_rank


_REFERENCE_KEYS = ("family", "tied", "kv_heads", "packing", "rows", "steps", "max_grad_norm", "optimizer", "overrides")


def case_id(case: Case) -> str:
    extras = f"{case.optimizer}-{case.family}{'-tied' * case.tied}-kv{case.kv_heads}{'-unpacked' * (not case.packing)}"
    return f"{case.layout}-{extras}{'-chunks' * bool(case.loss_chunks)}{'-noclip' * (not case.max_grad_norm)}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_layout_equals_one_process(case: Case) -> None:
    found, expected, per_rank = run(case)
    precise = case.parsed.precision == "fp64"
    error, worst = gradient_error(found, expected)
    assert error <= (1e-10 if precise else 1e-5), worst
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


@pytest.mark.parametrize("layout", every(reversed(LAYOUTS), 3))
def test_loss_follows_for_twenty_steps_in_fp32(layout: str) -> None:
    rows = 8 // Case(layout).parsed.data_ranks
    found, expected, _ = run(Case(f"{layout}+mb{rows}+fp32", steps=20))
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


def test_runs_are_bitwise_equal_when_repeated() -> None:
    case = Case("shard2.tp2", steps=3)
    first, again = (run_ranks(4, on_rank, case) for _ in range(2))
    assert [r["losses"] for r in first] == [r["losses"] for r in again]
    for (name, _, a), (_, _, b) in zip(first[0]["weights"], again[0]["weights"], strict=True):
        assert np.array_equal(a, b), name
