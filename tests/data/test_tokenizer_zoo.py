"""Tokenizer folders of many shapes: ids, special tokens and chats are those of `AutoTokenizer`, and so they are where
they were copied to by a checkpoint or an export."""

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fivefold.checkpoint.model_folder import model_files
from fivefold.data.tokenizer import TokenizerInfo, find_tokenizer
from tests.data import tokenizers_zoo as zoo
from tests.models import tiny


def plain(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def found(folder: Path, root: Path, **options: Any) -> TokenizerInfo:
    return find_tokenizer(str(folder), model="", corpus=(), root=root / "cache", **options)


def same(theirs: Any, ours: TokenizerInfo) -> None:
    """What both say of all texts and conversations."""
    loaded = ours.load()
    ids = [each.ids for each in loaded.encode_batch_fast(zoo.TEXTS, add_special_tokens=False)]
    for text, mine in zip(zoo.TEXTS, ids, strict=True):
        assert mine == theirs(text, add_special_tokens=False)["input_ids"], text
        assert loaded.decode(mine, skip_special_tokens=False) == theirs.decode(mine), text
    assert ours.eos_token_id == (0 if theirs.eos_token_id is None else theirs.eos_token_id)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert [*ours.template_ids, *loaded.encode("a", add_special_tokens=False).ids] == [
        *theirs("a")["input_ids"][: len(ours.template_ids)],
        *theirs("a", add_special_tokens=False)["input_ids"],
    ]
    if theirs.chat_template is None:
        assert ours.template.name == "the built-in ChatML"
        return
    for tools in (None, zoo.TOOLS):
        for turns, asks in ((zoo.TURNS, False), (zoo.TURNS[:-1], True)):
            options: dict[str, Any] = {"tools": tools, "add_generation_prompt": asks}
            text = ours.template.render(turns, tools=tools, answer=asks)
            assert text == theirs.apply_chat_template(turns, tokenize=False, **options)
            encoded = loaded.encode(text, add_special_tokens=False).ids
            assert encoded == theirs.apply_chat_template(turns, **options)["input_ids"]


def test_every_folder_is_what_auto_tokenizer_makes_of_it(subtests: pytest.Subtests, tmp_path: Path) -> None:
    assert len(zoo.TEXTS) == 50
    for name in zoo.FOLDERS:
        with subtests.test(msg=name):
            folder = zoo.made(name, tmp_path / name)
            same(plain(folder), found(folder, tmp_path))


def test_a_copy_of_a_run_or_an_export_is_read_alike(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for name in zoo.FOLDERS:
        with subtests.test(msg=name):
            folder = zoo.made(name, tmp_path / name)
            copy = tmp_path / "copies" / name
            for path, content in model_files(
                tiny.llama(), model_class="LlamaForCausalLM", dtype="float32", tokenizer=folder
            ).items():
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                (copy / path).write_bytes(content)
            (copy / "config.json").unlink()
            if (folder / "config.json").is_file():
                os.link(folder / "config.json", copy / "config.json")
            first, second = found(folder, tmp_path), found(copy, tmp_path)
            same(plain(folder), second)
            assert second.digest == first.digest and second.template.source == first.template.source
