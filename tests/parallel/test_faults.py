"""Silent bugs, planted one at a time: each must be seen, and by the measure that is known to see it.

The measures are those of `tests/parity.py`, which the tests of every layout and family rest on; the whole catalogue is
held against `fivefold verify` in tests/verification/test_faults.py. Every row also names what does *not* see the bug,
so that the measures are known to be all needed.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tests.parallel.faults import on_faulty_rank
from tests.parity import Case, Outcome, gradient_error, outcome, reference
from tests.pool import run_ranks

pytestmark = pytest.mark.campaign  # a subset of tests/verification/test_faults.py, by other measures

MICRO = "+mb4+fp64"


@dataclass(frozen=True)
class Fault:
    """A bug, where it acts, and the measures that see it and those that stay blind (`loss`: that of step 1)."""

    name: str
    case: Case
    seen_by: frozenset[str]
    hidden_from: frozenset[str] = field(default=frozenset())


def fault(name: str, layout: str, seen_by: str, hidden_from: str = "", **changes: Any) -> Fault:
    case = Case(layout + MICRO, **changes)
    return Fault(name, case, frozenset(seen_by.split()), frozenset(hidden_from.split()))


TABLE = (
    fault("partial_gradients_not_summed", "tp4", "gradients copies", "loss", kv_heads=1),
    fault("partial_gradients_not_summed", "tp4", "gradients copies", "loss", kv_heads=2),
    fault("key_value_copies_not_summed", "tp4", "gradients copies", "loss", kv_heads=2),
    fault("input_gradient_of_a_column_not_reduced", "tp2", "gradients norms weights", "loss copies"),
    fault("bias_of_a_row_added_on_every_rank", "tp2", "loss gradients norms weights", "copies"),
    fault("clipping_by_a_local_norm", "shard2.tp2", "weights", "loss gradients norms_of_step_1"),
    fault("loss_is_a_mean_of_means", "shard2", "loss norms weights", "copies"),
    fault("offset_of_the_vocabulary_ignored", "tp2", "loss gradients norms", "copies"),
    fault("gradients_averaged", "shard2", "gradients norms", "loss copies"),
)


@lru_cache
def truth(case: Case) -> Outcome:
    return reference(case)


def measures(case: Case, per_rank: list[dict[str, Any]]) -> set[str]:
    """The measures that see a difference from the reference; `copies`: ranks disagree about the same values."""
    expected = truth(case)
    shapes = {name: gradient.shape for name, gradient in expected.gradients.items()}
    seen = set()
    try:
        found = outcome(case, per_rank, shapes)
    except AssertionError:
        seen.add("copies")
        found = outcome(case, [_first_copies(per_rank, rank, shapes) for rank in range(len(per_rank))], shapes)
    if not np.allclose(found.losses[0], expected.losses[0], rtol=1e-10):
        seen.add("loss")
    if not np.allclose(found.norms[0], expected.norms[0], rtol=1e-10):
        seen.add("norms_of_step_1")
    if not np.allclose(found.norms, expected.norms, rtol=1e-10):
        seen.add("norms")
    if gradient_error(found, expected)[0] > 1e-10:
        seen.add("gradients")
    if any(np.abs(found.weights[name] - weights).max() > 1e-10 for name, weights in expected.weights.items()):
        seen.add("weights")
    return seen


def _first_copies(per_rank: list[dict[str, Any]], rank: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The results of a rank without what an earlier rank holds too."""
    result = dict(per_rank[rank])
    for kind in ("gradients", "weights"):
        before = {(name, region) for earlier in per_rank[:rank] for name, region, _ in earlier[kind]}
        result[kind] = [piece for piece in result[kind] if piece[:2] not in before]
    return result | {"losses": per_rank[0]["losses"], "norms": per_rank[0]["norms"]}


@pytest.mark.parametrize("one", TABLE, ids=lambda one: f"{one.name}-{one.case.layout}-kv{one.case.kv_heads}")
def test_a_planted_bug_is_seen(one: Fault) -> None:
    seen = measures(one.case, run_ranks(one.case.parsed.world, on_faulty_rank, one.case, one.name))
    assert one.seen_by <= seen
    assert not one.hidden_from & seen


@pytest.mark.parametrize(
    "case", sorted({one.case for one in TABLE}, key=repr), ids=lambda c: f"{c.layout}-{c.kv_heads}"
)
def test_without_a_fault_nothing_is_seen(case: Case) -> None:
    """The control; after three steps every copy of a norm and of a key/value head is equal to the last bit too."""
    per_rank = run_ranks(case.parsed.world, on_faulty_rank, case, None)
    assert measures(case, per_rank) == set()
    if "tp4" in case.layout:
        assert _copies(per_rank, "model.layers.0.self_attn.k_proj.weight") == 4 // case.kv_heads
        assert _copies(per_rank, "model.norm.weight") == 4


def _copies(per_rank: list[dict[str, Any]], name: str) -> int:
    """How many ranks hold the same region of a parameter: there are copies to compare at all."""
    regions = [region for result in per_rank for n, region, _ in result["weights"] if n == name]
    assert len(set(regions)) * regions.count(regions[0]) == len(regions)
    return regions.count(regions[0])
