"""Configs and tokenizers made to harm, or damaged: each is refused in a sentence, within seconds and little memory."""

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.config import load_config
from fivefold.core.errors import UserError
from fivefold.data import tokenizer
from fivefold.launch.model import check_model
from fivefold.models.build import build_meta, load_model_config
from tests.models import tiny

Harm = Callable[[Path], Any]


def config(**changes: Any) -> Harm:
    """A whole config with some values changed."""

    def write(file: Path) -> None:
        file.write_text(json.dumps(tiny.llama().to_dict() | changes))

    return write


def text(content: str | bytes) -> Harm:
    return lambda file: file.write_bytes(content.encode() if isinstance(content, str) else content)


CONFIGS: dict[str, Harm] = {
    "nothing": text(""),
    "half of it": text('{"model_type": "llama", '),
    "a list": text("[]"),
    "a number": text("7"),
    "not UTF-8": text(b'{"model_type": "ll\xffama"}'),
    "deep": text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "deep inside": text('{"model_type": "llama", "rope_parameters":' + '{"a":' * 900 + "1" + "}" * 901),
    "a number of 5000 digits": text('{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}"),
    "20 MB": text('{"model_type": "llama", "x": "' + "x" * 20_000_000 + '"}'),
    "a pipe": lambda file: os.mkfifo(file),
    "a folder": lambda file: file.mkdir(),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "no model type": text("{}"),
    "a model type that is a list": config(model_type=[]),
    "a model type that is a number": config(model_type=7),
    "10 million layers": config(num_hidden_layers=10**7),
    "10 million layers, hidden": config(model_type="gpt2", n_layer=10**7),
    "a vocabulary of 2^62": config(vocab_size=2**62),
    "a vocabulary of 2^53": config(vocab_size=2**53),
    "sizes that overflow": config(vocab_size=2**40, hidden_size=2**40),
    "a head of 10^9 numbers": config(head_dim=10**9),
    "no width": config(hidden_size=0),
    "a negative width": config(hidden_size=-48),
    "a width that is a text": config(hidden_size="48"),
    "a width that is null": config(hidden_size=None),
    "a fractional width": config(hidden_size=48.5),
    "no heads": config(num_attention_heads=0),
    "no key/value heads": config(num_key_value_heads=0),
    "negative heads": config(num_attention_heads=-6),
    "heads that are a list": config(num_attention_heads=[6]),
    "an unknown activation": config(hidden_act="os.system"),
    "an activation that is a list": config(hidden_act=["silu"]),
    "a rope type that is none": config(rope_parameters={"rope_type": "x", "rope_theta": 1.0}),
    "rope parameters that are a list": config(rope_parameters=[1, 2]),
    "code": config(auto_map={"AutoModelForCausalLM": "evil.Evil"}),
    "no layers": config(num_hidden_layers=0),
    "a number for the type of weights": config(dtype=-1),
    "an object for the type of weights": config(dtype={"a": 1}),
    "a text for the type of weights": config(dtype="os.system"),
    "negative layers": config(num_hidden_layers=-3),
    "NaN": config(rms_norm_eps=float("nan")),
    "NaN inside": config(rope_parameters={"rope_type": "default", "rope_theta": float("nan")}),
    "a padding token beyond the vocabulary": config(pad_token_id=10**6),
}


def test_a_config_is_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, harm in enumerate(CONFIGS):
        with subtests.test(msg=harm):
            folder = tmp_path / str(number)
            folder.mkdir()
            CONFIGS[harm](folder / "config.json")
            before, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with pytest.raises(UserError):
                build_meta(load_model_config(folder))
            run = load_config(None, [f"model.name_or_path={folder}", "model.init=random", "layout.tp=2"])
            try:
                check_model(run)  # knows less, and may let it pass
            except UserError as refused:
                assert str(refused)
            assert time.monotonic() - before < 20
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2**18  # KiB: 256 MiB


def test_the_number_of_modules_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.models.build.MOST_MODULES", 20)
    with pytest.raises(UserError, match="more than 20 modules"):
        build_meta(tiny.llama())


# ---- tokenizers ------------------------------------------------------------------------------------------------------

WORDS: dict[str, Any] = {
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
    "decoder": None, "model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"},
}  # fmt: skip


def words(**changes: Any) -> Harm:
    return text(json.dumps(WORDS | changes))


def replaced(old: str, new: str, times: int) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": old}, "content": new}
    return {"type": "Sequence", "normalizers": [one] * times}


def template(times: int) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": "a", "type_id": 0}}
    return {
        "type": "TemplateProcessing", "single": [bos] * times, "pair": [],
        "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}},
    }  # fmt: skip


TOKENIZERS: dict[str, Harm] = {
    "nothing": text(""),
    "a list": text("[]"),
    "no model": text("{}"),
    "not UTF-8": text(b"\xff\xfe{}"),
    "deep": text(json.dumps(WORDS).replace('"normalizer": null', '"normalizer": ' + "[" * 100_000 + "]" * 100_000)),
    "a text that doubles thirty times": words(normalizer=replaced("a", "aa", 30)),
    "a text that doubles, of rare words": words(normalizer=replaced("qzxj", "qzxjqzxj", 30)),
    "a letter becomes a book": words(normalizer=replaced("a", "aaaaaaaa " * 50_000, 2)),
    "a panic of the Rust library": words(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a hundred thousand tokens before each text": words(post_processor=template(100_000)),
    "merges of unknown tokens": words(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}),
    "a pipe": lambda file: os.mkfifo(file),
    "a folder": lambda file: file.mkdir(),
}


READ_APART = tokenizer._read_apart  # before `tests/conftest.py` reads them here


@pytest.mark.full
@pytest.mark.parametrize("harm", TOKENIZERS)
def test_a_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    monkeypatch.setattr(tokenizer, "_read_apart", READ_APART)
    TOKENIZERS[harm](tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    before, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as refused:
        tokenizer.find_tokenizer(str(tmp_path), model="demo", corpus=[], root=tmp_path / "cache")
    assert str(tmp_path) in str(refused.value)
    assert time.monotonic() - before < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2**17  # KiB: 128 MiB


def test_a_sound_tokenizer_is_taken(tmp_path: Path) -> None:
    words()(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    found = tokenizer.find_tokenizer(str(tmp_path), model="demo", corpus=[], root=tmp_path / "cache")
    assert (found.vocab_size, found.eos_token_id) == (2, 1)


@pytest.mark.parametrize("damage", ["[" * 100_000, "[]", "7", '{"eos_token": [[[]]]}', '{"eos_token": {"content": 7}}'])
def test_a_damaged_tokenizer_config_names_the_file(tmp_path: Path, damage: str) -> None:
    words()(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(damage)
    with pytest.raises(UserError, match=str(tmp_path)):
        tokenizer.find_tokenizer(str(tmp_path), model="demo", corpus=[], root=tmp_path / "cache")
