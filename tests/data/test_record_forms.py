"""Forms of records as people publish them: the rows of each are those that a person would write, and every column that
no row is made of is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from fivefold.core.errors import UserError
from fivefold.data import PreparedData, prepare
from fivefold.data.shown import Document, _documents
from tests.data.helpers import config_for
from tests.data.record_forms import ALL, REFUSED
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


def read(place: Path, records: list[dict[str, Any]], keys: dict[str, Any], objective: str) -> PreparedData:
    path = place / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = config_for([{"path": str(path), **keys}], tokenizer=place / "tokenizer", seq_length=1500, packing=False)
    config = config.model_copy(update={"objective": type(config.objective)(name=objective)})
    return prepare(config, cache=place / "cache")


def written(document: Document) -> str:
    return "".join(f"[[{part.text}]]" if part.trained else part.text for part in document.parts)


def test_their_rows_are_those_that_are_written_by_hand(subtests: pytest.Subtests, place: Path) -> None:
    assert len(ALL) >= 60
    for form in ALL:
        with subtests.test(msg=form.name):
            data = read(place, form.records, form.keys, form.objective)
            rows = [data.train.rows([row], row_multiple=1) for row in range(len(data.train))]
            found = [written(each) for row in rows for each in _documents(row, data.tokenizer.load())]
            assert found == form.rows
            lines = [line for line in data.counts.lines() if line.startswith("columns ")]
            named = [line.partition("left out: ")[2] for line in lines]
            assert named == ([", ".join(map(repr, form.left_out))] if form.left_out else [])


def test_what_cannot_be_read_so_is_refused_by_name(subtests: pytest.Subtests, place: Path) -> None:
    for name, record, objective, said in REFUSED:
        with subtests.test(msg=name), pytest.raises(UserError) as refused:
            read(place, [record], {}, objective)
        assert said in refused.value.what and refused.value.fix
