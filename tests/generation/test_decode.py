"""Decoding with a cache says what the unmodified model says, under any layout, and leaves training as it was."""

import pytest
import torch

from fivefold.generation.decode import choose
from tests.generation.ranks import (
    PROMPT,
    cache_error,
    continue_greedily,
    draw,
    stop_at,
    talkative,
    train_with_samples,
)
from tests.parity import Case
from tests.pool import run_ranks
from tests.tiers import every

CASES = [
    Case("single+fp32"),
    Case("shard2+fp32"),
    Case("shard2+fp32+zero1", tied=True),
    Case("tp2+fp32", "qwen3"),
    Case("tp2+nosp+fp32", tied=True),
    Case("shard2.tp2+fp32+full", kv_heads=1),
    Case("tp4+fp32", "qwen3", kv_heads=2, tied=True),
    Case("pp2+fp32", tied=True),
    Case("pp2.tp2+zb+fp32", "gemma3"),
    Case("pp2+interleaved+v2+fp32", overrides=(("num_hidden_layers", 4),)),
]


def hf_greedy(case: Case, tokens: int) -> list[int]:
    out = talkative(case).generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout}-{case.family}")
def test_greedy_is_that_of_transformers_on_every_rank(case: Case) -> None:
    expected = hf_greedy(case, 24)
    assert len(set(expected)) > 5  # a text that repeats one token would hide a wrong position
    assert run_ranks(case.parsed.world, continue_greedily, case, 24) == [expected] * case.parsed.world


@pytest.mark.parametrize("layout", ["single+fp64", "tp2+fp64", "shard2.tp2+fp64", "pp2+fp64"])
@pytest.mark.parametrize("family", every(["llama", "qwen3"], 2))
def test_the_cache_changes_nothing(layout: str, family: str) -> None:
    case = Case(layout, family)
    assert max(run_ranks(case.parsed.world, cache_error, case, 8)) < 1e-12


def test_the_cache_in_fp32() -> None:
    assert max(run_ranks(2, cache_error, Case("tp2+fp32"), 8)) < 1e-5


def test_the_same_seed_draws_the_same_tokens_under_every_layout() -> None:
    first = run_ranks(1, draw, Case("single+fp64"), 3)[0]
    assert run_ranks(1, draw, Case("single+fp64"), 4)[0] != first
    for layout in ("shard2+fp64", "tp2+fp64"):
        assert run_ranks(2, draw, Case(layout), 3) == [first, first]


def test_the_end_of_text_is_the_last_token() -> None:
    expected = hf_greedy(CASES[0], 20)
    end = expected[6]
    assert run_ranks(1, stop_at, CASES[0], end) == [expected[: expected.index(end) + 1]]


@pytest.mark.parametrize("gather_once", every([True, False], 2))
@pytest.mark.parametrize("layout", ["shard2+fp32", "shard2+fp32+zero1", "tp2+fp32", "shard2.tp2+fp32+zero2"])
def test_samples_leave_training_as_it_was(layout: str, gather_once: bool) -> None:
    case = Case(layout)
    plain = run_ranks(case.parsed.world, train_with_samples, case, False)
    sampled = run_ranks(case.parsed.world, train_with_samples, case, True, gather_once)
    assert [losses for losses, _ in sampled] == [losses for losses, _ in plain]
    assert len({text for _, text in sampled}) == 1


def test_samples_see_the_weights_of_their_step() -> None:
    texts = [run_ranks(world, train_with_samples, Case(layout), True)[0][1] for world, layout in
             ((1, "single+fp64"), (2, "shard2+fp64+zero1"), (2, "tp2+fp64"))]  # fmt: skip
    assert len(set(texts)) == 1 and texts[0]


def test_choices_follow_the_distribution() -> None:
    logits_V = torch.tensor([0.0, 1.0, -1.0, 2.0, 1.5])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([choose(logits_V, 0.7, 3, generator) for _ in range(20_000)])
    found = torch.bincount(drawn, minlength=5) / len(drawn)
    expected = (logits_V.masked_fill(torch.tensor([True, False, True, False, False]), -torch.inf) / 0.7).softmax(-1)
    assert found[0] == found[2] == 0
    assert (found - expected).abs().max() < 0.012  # three standard deviations of 20,000 draws


def test_the_likeliest_needs_no_chance() -> None:
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(1))
    likeliest = int(logits_V.argmax())
    assert choose(logits_V, 0.0, 0, torch.Generator()) == choose(logits_V, 1.3, 1, torch.Generator()) == likeliest
