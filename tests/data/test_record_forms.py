"""Forms of records as people publish them: the rows of each are those that a person would write, and every column that
no row is made of is named."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fivefold.core.errors import UserError
from fivefold.data import prepare
from fivefold.data.shown import ShownDocument, _documents
from tests.data.helpers import config_for
from tests.data.record_forms import ALL, BAD, GOOD, REFUSED, of_user
from tests.data.tokenizers import byte_folder

TEMPLATE = (
    "{% if tools %}{{ '<tools>' + tools | tojson + '</tools>' }}{% endif %}{% if enable_thinking %}<think/>{% endif %}"
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("forms")
    byte_folder(where / "tokenizer", TEMPLATE, eos="</s>")
    return where


def rows(place: Path, path: Path, keys: dict[str, Any], objective: str) -> tuple[list[str], list[str]]:
    """The rows of a file, and the lines that name columns."""
    config = config_for([{"path": str(path), **keys}], tokenizer=place / "tokenizer", seq_length=1500, packing=False)
    config = config.model_copy(update={"objective": type(config.objective)(name=objective)})
    data = prepare(config, cache=place / "cache")
    tokenizer, batches = (
        data.tokenizer.load(),
        [data.train.rows([row], row_multiple=1) for row in range(len(data.train))],
    )
    found = [written(each) for batch in batches for each in _documents(batch, tokenizer)]
    return found, [line for line in data.counts.lines() if line.startswith("columns ")]


def in_lines(place: Path, records: list[dict[str, Any]]) -> Path:
    path = place / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def written(document: ShownDocument) -> str:
    return "".join(f"[[{part.text}]]" if part.trained else part.text for part in document.parts)


def test_their_rows_are_those_that_are_written_by_hand(subtests: pytest.Subtests, place: Path) -> None:
    assert len(ALL) >= 60
    for form in ALL:
        with subtests.test(msg=f"{form.objective}: {form.name}"):
            found, lines = rows(place, in_lines(place, form.records), form.keys, form.objective)
            assert found == form.rows
            named = [said.rpartition(": ")[2] for line in lines for said in line.split("; left out")[1:]]
            assert named == [", ".join(map(repr, names)) for names in (form.left_out, form.by_template) if names]


def test_what_cannot_be_read_so_is_refused_by_name(subtests: pytest.Subtests, place: Path) -> None:
    for name, record, objective, said in REFUSED:
        with subtests.test(msg=name), pytest.raises(UserError) as refused:
            rows(place, in_lines(place, [record]), {}, objective)
        assert said in refused.value.what and refused.value.fix


CALLS = [
    [{"name": "sum", "arguments": {"expr": "1+1"}}, {"name": "sum", "arguments": {"expr": "2"}}],
    [{"name": "get", "arguments": {"city": "Rome", "options": {"unit": None, "days": [{"n": 1}, {"m": 2}]}}}],
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_keys_that_only_other_records_have_are_in_no_call(place: Path, kind: str) -> None:
    """A table gives each object the keys of all others, with null; in JSON a null is one that somebody wrote."""
    tools = [[{"type": "function", "function": {"name": "sum", "parameters": {"expr": {"type": "string"}}}}], None]
    records = [
        {"messages": [of_user("W?"), {"role": "assistant", "tool_calls": [{"function": call} for call in calls]}],
         "tools": tool}
        for calls, tool in zip(CALLS, tools, strict=True)
    ]  # fmt: skip
    path = place / f"calls.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    unit = '"unit": null, ' if kind == "jsonl" else ""
    assert rows(place, path, {}, "sft")[0] == [
        '<tools>[{"type": "function", "function": {"name": "sum", "parameters": {"expr": {"type": "string"}}}}]</tools>'
        '<user>W?</s><assistant>[[<call>{"name": "sum", "arguments": {"expr": "1+1"}}</call>'
        '<call>{"name": "sum", "arguments": {"expr": "2"}}</call></s>]]',
        '<user>W?</s><assistant>[[<call>{"name": "get", "arguments": {"city": "Rome", "options": {'
        f'{unit}"days": [{{"n": 1}}, {{"m": 2}}]}}}}}}</call></s>]]',
    ]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_number_that_python_does_not_read_is_refused_by_its_place(tmp_path: Path, suffix: str) -> None:
    records = [{"id": 1, "text": "x" * 5000}, {"id": 10**4000 * 10**400, "text": "y"}]
    sys.set_int_max_str_digits(0)
    lines = ",\n".join(map(json.dumps, records))
    sys.set_int_max_str_digits(4300)
    path = tmp_path / f"records.{suffix}"
    path.write_text(f"[{lines}]" if suffix == "json" else lines.replace(",\n", "\n"))
    with pytest.raises(UserError, match=rf"records.{suffix}:2: a number of more digits than Python reads") as refused:
        prepare(config_for(path), cache=tmp_path / "cache")
    assert refused.value.fix == "write it as a string"


def test_what_the_template_leaves_out_of_turns_is_named(tmp_path: Path) -> None:
    """A system text, as Mistral's; thoughts, as DeepSeek's; keys that it does not have."""
    source = (
        "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}</s>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    byte_folder(tmp_path / "tokenizer", source, eos="</s>")
    told, thought = {"role": "system", "content": "S"}, {"role": "assistant", "content": "<think>t</think>A"}
    path = in_lines(tmp_path, [{"messages": [told, {**of_user("Q"), "mood": 1}, {**thought, "reasoning": "r"}]}])
    found, lines = rows(tmp_path, path, {}, "sft")
    assert found == ["<user>Q</s><assistant>[[A</s>]]"]
    assert [line.partition("; ")[2] for line in lines] == [
        "left out of turns by the template: 'mood', 'reasoning', some of what the system says, some of what the "
        "assistant says"
    ]


def test_columns_are_named_once_for_all_records_of_a_source(tmp_path: Path) -> None:
    """Those of later records too, and also when the tokens are found in the cache."""
    path = tmp_path / "records.jsonl"
    some = [{"messages": GOOD}, {"messages": GOOD, "id": 1}, {"system": "S", "messages": BAD, "id": 2, "score": 3}]
    path.write_text("".join(json.dumps(record) + "\n" for record in some))
    for _ in range(2):
        lines = prepare(config_for(path, seq_length=200), cache=tmp_path / "cache").counts.lines()
        assert [line for line in lines if line.startswith("columns")] == [
            f"columns     {path}: 'messages', 'system' read; left out: 'id', 'score'"
        ]
