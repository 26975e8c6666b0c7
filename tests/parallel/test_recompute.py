"""What a layout recomputes changes nothing that it computes, bit for bit, and the collectives that run are those
declared."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from fivefold.parallel.collectives import differing
from tests.parity import Case, Outcome, on_rank, outcome, reference_model
from tests.pool import run_ranks


@lru_cache
def found(layout: str, family: str, overrides: tuple[tuple[str, Any], ...]) -> tuple[Outcome, list[dict[str, Any]]]:
    """What a layout computes in two steps."""
    case = Case(layout, family, overrides=overrides)
    per_rank = run_ranks(case.parsed.world, on_rank, case)
    shapes = {name: tuple(each.shape) for name, each in reference_model(case).named_parameters()}
    return outcome(case, per_rank, shapes), per_rank


DROPPED = (("resid_pdrop", 0.1), ("embd_pdrop", 0.1))


@pytest.mark.parametrize(
    ("layout", "family", "recompute", "overrides"),
    [
        ("single+fp32", "llama", "selective", ()),
        ("single", "gemma2", "selective", ()),
        ("tp2", "qwen3", "selective", ()),
    ],
)
def test_recompute_changes_no_bit(layout: str, family: str, recompute: str, overrides: Any) -> None:
    plain, _ = found(layout, family, overrides)
    again, per_rank = found(f"{layout}+{recompute}", family, overrides)
    assert again.losses == plain.losses and again.norms == plain.norms
    for name, gradient in plain.gradients.items():
        assert np.array_equal(again.gradients[name], gradient), name
    assert not differing([each["ran"] for each in per_rank], [each["declared"] for each in per_rank])
