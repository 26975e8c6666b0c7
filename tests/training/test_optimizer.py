"""The optimizer over spread parameters: who is in it, who decays, and what the norm of a spread gradient is."""

from math import isnan, sqrt

import numpy as np
import pytest
import torch

from fivefold.parallel.dtensor import local
from fivefold.training.step import squared_norm
from tests.parity import Case, build, gathered, hf_config, reference_model
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training import ranks

pytestmark = pytest.mark.full

LAYOUTS = (put_off("single"), put_off("dp2.shard2"), "tp4", "shard2.tp2")


@pytest.mark.parametrize("tied", [True, put_off(False)])
def test_every_parameter_is_in_it_once_and_only_matrices_decay(tied: bool) -> None:
    case = Case("shard2.tp2+fp32", tied=tied)
    expected = {name: [0.1 if p.ndim > 1 else 0.0] for name, p in reference_model(case).named_parameters()}
    assert ("lm_head.weight" in expected) is not tied
    assert sum(decay == [0.0] for decay in expected.values()) > 10  # biases and norms: the model has both
    assert run_ranks(4, ranks.decay_of, case) == [expected] * 4


@pytest.mark.parametrize(("family", "tied"), [put_off("llama", True), ("qwen3", False)])
def test_every_parameter_moves(tied: bool, family: str) -> None:
    case = Case("shard2.tp2+fp32", tied=tied, family=family, kv_heads=1)
    shapes = {name: tuple(p.shape) for name, p in reference_model(case).named_parameters()}
    results = run_ranks(4, ranks.before_and_after, case)
    before, after = (gathered([result[i] for result in results], shapes) for i in (0, 1))
    for name in shapes:
        moved = np.mean(before[name] != after[name])
        assert moved > 0.9, f"{name}: {moved:.0%} of its elements moved"  # decay moves rows that no token looks up


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kv_heads", "tied"), [(1, False), put_off(2, True)])
def test_the_norm_counts_each_element_of_the_model_once(layout: str, kv_heads: int, tied: bool) -> None:
    """A gradient of 0.5 everywhere: its squared norm is a quarter of the number of parameters, whatever is copied."""
    case = Case(f"{layout}+fp32", kv_heads=kv_heads, tied=tied)
    elements = sum(p.numel() for p in reference_model(case).parameters())
    assert hf_config(case).vocab_size % 2  # prime: uneven shards
    for found in run_ranks(case.parsed.world, ranks.norm_of, case, 0.5):
        assert found == pytest.approx(elements / 4, rel=1e-6)


@pytest.mark.parametrize("rank", [put_off(0), 3])
def test_one_bad_element_on_one_rank_is_seen_everywhere(rank: int) -> None:
    assert all(isnan(norm) for norm in run_ranks(4, ranks.norm_of, Case("shard2.tp2+fp32"), 0.5, rank))


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"), [(4.0, 1.0, 0.25), (4.0, 0.0, 1.0), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_clipping_scales_every_element(norm: float, max_norm: float, factor: float) -> None:
    for values in run_ranks(2, ranks.clipped, Case("tp2+fp32"), sqrt(2), norm, max_norm):
        assert values == pytest.approx([sqrt(2) * factor], rel=1e-6)


def norm_of_large_gradients() -> tuple[float, float]:
    """The norm of a step in fp32, and the same in fp64."""
    model = build(Case("single+fp32", overrides=(("vocab_size", 40_000),)))
    generator, exact = torch.Generator().manual_seed(0), 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).normal_(generator=generator)
        exact += float(local(parameter.grad).double().square().sum())
    return float(squared_norm(model)) ** 0.5, exact**0.5


def test_the_norm_of_large_gradients_is_exact_in_fp32() -> None:
    """torch's kernel for CPUs adds squares up one by one: 1e-5 too small for a million values, 6e-4 for 15 million."""
    [(found, exact)] = run_ranks(1, norm_of_large_gradients)
    assert found == pytest.approx(exact, rel=1e-6)
