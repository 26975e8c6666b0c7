"""Chat, instruction and preference records: told from texts by their keys, whatever the file; never a key advised that
trains on one side."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fivefold.core.errors import UserError
from fivefold.data import prepare
from fivefold.data.records import conversation_of
from tests.data.helpers import config_for, prepare_texts, write_jsonl

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a long answer, much longer"}]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": TURNS, "id": "x" * 90}, "chat records ('messages')"),
    "sharegpt": ({"id": "x" * 90, "conversations": SHAREGPT}, "chat records ('conversations')"),
    "completion": ({"prompt": "q", "completion": "long answer"}, "instruction records ('prompt', 'completion')"),
    "alpaca": (
        {"instruction": "do", "input": "", "output": "long answer"},
        "instruction records ('instruction', 'input', 'output')",
    ),
    "dolly": (
        {"instruction": "do", "context": "", "response": "long answer", "category": "x"},
        "instruction records ('instruction', 'context', 'response')",
    ),
    "dpo": (
        {"prompt": "q", "chosen": "a long answer", "rejected": "b"},
        "preference records ('prompt', 'chosen', 'rejected')",
    ),
    "dpo turns": ({"chosen": TURNS, "rejected": TURNS}, "preference records ('chosen', 'rejected')"),
    "question": ({"question": "q", "answer": "a long answer"}, "instruction records ('question', 'answer')"),
    "capitals": ({"Question": "q", "Answer": "a long answer"}, "instruction records ('Question', 'Answer')"),
}


def refusal(path: Path, **source: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        prepare(config_for([{"path": str(path), **source}]), cache=path.parent / "cache")
    assert caught.value.exit_code == 2
    return caught.value


def written(folder: Path, record: dict[str, Any], kind: str) -> Path:
    path = folder / f"records.{kind}"
    if kind == "jsonl":
        path.write_text(json.dumps(record) + "\n")
    elif kind == "json":
        path.write_text(json.dumps([record]))
    elif kind == "parquet":
        pq.write_table(pa.table({name: [value] for name, value in record.items()}), path)
    else:
        with path.open("w", newline="") as file:
            cells = [value if isinstance(value, str) else json.dumps(value) for value in record.values()]
            csv.writer(file).writerows([list(record), cells])
    return path


@pytest.mark.parametrize("name", [name for name in RECORDS if not name.startswith("dpo")])
def test_their_answers_are_trained_whatever_the_file(tmp_path: Path, name: str) -> None:
    record, _ = RECORDS[name]
    found = []
    for kind in ("jsonl", "json", "parquet", "csv"):
        data = prepare(config_for(written(tmp_path, record, kind), seq_length=200), cache=tmp_path / "cache")
        assert data.counts.train.examples == 1
        batch = data.train.rows([0], row_multiple=1)
        found.append((batch.input_ids.tolist(), batch.labels.tolist()))
    assert all(each == found[0] for each in found)
    trained = bytes(label for label in found[0][1][0] if 0 <= label < 256).decode()
    assert trained.startswith(("a long answer", "long answer", "hello"))


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
@pytest.mark.parametrize("name", ["dpo", "dpo turns"])
def test_preferences_are_named_and_no_key_is_advised(tmp_path: Path, name: str, kind: str) -> None:
    record, expected = RECORDS[name]
    error = refusal(written(tmp_path, record, kind))
    assert expected.startswith("preference records")
    assert "holds preference records, and objective.name is sft" in error.what
    assert "text_key" not in str(error) and "objective.name: dpo" in str(error.fix)


@pytest.mark.parametrize(("name", "left_out"), [("completion", "prompt"), ("dpo", "rejected"), ("dolly", "response")])
def test_a_record_without_what_those_before_it_have_says_so(tmp_path: Path, name: str, left_out: str) -> None:
    """And no key of it is advised."""
    record = {key: value or "some" for key, value in RECORDS[name][0].items()}
    short = {key: value for key, value in record.items() if key != left_out}
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (record, record, short)), encoding="utf-8")
    error = refusal(path)
    assert error.what == f"data.train: {path}:3: no key {left_out!r}, which records before it have"
    assert error.fix == "complete this record, or take it out"


@pytest.mark.parametrize("key", ["messages", "chosen"])
def test_a_list_of_turns_is_no_text(tmp_path: Path, key: str) -> None:
    record = {"messages": TURNS} if key == "messages" else {"chosen": TURNS, "rejected": TURNS}
    error = refusal(written(tmp_path, record, "jsonl"), text_key=key)
    assert "is not to be told" in error.what and "text_key" not in str(error)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
@pytest.mark.parametrize(
    ("name", "key", "left_out"),
    [
        ("completion", "completion", "'prompt' is left out"),
        ("alpaca", "output", "'instruction', 'input' are left out"),
        ("dpo", "chosen", "'prompt', 'rejected' are left out"),
    ],
)
def test_a_key_that_is_set_is_trained_on_and_what_is_left_out_is_said(
    tmp_path: Path, name: str, key: str, left_out: str, kind: str
) -> None:
    path = written(tmp_path, RECORDS[name][0], kind)
    config = config_for([{"path": str(path), "text_key": key}])
    for _ in range(2):  # found in the cache the second time
        (line,) = prepare(config, cache=tmp_path / "cache").counts.answers_alone
        assert f"{path} holds " in line and f"and {key!r} alone is trained on; {left_out}" in line


NO_USE: dict[str, tuple[dict[str, Any], str, str]] = {
    "a system text that no record has": (
        {"messages": TURNS}, "{columns: {system: sytsem}}", "columns.system: no record has 'sytsem'",
    ),
    "a text that no record has": ({"messages": TURNS}, "{text_key: txet}", "text_key: no record has 'txet'"),
    "what is trained of texts": ({"text": "a text"}, "{train_on: last}", "train_on: last: the records are texts"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_USE)
def test_what_is_said_of_records_and_has_no_use_is_refused(tmp_path: Path, name: str) -> None:
    record, said, expected = NO_USE[name]
    assert expected in refusal(written(tmp_path, record, "jsonl"), **yaml.safe_load(said)).what


def test_what_is_said_of_records_is_refused_of_plain_texts(tmp_path: Path, subtests: pytest.Subtests) -> None:
    (tmp_path / "a.txt").write_text("some text")
    for said in ({"columns": {"messages": "m"}}, {"text_key": "m"}, {"train_on": "all"}):
        with subtests.test(msg=str(said)):
            refused = refusal(tmp_path / "a.txt", **said)
            assert f"data.train.{next(iter(said))} is of records" in refused.what and refused.fix


def test_texts_that_were_rendered_are_trained_on_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "rendered.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completion": "a", "text": "<user>q<assistant>a"}) + "\n")
    assert prepare(config_for(path), cache=tmp_path / "cache").counts.answers_alone == ()
    body = write_jsonl(tmp_path / "body.jsonl", ["plain"], key="body")
    plain = config_for([{"path": str(body), "text_key": "body"}])
    assert prepare(plain, cache=tmp_path / "cache").counts.answers_alone == ()


def test_a_prompt_with_something_unknown_gets_no_advice_by_length(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"prompt": "q", "what_it_said": "a long, long answer"}) + "\n")
    assert "add data.train.text_key=" not in str(refusal(path).fix)


@pytest.mark.parametrize(
    "names", [("text",), ("id", "title", "body"), ("content", "url"), ("title", "abstract", "answer"), ("input",)]
)
def test_other_records_are_not_taken_for_conversations(names: tuple[str, ...]) -> None:
    assert conversation_of(names) is None


def test_epochs_are_counted_by_the_rows_that_are_read(tmp_path: Path) -> None:
    data = prepare_texts(tmp_path, ["x" * 40] * 50, packing=False)
    assert data.train.epochs(125) == 2.5 and data.train.epochs(20) == 0.4
