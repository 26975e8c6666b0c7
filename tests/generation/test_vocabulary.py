"""A tokenizer with more tokens than the model: harmless until a text has one of them, which is then named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.core.errors import UserError
from fivefold.data import PreparedData, prepare
from fivefold.data.formats import discover
from fivefold.data.source import Source, resolve
from fivefold.data.tokenizer import find_tokenizer
from fivefold.evaluation.run import rows_of
from fivefold.generation.opened import OpenModel, check_vocabulary
from fivefold.generation.prompts import asked_ids
from fivefold.training.model import build_model
from tests.data import tokenizers_zoo as zoo
from tests.data.helpers import config_for, write_jsonl
from tests.models import tiny

NAMED = r"has the token '<tool>', number 302, and the model's vocabulary has 302 entries: its tokenizer knows 304"
CONFIG = tiny.llama(vocab_size=302, eos_token_id=0, bos_token_id=None, pad_token_id=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = zoo.made("special tokens: added_tokens_decoder", tmp_path / "model")  # 300 tokens, then <|im_start|> ...
    CONFIG.save_pretrained(folder)
    return folder


@pytest.fixture
def opened(folder: Path, tmp_path: Path) -> OpenModel:
    info = find_tokenizer(str(folder), model="", corpus=(), root=tmp_path / "cache")
    model: Any = SimpleNamespace(config=CONFIG)
    return OpenModel(folder, model, info.load(), info, (0,), {})


def test_a_prompt_and_a_conversation(opened: OpenModel) -> None:
    assert opened.prompt("a <|im_start|>").max() == 300
    for call in (opened.prompt, opened.encode, lambda text: asked_ids(opened, [{"role": "user", "content": text}])):
        with pytest.raises(UserError, match=NAMED):
            call("a <tool>")


def test_a_text_that_is_evaluated(opened: OpenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    for text, largest in (("a <|im_start|> b", 300), ("a <tool> b", 302)):
        path = write_jsonl(tmp_path / "text.jsonl", [text])
        rows = rows_of(resolve(Source(str(path), "--text"), discover(), tmp_path / "cache"), opened, 16)
        assert rows.largest_token == largest
    with pytest.raises(UserError, match=f"text.jsonl {NAMED}"):
        check_vocabulary(rows.largest_token, CONFIG, opened.info, "text.jsonl")


def test_a_run(folder: Path, tmp_path: Path) -> None:
    def data(text: str) -> tuple[Any, PreparedData]:
        config = config_for(write_jsonl(tmp_path / "text.jsonl", [text]), tokenizer="auto", model=folder)
        return config, prepare(config, cache=tmp_path / "cache")

    assert build_model(*data("a <|im_start|> b")).config.vocab_size == 302
    with pytest.raises(UserError, match="the tokenizer has 304 tokens, the model's vocabulary 302"):
        build_model(*data("a <tool> b"))
