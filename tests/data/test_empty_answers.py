"""Answers without words are refused, by whatever route they come; odd characters of texts are trained and named."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fivefold.core.errors import UserError
from fivefold.data import PreparedData, prepare
from fivefold.data.ahead import prepare_ahead
from fivefold.data.chat import CHATML
from tests.data.helpers import config_for, whole
from tests.data.tokenizers import byte_folder

USER, CALL = {"role": "user", "content": "Q?"}, {"name": "get", "arguments": {"a": 1}}
DPO, KTO, SIMPO = "dpo", "kto", "simpo"
CALLED = "(message.get('tool_calls', []) | map(attribute='function') | join)"
THINKS = CHATML.replace("message['content']", f"message.get('reasoning_content', '') + {CALLED} + message['content']")


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_folder(tmp_path_factory.mktemp("empty") / "tokenizer", THINKS, eos="<|im_end|>")


def read(where: Path, folder: Path, records: list[Any], objective: str = "sft", **source: Any) -> PreparedData:
    path = where / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = config_for([{"path": str(path), **source}], tokenizer=folder, seq_length=500, packing=False)
    config = config.model_copy(update={"objective": type(config.objective)(name=objective)})
    return prepare(config, cache=where / "cache")


EMPTY: list[tuple[str, str, dict[str, Any]]] = [
    ("a pair", "sft", {"prompt": "Q?", "completion": ""}),
    ("a pair of whitespace", "sft", {"prompt": "Q?", "completion": " \n\t"}),
    ("alpaca", "sft", {"instruction": "Q?", "input": "", "output": ""}),
    ("turns", "sft", {"messages": [USER, said("")]}),
    ("whitespace in turns", "sft", {"messages": [USER, said(" \n")]}),
    ("parts", "sft", {"messages": [USER, said([{"type": "text", "text": ""}])]}),
    ("in the middle", "sft", {"messages": [USER, said(""), USER, said("A.")]}),
    ("behind a tool", "sft", {"messages": [USER, said("-"), {"role": "tool", "content": "7"}, said("")]}),
    ("no calls", "sft", {"messages": [USER, said("", tool_calls=[])]}),
    ("a key that is not written", "sft", {"messages": [USER, said("", id="message 1")]}),
    ("empty thoughts", "sft", {"messages": [USER, said("", reasoning_content=" ")]}),
    ("sharegpt", "sft", {"conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": ""}]}),
    ("a prompt of turns", "sft", {"prompt": [USER], "completion": [said("")]}),
    ("the chosen one", DPO, {"prompt": "Q?", "chosen": "", "rejected": "No."}),
    ("the rejected one", SIMPO, {"prompt": "Q?", "chosen": "Yes.", "rejected": " "}),
    ("of pairs of turns", DPO, {"chosen": [USER, said("")], "rejected": [USER, said("No.")]}),
    ("a rated one", KTO, {"prompt": "Q?", "completion": "", "label": True}),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "record"), [case[1:] for case in EMPTY], ids=[case[0] for case in EMPTY])
def test_an_empty_answer_is_refused(tmp_path: Path, folder: Path, objective: str, record: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"records\.jsonl:1: .* is empty, and would be learnt as an end"):
        read(tmp_path, folder, [record, record], objective)


def trained(data: PreparedData) -> list[str]:
    """The trained text of each row."""
    return ["".join(chr(label) for label in row.labels[0] if 0 <= label < 256) for row in whole(data.whole)]


@pytest.mark.parametrize(
    ("record", "source", "expected"),
    [
        ({"messages": [USER, said("", weight=0), USER, said("A.")]}, {}, "A."),
        ({"messages": [USER, said(""), USER, said("A.")]}, {"train_on": "last"}, "A."),
        ({"messages": [USER, said("", reasoning_content="Hm")]}, {}, "Hm"),
        ({"prompt": [USER, said(""), USER], "completion": "A."}, {}, "A."),
        ({"messages": [USER, said("", tool_calls=[{"type": "function", "function": CALL}])]}, {}, str(CALL)),
    ],
)
def test_what_is_not_trained_or_has_thoughts_may_be_empty(
    tmp_path: Path, folder: Path, record: dict[str, Any], source: dict[str, Any], expected: str
) -> None:
    assert trained(read(tmp_path, folder, [record], **source)) == [expected]


def test_a_pair_without_a_prompt_of_which_one_answer_begins_the_other_has_two_answers(
    tmp_path: Path, folder: Path
) -> None:
    data = read(tmp_path, folder, [{"chosen": "One two", "rejected": "One two three"}], SIMPO)
    (row,) = whole(data.whole)
    assert "".join(map(chr, row.input_ids[0].tolist()[:7])) == "One two" and row.targets == 4 + 1 + 10 + 1


# ---- odd characters --------------------------------------------------------------------------------------------------

ODD = "one\r\ntwo\r\n"
SAYS = "1 document with carriage returns (\\r, as in line ends of Windows): trained as they are"


def written(folder: Path, kind: str) -> Path:
    path, texts = folder / f"texts.{kind}", [ODD, "three"]
    if kind in ("txt", "md"):
        path.write_bytes(ODD.encode())
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\r\n" for text in texts))
    elif kind == "json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["text"], *([text] for text in texts)])
    else:
        pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table({"text": texts}), path)
    return path


@pytest.mark.parametrize("kind", ["txt", "md", "jsonl", "json", "csv", "parquet"])
def test_carriage_returns_are_trained_and_named(tmp_path: Path, kind: str) -> None:
    data = prepare(config_for(written(tmp_path, kind), packing=False), cache=tmp_path / "cache")
    assert f"characters  {tmp_path / f'texts.{kind}'}: {SAYS}" in data.counts.lines()
    assert "\r" in "".join(trained(data))


def test_other_odd_characters_are_named_and_plain_texts_are_not(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a\0b", "c\0", "d\ufffd", "e\ufeff f")))
    (line,) = (
        line for line in prepare(config_for(path), cache=tmp_path / "c").counts.lines() if line.startswith("characters")
    )
    assert (
        "2 documents with NUL characters; 1 document with U+FFFD" in line and "1 document with byte order marks" in line
    )
    path.write_text(json.dumps({"text": "plain\n"}) + "\n")
    assert not prepare(config_for(path), cache=tmp_path / "c").counts.odd
    data = read(tmp_path, folder, [{"messages": [USER, said("a\r\nb")]}, {"messages": [USER, said("a")]}])
    assert data.counts.odd == (f"{tmp_path / 'records.jsonl'}: {SAYS}",)


@pytest.mark.full
def test_streams_and_what_is_prepared_ahead_name_them_too(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {at}\r"}) + "\n" for at in range(40)))
    line = f"{path}: 40 documents with carriage returns (\\r, as in line ends of Windows): trained as they are"
    streamed = prepare(config_for(path, streaming=True), cache=tmp_path / "streamed")
    assert streamed.counts.odd == (line,)
    ahead = prepare_ahead(config_for(path), cache=tmp_path / "ahead", workers=1, unit_bytes=300).data
    assert ahead is not None and ahead.counts.odd == (line,)
