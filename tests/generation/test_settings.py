"""What a generation config changes: greedy tokens are those of `generate` of `transformers`, setting by setting; the
rest is named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from fivefold.core.errors import UserError
from fivefold.generation.sampling import Sampling, TokenChooser, check_values, end_tokens, not_used, stop_texts
from tests.models import tiny

PROMPT, TOKENS, END = [5, 71, 3, 44, 9, 71, 3], 24, 33
# Each with a prompt that it bites on. Where a token is named, it is one that the plain text has, or END.
SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.6, "no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.8},
    {"no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 1},
    {"bad_words_ids": "first"},
    {"bad_words_ids": "pair"},
    {"suppress_tokens": "some"},
    {"begin_suppress_tokens": "some"},
    {"sequence_bias": "some"},
    {"min_length": len(PROMPT) + 9, "eos_token_id": "first"},
    {"min_new_tokens": 5, "eos_token_id": "first"},
    {"forced_eos_token_id": END},
    {"forced_eos_token_id": [END, 34], "suppress_tokens": [END]},
    {"exponential_decay_length_penalty": (3, 1.9), "eos_token_id": END},
    {"remove_invalid_values": True, "renormalize_logits": True},
    {"watermarking_config": {"bias": 4.0, "greenlist_ratio": 0.3}},
    {"num_beams": 1, "do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
    {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": "some", "min_new_tokens": 4,
        "eos_token_id": "some", "forced_eos_token_id": END,
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    """A model whose text wanders, and then repeats itself."""
    made = tiny.filled(tiny.llama(pad_token_id=None, bos_token_id=None, eos_token_id=None), biases=True).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".layers." in name and parameter.ndim > 1:
                parameter.mul_(4)
    return made


def theirs(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0, attention_mask=ids.new_ones(ids.shape)
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def ours(model: Any, prompt: list[int]) -> list[int]:
    """What the steps of `decode_rows` choose, without a cache."""
    choice, ids = TokenChooser(model, prompt, Sampling(), seed=0, max_new_tokens=TOKENS), list(prompt)
    for _ in range(TOKENS):
        ids.append(choice.choose(model(torch.tensor([ids])).logits[0, -1]))
        choice.add(ids[-1])
        if ids[-1] in end_tokens(model):
            break
    return ids[len(prompt) :]


def filled_in(setting: dict[str, Any], plain: list[int]) -> dict[str, Any]:
    """A setting with tokens of the plain text in it."""
    named = {
        ("bad_words_ids", "first"): [[plain[0]], [plain[4]]], ("bad_words_ids", "pair"): [plain[1:3], plain[5:8]],
        ("suppress_tokens", "some"): plain[:3], ("begin_suppress_tokens", "some"): plain[:1],
        ("sequence_bias", "some"): [[[plain[0]], -9.0], [[plain[1], plain[2]], -9.0]],
        ("eos_token_id", "first"): plain[2], ("eos_token_id", "some"): [plain[9], END],
    }  # fmt: skip
    return {key: named[key, value] if isinstance(value, str) else value for key, value in setting.items()}


def test_each_setting_gives_the_tokens_of_transformers(model: Any, subtests: pytest.Subtests) -> None:
    model.generation_config = GenerationConfig()
    plain, changed = theirs(model, PROMPT), 0
    assert len(set(plain)) > 8 and ours(model, PROMPT) == plain
    for setting in SETTINGS:
        with subtests.test(**setting):
            model.generation_config = GenerationConfig(**filled_in(setting, plain))
            expected = theirs(model, PROMPT)
            assert ours(model, PROMPT) == expected
            changed += expected != plain
    assert changed >= len(SETTINGS) - 2  # all but those that change no greedy answer


def test_a_first_token_is_forced_behind_one_of_a_prompt(model: Any) -> None:
    model.generation_config = GenerationConfig(forced_bos_token_id=END, begin_suppress_tokens=[1])
    assert ours(model, [5]) == theirs(model, [5])
    assert ours(model, [5])[0] == END


def test_a_setting_takes_part_in_what_is_drawn(model: Any) -> None:
    """`min_p` and a suppressed token: what is left of three likely tokens."""
    model.generation_config = GenerationConfig(min_p=0.3, suppress_tokens=[1])
    logits = torch.full((101,), -20.0)
    logits[:4] = torch.tensor([0.0, 1.0, -0.5, -2.0])
    choice = TokenChooser(model, PROMPT, Sampling(temperature=1.0), seed=0, max_new_tokens=TOKENS)
    drawn = [choice.choose(logits) for _ in range(2000)]
    assert set(drawn) == {0, 2}  # 1 is suppressed, 3 has e^-2 of the likeliest: less than 0.3
    assert abs(drawn.count(0) / 2000 - 1 / (1 + 2.718281828**-0.5)) < 0.035


def test_what_is_not_used_is_named() -> None:
    settings = GenerationConfig(
        num_beams=4, length_penalty=0.8, temperature=0.6, top_p=0.9, top_k=50, do_sample=True, repetition_penalty=1.1,
        max_length=4096, guidance_scale=1.5, penalty_alpha=0.6, min_p=0.1, max_time=3.0, stop_strings=["\n"],
        chat_format="chatml", eos_token_id=2, transformers_version="4.40.0", use_cache=True, num_return_sequences=1,
    )  # fmt: skip
    found = not_used(settings, Sampling(temperature=0.8, top_k=50), 100)
    assert found == {
        "num_beams": 4, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "guidance_scale": 1.5,
        "penalty_alpha": 0.6, "max_time": 3.0, "chat_format": "chatml",
    }  # fmt: skip
    greedy = not_used(settings, Sampling(), 100)
    assert greedy.keys() - found.keys() == {"do_sample", "min_p"}  # 50 of `top_k` is what transformers takes anyway
    assert not_used(GenerationConfig(eos_token_id=2, bos_token_id=1, pad_token_id=0), Sampling(), 100) == {}


def test_ends_and_stops(model: Any) -> None:
    model.generation_config = GenerationConfig(eos_token_id=[3, 4], stop_strings="END")
    assert end_tokens(model) == (3, 4) and stop_texts(model) == ("END",)
    model.generation_config = GenerationConfig(stop_strings=["a", "b"])
    assert end_tokens(model) == () and stop_texts(model) == ("a", "b")


def test_the_generation_config_says_what_ends_a_text_and_else_the_config() -> None:
    found = [
        end_tokens(SimpleNamespace(generation_config=settings, config=tiny.llama(eos_token_id=5)))
        for settings in (GenerationConfig(eos_token_id=3), GenerationConfig())
    ]
    assert found == [(3,), (5,)]


ODD: list[dict[str, Any]] = [
    {"eos_token_id": "x"}, {"eos_token_id": [33, 1.5]}, {"eos_token_id": []}, {"repetition_penalty": 0},
    {"repetition_penalty": "x"}, {"repetition_penalty": float("nan")}, {"bad_words_ids": 5},
    {"bad_words_ids": [[99_999]]}, {"suppress_tokens": "abc"}, {"stop_strings": 5}, {"stop_strings": [5]},
    {"sequence_bias": [[[1], "x"]]}, {"min_length": "a", "eos_token_id": 33}, {"exponential_decay_length_penalty": [1]},
]  # fmt: skip


@pytest.mark.parametrize("settings", ODD, ids=str)
def test_a_value_that_transformers_does_not_take_is_refused_before_a_text(model: Any, settings: dict[str, Any]) -> None:
    plain, model.generation_config = model.generation_config, GenerationConfig(**settings)
    try:
        with pytest.raises(UserError, match=r"generation_config\.json has a value that transformers does not take: ."):
            check_values(model, Path("folder"))
    finally:
        model.generation_config = plain
    check_values(model, Path("folder"))
