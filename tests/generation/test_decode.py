"""Decoding with a cache says what the unmodified model says, under any layout, and leaves training as it was."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fivefold.core.errors import UserError
from fivefold.generation.decode import KvCache, decode
from fivefold.generation.sampling import Sampling, TokenChooser
from tests.generation.ranks import (
    PROMPT,
    cache_error,
    continue_batch,
    continue_greedily,
    converse,
    draw,
    stop_at,
    talkative,
    train_with_samples,
)
from tests.models import tiny
from tests.parity import Case
from tests.pool import run_ranks
from tests.tiers import every, put_off

CASES = [
    Case("single+fp32"),
    put_off(Case("shard2+fp32")),
    put_off(Case("shard2+fp32+zero1", tied=True)),
    put_off(Case("tp2+fp32", "qwen3")),
    Case("tp2+nosp+fp32", tied=True),
    put_off(Case("shard2.tp2+fp32+full", kv_heads=1)),
    Case("tp4+fp32", "qwen3", kv_heads=2, tied=True),
    put_off(Case("pp2+fp32", tied=True)),
    put_off(Case("pp2.tp2+zb+fp32", "gemma3")),
    Case("pp2+interleaved+v2+fp32", overrides=(("num_hidden_layers", 4),)),
]


def hf_greedy(case: Case, tokens: int) -> list[int]:
    out = talkative(case).generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout}-{case.family}")
def test_greedy_is_that_of_transformers_on_every_rank(case: Case) -> None:
    expected = hf_greedy(case, 24)
    assert len(set(expected)) > 5  # a text that repeats one token would hide a wrong position
    assert run_ranks(case.parsed.world, continue_greedily, case, 24) == [expected] * case.parsed.world


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2+fp64", *map(put_off, ("tp2+fp64", "single+fp64", "shard2.tp2+fp64"))])
@pytest.mark.parametrize("family", every(["llama", "qwen3"], 2))
def test_the_cache_changes_nothing(layout: str, family: str) -> None:
    case = Case(layout, family)
    assert max(run_ranks(case.parsed.world, cache_error, case, 8)) < 1e-12


@pytest.mark.full
def test_the_cache_in_fp32() -> None:
    assert max(run_ranks(2, cache_error, Case("tp2+fp32"), 8)) < 1e-5


@pytest.mark.full
def test_the_same_seed_draws_the_same_tokens_under_every_layout() -> None:
    first = run_ranks(1, draw, Case("single+fp64"), 3)[0]
    assert run_ranks(1, draw, Case("single+fp64"), 4)[0] != first
    for layout in ("shard2+fp64", "tp2+fp64"):
        assert run_ranks(2, draw, Case(layout), 3) == [first, first]


@pytest.mark.full
def test_the_end_of_text_is_the_last_token() -> None:
    expected = hf_greedy(CASES[0], 20)
    end = expected[6]
    assert run_ranks(1, stop_at, CASES[0], end) == [expected[: expected.index(end) + 1]]


@pytest.mark.full
@pytest.mark.parametrize("gather_once", every([True, False], 2))
@pytest.mark.parametrize(
    "layout",
    [
        "shard2+fp32+zero1",
        put_off("shard2.tp2+fp32+zero2"),
        put_off("shard2+fp32"),
        put_off("tp2+fp32"),
        put_off("shard4+hpz2+hier2+fp32"),
    ],
)
def test_samples_leave_training_as_it_was(layout: str, gather_once: bool) -> None:
    case = Case(layout)
    plain = run_ranks(case.parsed.world, train_with_samples, case, False)
    sampled = run_ranks(case.parsed.world, train_with_samples, case, True, gather_once)
    assert [losses for losses, _ in sampled] == [losses for losses, _ in plain]
    assert len({text for _, text in sampled}) == 1


@pytest.mark.full
def test_samples_see_the_weights_of_their_step() -> None:
    texts = [run_ranks(world, train_with_samples, Case(layout), True)[0][1] for world, layout in
             ((1, "single+fp64"), (2, "shard2+fp64+zero1"), (2, "tp2+fp64"))]  # fmt: skip
    assert len(set(texts)) == 1 and texts[0]


@pytest.fixture(scope="module")
def plain() -> Any:
    """A model whose generation config asks for nothing."""
    return tiny.filled(tiny.llama())


def chosen(model: Any, logits_V: torch.Tensor, sampling: Sampling, times: int = 1) -> list[int]:
    choice = TokenChooser(model, PROMPT, sampling, seed=0, max_new_tokens=1)
    return [choice.choose(logits_V) for _ in range(times)]


def test_choices_follow_the_distribution(plain: Any) -> None:
    logits_V = torch.tensor([0.0, 1.0, -1.0, 2.0, 1.5])
    drawn = torch.tensor(chosen(plain, logits_V, Sampling(temperature=0.7, top_k=3), 20_000))
    found = torch.bincount(drawn, minlength=5) / len(drawn)
    expected = (logits_V.masked_fill(torch.tensor([True, False, True, False, False]), -torch.inf) / 0.7).softmax(-1)
    assert found[0] == found[2] == 0
    assert (found - expected).abs().max() < 0.012  # three standard deviations of 20,000 draws


def test_the_likeliest_needs_no_chance(plain: Any) -> None:
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(1))
    likeliest = int(logits_V.argmax())
    for sampling in (Sampling(), Sampling(temperature=1.3, top_k=1), Sampling(temperature=1.3, top_p=1e-9)):
        assert chosen(plain, logits_V, sampling) == [likeliest]


def test_top_p_keeps_the_smallest_set_that_is_likely_enough(plain: Any) -> None:
    logits_V = torch.tensor([0.1, 0.4, 0.05, 0.2, 0.25]).log()
    for top_p, kept in ((0.3, {1}), (0.5, {1, 4}), (0.64, {1, 4}), (0.66, {1, 4, 3}), (0.9, {1, 4, 3, 0})):
        assert set(chosen(plain, logits_V, Sampling(temperature=1.0, top_p=top_p), 400)) == kept


# ---- several texts at once, and a text that goes on ------------------------------------------------------------------

PROMPTS = [[5, 71, 3, 44, 9], [17], [8, 2, 99, 64, 31, 7, 77, 12, 50, 6, 23], [61, 5, 20]]
CHUNKED = Case(
    "single+fp32", "none",
    overrides=(
        ("model_type", "llama4_text"), ("attention_chunk_size", 7), ("intermediate_size_mlp", 61),
        ("num_local_experts", 3), ("num_experts_per_tok", 1), ("use_qk_norm", False),
    ),
)  # fmt: skip
BATCHED = [
    put_off(Case("single+fp32")),
    put_off(Case("tp2+fp32", "qwen3")),
    put_off(Case("shard2+fp32", tied=True)),
    Case("pp2+fp32"),
    Case("cp2+fp32"),
    Case("single+fp32", "gpt2"),  # positions that are learnt: a rotation would hide that all are too large
    put_off(Case("single+fp32", "gemma3")),  # windows
    Case("tp2+fp32", "gemma2"),  # soft-capped
    Case("single+fp32", "gpt_oss"),  # sinks
    CHUNKED,
]


def hf_alone(case: Case, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = talkative(case).generate(ids, do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def hf_batch(case: Case, tokens: int) -> list[list[int]]:
    """`generate` of `transformers`, with its own padding on the left."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in PROMPTS])
    out = talkative(case).generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0
    )
    return out[:, longest:].tolist()


@pytest.mark.full
@pytest.mark.parametrize("case", BATCHED, ids=lambda case: f"{case.layout}-{case.family}")
def test_a_batch_of_unequal_lengths_is_that_of_transformers(case: Case) -> None:
    expected = [hf_alone(case, prompt, 17) for prompt in PROMPTS]
    assert len({token for each in expected for token in each}) > 6
    if case.family in ("llama", "qwen3"):
        assert hf_batch(case, 17) == expected
    length, count = max(map(len, PROMPTS)), len(PROMPTS)
    results = run_ranks(case.parsed.world, continue_batch, case, PROMPTS, 17)
    assert [found for found, _ in results] == [expected] * case.parsed.world
    embedding_ranks = results if case.parsed.pp == 1 else results[:1]
    assert {counted for _, counted in embedding_ranks} == {count * length + 16 * count}


@pytest.mark.full
def test_a_text_that_is_over_takes_no_more_room() -> None:
    case = Case("single+fp32")
    whole = [hf_alone(case, prompt, 17) for prompt in PROMPTS]
    end = whole[1][2]
    expected = [each[: each.index(end) + 1] if end in each else each for each in whole]
    ((found, counted),) = run_ranks(1, continue_batch, case, PROMPTS, 17, (end,))
    assert found == expected
    assert counted == 4 * 11 + sum(len(each) - 1 for each in expected)


@pytest.mark.full
def test_a_text_is_drawn_the_same_alone_and_in_a_batch() -> None:
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95)
    together = run_ranks(1, continue_batch, Case("single+fp64"), PROMPTS, 9, (), sampling)[0][0]
    end = together[0][2]  # others go on behind the first one
    ended = [each[: each.index(end) + 1] if end in each else each for each in together]
    assert run_ranks(1, continue_batch, Case("single+fp64"), PROMPTS, 9, (end,), sampling)[0][0] == ended
    assert any(len(each) > len(ended[0]) for each in ended[1:])
    assert run_ranks(1, continue_batch, Case("single+fp64"), PROMPTS[:1], 9, (), sampling)[0][0] == together[:1]
    assert [found for found, _ in run_ranks(2, continue_batch, Case("tp2+fp64"), PROMPTS, 9, (), sampling)] == [
        together, together,
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [put_off(Case("single+fp32")), put_off(Case("tp2+fp32")), Case("pp2+fp32"), CHUNKED],
    ids=lambda case: f"{case.layout}-{case.family}",
)  # fmt: skip
def test_what_the_cache_holds_is_not_computed_again(case: Case) -> None:
    said, expected = [], []
    for turn in PROMPTS:
        said += turn
        expected.append(hf_alone(case, said, 6))
        said += expected[-1]
    for answers, counts in run_ranks(case.parsed.world, converse, case, PROMPTS, 6)[:1]:
        assert answers == expected
        # The last token of an answer joins the cache with the turn that follows; the first turn has none before it.
        assert counts == [len(turn) + 5 + (number > 0) for number, turn in enumerate(PROMPTS)]


def test_a_history_that_was_changed_is_computed_again_from_there() -> None:
    seen = KvCache()
    seen.ids, seen.length = [1, 2, 3, 4], 4
    seen.cache.update(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), 0)
    assert (seen.reuse([1, 2, 9, 4, 5]), seen.ids, seen.length) == (2, [1, 2], 2)
    assert seen.cache.get_seq_length() == 2
    assert (seen.reuse([1, 2]), seen.ids) == (1, [1])  # one is computed, or nothing would come


@pytest.mark.parametrize("tokens", [63, 64, 300])
def test_a_prompt_that_leaves_no_position_is_refused(tokens: int) -> None:
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=64,
    ))  # fmt: skip
    steps = decode(model, torch.ones(1, tokens, dtype=torch.int64), max_new_tokens=1)
    if tokens < 64:
        with pytest.raises(AttributeError, match="fivefold"):  # it goes on, to a model that was not laid out
            next(steps)
        return
    with pytest.raises(UserError, match=f"{tokens} tokens, and the model has 64 positions"):
        next(steps)
