"""Linears in fp8 compute under every layout what they compute in one process, and agree on scales where ranks share a
tensor."""

from functools import lru_cache
from typing import Any

import pytest

from fivefold.parallel.collectives import differing
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
    assert not differing([each["ran"] for each in per_rank], [each["declared"] for each in per_rank])


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8"])
@pytest.mark.parametrize(("layout", "family"), [("shard2.ep2", "mixtral"), ("shard2.ep2", "deepseek_v3"), ("tp2.ep2", "mixtral"), ("pp2", "qwen3_moe")])
def test_experts_in_fp8(layout: str, family: str, recipe: str) -> None:
    one, _ = found(f"single+fp64+{recipe}", family, 4)
    many, per_rank = found(f"{layout}+fp64+{recipe}", family, 4)
    error, worst = gradient_error(many, one)
    assert error <= 1e-9, worst
    assert not differing([each["ran"] for each in per_rank], [each["declared"] for each in per_rank])
