"""BOS: in front of each document as the tokenizer does, or as `data.bos` says; the same in training and generation."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from fivefold.checkpoint import agreement, check_agreement
from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.data import PreparedData, prepare
from fivefold.data.chat import CHATML
from fivefold.data.tokenizer import find_tokenizer
from fivefold.generation.opened import _bos_of, _run_of
from fivefold.generation.prompts import asked_ids
from fivefold.generation.text import encode_prompt
from tests.data.helpers import SEQ, config_for, pieces, prepare_texts, random_texts, segments, whole, write_jsonl

BYTES, BOS, EOS = 256, 257, 256


def tokenizer_folder(folder: Path, *, template: bool, named: bool = True) -> Path:
    """The byte tokenizer with a BOS, `<s>`, put in front by its post-processor if `template`, as Llama's is."""
    tokenizer: Tokenizer = find_tokenizer("byte", model="", corpus=(), root=folder / "cache").load()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s>:0 $A:0", pair="<s>:0 $A:0 $B:1", special_tokens=[("<s>", BOS)]
        )
    target = folder / f"tokenizer-{template}-{named}"
    target.mkdir(exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").write_text(json.dumps(names | ({"bos_token": "<s>"} if named else {})))
    return target


def prepared(folder: Path, texts: list[str], *, template: bool = True, **changes: Any) -> PreparedData:
    tokenizer = tokenizer_folder(folder, template=template)
    return prepare_texts(folder, texts, tokenizer=tokenizer, packing=False, **changes)


def read(data: PreparedData) -> list[list[int]]:
    return [tokens for batch in whole(data.train) for tokens, _ in pieces(batch)]


def test_the_rows_hold_what_auto_tokenizer_gives(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    data = prepared(tmp_path, texts := ["one", "two words", "é"])
    theirs = AutoTokenizer.from_pretrained(data.tokenizer.folder)
    assert read(data) == [[*theirs(text).input_ids, EOS] for text in texts]
    assert data.counts.tokens == sum(map(len, read(data)))  # counted
    assert "BOS <s> in front of each document" in data.counts.lines()[0]


def test_bos_is_an_input_and_never_a_target_and_only_at_the_start_of_a_long_document(tmp_path: Path) -> None:
    data = prepared(tmp_path, ["x" * (2 * SEQ), "y"])
    found = [(tokens.count(BOS), [label for label in labels if label == BOS]) for batch in whole(data.train)
             for tokens, labels, _ in segments(batch)]  # fmt: skip
    assert sum(count for count, _ in found) == 2 and not any(targets for _, targets in found)
    first = next(tokens for tokens in read(data) if len(tokens) == SEQ)
    assert first[0] == BOS and data.counts.train.split == 1


@pytest.mark.parametrize(
    ("bos", "template", "expected"),
    [("auto", True, True), ("auto", False, False), (True, True, True), (True, False, True), (False, True, False)],
)
def test_the_key_decides_and_generation_begins_as_training_does(
    tmp_path: Path, bos: Any, template: bool, expected: bool
) -> None:
    data = prepared(tmp_path, ["ab"], template=template, bos=bos)
    front = [BOS] if expected else []
    assert read(data) == [[*front, 97, 98, EOS]]
    assert data.tokenizer.bos_token_ids == tuple(front)
    checkpoint = tmp_path / "step-000001"  # what a checkpoint keeps of it
    (checkpoint / "model").mkdir(parents=True)
    for path in data.tokenizer.folder.iterdir():
        (checkpoint / "model" / path.name).write_bytes(path.read_bytes())
    (checkpoint / "run.yaml").write_text(config_for("x", bos=bos).to_yaml())
    folder = checkpoint / "model"
    found = find_tokenizer(str(folder), model="", corpus=(), root=tmp_path, bos=_bos_of(_run_of(folder)))
    prompt = encode_prompt(found.load(), "ab", (EOS,), found.bos_token_ids)
    assert prompt.tolist() == [[*front, 97, 98]]


def test_generation_of_a_model_folder_does_as_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_folder(tmp_path, template=True) / "tokenizer.json"))
    assert _bos_of(_run_of(tmp_path)) == "auto"
    for prompt, expected in {"ab": [BOS, 97, 98], "<s>ab": [BOS, 97, 98], "": [BOS]}.items():
        assert encode_prompt(tokenizer, prompt, (EOS,)).tolist() == [expected]


def test_a_text_that_begins_with_bos_gets_no_second_one_and_an_empty_one_none(tmp_path: Path) -> None:
    data = prepared(tmp_path, ["<s>ab", "", "ab"])
    assert read(data) == [[BOS, 97, 98, EOS]] * 2
    assert data.counts.train.without_target == 1  # the empty text: BOS and EOS alone would teach that texts end at once


@pytest.mark.parametrize("front", ["", "{{ bos_token }}"])
def test_a_conversation_has_the_tokens_of_apply_chat_template_in_training_and_in_talking(
    tmp_path: Path, front: str
) -> None:
    from transformers import AutoTokenizer

    folder = tokenizer_folder(tmp_path, template=True)
    file, turns = (
        folder / "tokenizer_config.json",
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    )
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": front + CHATML}))
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    data = prepare(config_for(tmp_path / "talk.jsonl", tokenizer=folder, seq_length=256), cache=tmp_path / "cache")
    theirs = AutoTokenizer.from_pretrained(folder)
    assert read(data) == [[*theirs.apply_chat_template(turns)["input_ids"], EOS]]
    assert read(data)[0].count(BOS) == bool(front)
    assert "BOS <s> in front of each document that the chat template does not write" in data.counts.lines()[0]
    loaded = data.tokenizer.load()
    opened: Any = SimpleNamespace(
        info=data.tokenizer, encode=lambda text: loaded.encode(text, add_special_tokens=False).ids
    )
    asked = theirs.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]
    assert asked_ids(opened, turns[:1]) == asked


def test_a_text_that_ends_with_eos_gets_no_second_one(tmp_path: Path) -> None:
    data = prepared(tmp_path, ["ab<|endoftext|>", "ab", "ab<|endoftext|>\n"])
    assert read(data) == [[BOS, 97, 98, EOS], [BOS, 97, 98, EOS], [BOS, 97, 98, EOS, 10, EOS]]
    twice = prepared(tmp_path, ["ab<|endoftext|>" + "<|endoftext|>"])
    assert read(twice) == [[BOS, 97, 98, EOS, EOS]]  # which says so itself


def test_tokens_that_a_text_brings_its_own_end_for_are_other_data(tmp_path: Path) -> None:
    """Earlier versions put a second EOS there: rows and checkpoints of those tokens are of other data."""
    for text, is_alike in (("ab", True), ("ab<|endoftext|>", False)):
        stores = [prepared(tmp_path, [text], bos=bos).train.stores[0] for bos in (True, False)]
        assert (stores[0].meta.content == stores[1].meta.content) == is_alike


def test_a_tokenizer_without_bos_says_so(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, template=False, named=False)
    with pytest.raises(UserError, match=r"data.bos: true, but the tokenizer in .* has no BOS token") as caught:
        prepare_texts(tmp_path, ["ab"], tokenizer=folder, bos=True)
    assert "data.bos=auto" in str(caught.value.fix)
    for name in ("byte", "train:300"):
        with pytest.raises(UserError, match="has no BOS token"):
            prepare_texts(tmp_path, ["ab"], tokenizer=name, bos=True)


def test_no_bos_though_the_tokenizer_has_one_is_said(tmp_path: Path) -> None:
    assert (
        "no BOS (data.bos: false), though the tokenizer puts <s>"
        in (prepared(tmp_path, ["ab"], bos=False).counts.lines()[0])
    )


def test_stores_and_rows_with_and_without_bos_are_kept_apart(tmp_path: Path) -> None:
    without, with_bos = (prepared(tmp_path, ["ab"], bos=bos) for bos in (False, "auto"))
    assert without.fingerprint != with_bos.fingerprint
    assert read(without) != read(with_bos)
    stores = {
        json.loads(path.read_text())["bos"] == [BOS]: path.parent for path in tmp_path.glob("cache/stores/*/meta.json")
    }
    assert set(stores) == {True, False}
    with pytest.raises(UserError, match=r"has no BOS in front of its documents, and this run BOS \[257\]") as caught:
        prepare(config_for(stores[False], tokenizer=without.tokenizer.folder), cache=tmp_path / "cache")
    assert caught.value.fix == "set data.bos: false"
    prepare(config_for(stores[False], tokenizer=without.tokenizer.folder, bos=False), cache=tmp_path / "cache")


def test_validation_has_bos_too(tmp_path: Path) -> None:
    held = write_jsonl(tmp_path / "held.jsonl", ["cd", "ef"])
    data = prepared(tmp_path, ["ab"], validation=[{"path": str(held)}])
    assert data.validation is not None
    assert [tokens[0] for batch in whole(data.validation) for tokens, _ in pieces(batch)] == [BOS, BOS]


def test_a_run_does_not_go_on_with_another_bos(tmp_path: Path) -> None:
    config = RunConfig()
    old = {key: value for key, value in agreement(config, "f").items() if key != "data.bos"}  # of an earlier version
    check_agreement(old, agreement(config, "f", bos=False))
    with pytest.raises(UserError, match=r"data.bos is true, but the checkpoint was trained with false"):
        check_agreement(old, agreement(config, "g", bos=True))


@pytest.mark.parametrize("name", ["byte", "train:300"])
def test_the_tokenizers_of_ours_have_none(tmp_path: Path, name: str) -> None:
    data = prepare_texts(tmp_path, random_texts(0), tokenizer=name)
    assert data.tokenizer.bos_token_ids == () and "BOS" not in data.counts.lines()[0]
