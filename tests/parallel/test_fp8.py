"""Linears in fp8 compute under every layout what they compute in one process, and agree on scales where ranks share a
tensor."""

from functools import lru_cache
from typing import Any

import pytest

from tests.parity import Case, Outcome, gradient_error, on_rank, outcome
from tests.pool import run_ranks

SHAPES: dict[str, tuple[int, ...]] = {}


@lru_cache
def found(layout: str, family: str, kv_heads: int) -> tuple[Outcome, list[dict[str, Any]]]:
    """What a layout computes."""
    case = Case(layout, family, kv_heads=kv_heads, packing=False)
    per_rank = run_ranks(case.parsed.world, on_rank, case)
    from tests.parity import reference_model

    shapes = {name: tuple(p.shape) for name, p in reference_model(case).named_parameters()}
    return outcome(case, per_rank, shapes), per_rank


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise", "fp8_rowwise_gw_hp"])
@pytest.mark.parametrize("layout", ["shard2", "tp2", "cp2", "pp2", "tp2.cp2", "tp2+nosp", "tp2+full", "pp2+zb"])
def test_a_layout_in_fp8_equals_one_process(layout: str, recipe: str) -> None:
    name, _, options = layout.partition("+")
    text = "+".join(filter(None, [name, *[o for o in options.split("+") if o not in ("nosp",)], "fp64", recipe, "nosp" * ("nosp" in options)]))
    one, _ = found(f"single+fp64+{recipe}", "llama", 2)
    many, per_rank = found(text, "llama", 2)
    error, worst = gradient_error(many, one)
    assert error <= 1e-9, worst
    assert many.losses == pytest.approx(one.losses, rel=1e-9)
    for result in per_rank:
        assert result["ran"] == result["declared"]
