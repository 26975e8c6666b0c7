"""Tokenizer folders of many shapes: ids, special tokens and chats are those of `AutoTokenizer`, and so they are where
they were copied to by a checkpoint or an export."""

import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer

from fivefold.checkpoint.model_folder import model_files
from fivefold.core.errors import UserError
from fivefold.data import prepare, tokenizer, tokenizer_probe
from fivefold.data.tokenizer import TokenizerInfo, find_tokenizer, tokenizer_files
from fivefold.models.hf_internals import forced_tokenizer_class
from tests.data import tokenizers_zoo as zoo
from tests.data.helpers import config_for, write_jsonl
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


def test_a_tokenizer_that_another_model_is_saved_with_keeps_its_class(
    subtests: pytest.Subtests, tmp_path: Path
) -> None:
    """By its files alone `AutoTokenizer` would take the class of the model's type."""
    for name in zoo.FOLDERS:
        with subtests.test(msg=name):
            folder = zoo.made(name, tmp_path / name)
            saved = found(folder, tmp_path).saved
            copy = tmp_path / "copies" / name
            for path in tokenizer_files(saved):
                (copy / path.relative_to(saved)).parent.mkdir(parents=True, exist_ok=True)
                (copy / path.relative_to(saved)).write_bytes(path.read_bytes())
            zoo.put(copy, "config.json", {"model_type": "gpt2" if "Llama" in name else "llama", "eos_token_id": 0})
            same(plain(folder), found(copy, tmp_path))
    assert [forced_tokenizer_class(kind) for kind in ("llama", "phi3", "qwen2")] == [None, None, "Qwen2Tokenizer"]


def test_the_header_names_the_class_where_the_file_alone_says_otherwise(tmp_path: Path) -> None:
    texts, said = write_jsonl(tmp_path / "texts.jsonl", ["a </s> b"]), {}
    for name in ("class: Llama 2, its class", "class: Llama 2, any class", "special tokens: added_tokens.json"):
        folder = zoo.made(name, tmp_path / name)
        lines = prepare(config_for(texts, tokenizer=folder), cache=tmp_path / "cache").counts.lines()
        said[name] = [line.replace(str(folder), "IT") for line in lines if line.startswith("tokenizer")]
    alone = ", by which AutoTokenizer reads IT: its tokenizer.json alone makes other tokens"
    assert [*said.values()] == [
        [f"tokenizer   LlamaTokenizer{alone}"], [], [f"tokenizer   TokenizersBackend{alone}"]
    ]  # fmt: skip


def test_a_sentencepiece_model_alone(subtests: pytest.Subtests, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    cases: list[tuple[str, str, str, dict[str, Any]]] = [
        ("bpe", "LlamaTokenizer", "llama", zoo.LLAMA),
        (
            "bpe",
            "LlamaTokenizer",
            "llama",
            {**zoo.LLAMA, "add_bos_token": True, "add_eos_token": False, "legacy": True},
        ),
        ("bpe", "LlamaTokenizer", "internlm2", {**zoo.LLAMA, "additional_special_tokens": ["<|im_start|>"]}),
        ("unigram", "T5Tokenizer", "t5", {"eos_token": "</s>", "unk_token": "<unk>"}),
        ("unigram", "PreTrainedTokenizerFast", "llama", zoo.LLAMA),
    ]
    for number, (kind, name, model, values) in enumerate(cases):
        with subtests.test(msg=f"{kind} {name} {model}"):
            folder = tmp_path / str(number)
            zoo.sentencepiece(folder, kind, name, model, **values)
            same(plain(folder), found(folder, tmp_path))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Code of the folder is never run, and a class without a fast form is named."""
    folder = zoo.made("class: Llama 2, any class", tmp_path / "code")
    zoo.config(folder, "OwnTokenizer", auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]})
    (folder / "own.py").write_text("raise SystemExit")
    with pytest.raises(UserError, match=r"not a tokenizer that AutoTokenizer reads: ValueError: .*custom code"):
        found(folder, tmp_path)
    folder = tmp_path / "slow"
    folder.mkdir()
    zoo.config(folder, "CTRLTokenizer")
    zoo.put(folder, "vocab.json", {"<unk>": 0, "a</w>": 1, "<|endoftext|>": 2})
    zoo.put(folder, "merges.txt", "#version\n")
    with pytest.raises(UserError, match="CTRLTokenizer has no form that the tokenizers library runs"):
        found(folder, tmp_path)


def test_another_version_of_the_libraries_or_another_hub_id_reads_a_folder_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked, read = zoo.made("class: GPT-2", tmp_path / "tokenizer"), list[str](), tokenizer._read_apart

    def noted(folder: Path, out: Path, hub_id: str) -> None:
        asked.append(hub_id)
        read(folder, out, hub_id)

    monkeypatch.setattr(tokenizer, "_read_apart", noted)
    for _ in range(2):
        found(folder, tmp_path)
    assert asked == [""]
    tokenizer._inspect(folder, tmp_path / "cache", "org/name")
    assert asked == ["", "org/name"]
    monkeypatch.setattr(tokenizer, "version", lambda package: f"{package} of tomorrow")
    found(folder, tmp_path)
    assert asked == ["", "org/name", ""]


def test_the_same_file_in_another_place_is_another_tokenizer(tmp_path: Path) -> None:
    """A template of that name beside the tokenizer is the template; among the additional ones it is one of several."""
    folder, template = zoo.made("class: GPT-2", tmp_path / "tokenizer"), "{{ messages }}"
    (folder / "chat_template.jinja").write_text(template)
    assert found(folder, tmp_path).template.source == template
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").rename(folder / "additional_chat_templates" / "chat_template.jinja")
    assert found(folder, tmp_path).template.source == {"chat_template": template}


# ---- what a folder may ask for ---------------------------------------------------------------------------------------


def grown(folder: Path, times: int, *replaced: str, added: str = "") -> Path:
    """A token each byte, behind normalizers that double every "x" so many `times`, and replace other texts."""
    made = zoo.byte_bpe(vocabulary=257)
    steps = [normalizers.Replace("x", "xx")] * times + [normalizers.Replace(each, "") for each in replaced]
    made.normalizer = normalizers.Sequence(steps)
    made.add_special_tokens([added] if added else [])
    zoo.config(folder)
    zoo.saved(made, folder)
    return folder


def test_a_text_may_grow_a_hundredfold_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokenizer_probe.read(str(grown(tmp_path / "8", 8)), str(tmp_path / "out")) is None
    said = str(tokenizer_probe.read(str(grown(tmp_path / "13", 13)), str(tmp_path / "out")))
    assert re.fullmatch(r"it makes \d{6} tokens of \d{3} characters", said)
    monkeypatch.setattr(tokenizer_probe, "MOST_TOKENS_A_CHARACTER", 0)  # of patterns and added tokens so much is tried
    patterns = [chr(97 + at) * 1500 for at in range(12)]
    said = str(
        tokenizer_probe.read(str(grown(tmp_path / "0", 0, *patterns, added="y" * 20_000)), str(tmp_path / "out"))
    )
    assert f"of {len(tokenizer_probe._SAMPLE) + 2 + 2 * 10_000} characters" in said
    assert list(tokenizer_probe._texts({"a": ["b" * 1001, 7]})) == ["b" * 1000]


def test_the_probe_takes_no_more_memory_than_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(tokenizer_probe.resource, "setrlimit", lambda *given: asked.append(given))
    tokenizer_probe._limit(2**30)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    ((what, (soft, hard)),) = asked
    assert what == resource.RLIMIT_AS and soft == hard == pytest.approx(now + 2**30, abs=2**26)


def test_a_file_of_no_tokenizer_s_size_is_not_read(tmp_path: Path) -> None:
    zoo.config(tmp_path / "huge")
    with (tmp_path / "huge" / "tokenizer.json").open("wb") as file:
        file.truncate(2**29 + 1)  # a hole
    with pytest.raises(UserError, match=r"tokenizer\.json: .*: 536,870,913 bytes, and at most 536,870,912 are read"):
        found(tmp_path / "huge", tmp_path)
