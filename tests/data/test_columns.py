"""Numbers of the records beside their tokens, for a loss of the user's own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.data import IGNORE, prepare
from tests.data.helpers import config_for, whole

LENGTHS = (3, 61, 0, 150, 7, 1, 40)  # of documents; rows have 61 tokens


def own(folder: Path, columns: tuple[str, ...] = ("weight", "sign"), **changes: Any) -> RunConfig:
    """A run on records of one letter each, which says the record."""
    file = folder / "records.jsonl"
    lines = []
    for number, length in enumerate(LENGTHS):
        text = chr(ord("a") + number) * length
        said = {"prompt": "?", "completion": text or "-"} if changes.get("format") == "completion" else {"text": text}
        lines.append(json.dumps(said | {"weight": 0.5 + number, "sign": -number}) + "\n")
    file.write_text("".join(lines))
    tree = config_for([{"path": str(file), **changes}], seq_length=200 if changes else 61).model_dump(by_alias=True)
    tree["objective"] = {"name": "python", "path": "own.py:loss", "columns": columns}
    return RunConfig.model_validate(tree)


@pytest.mark.parametrize("form", [{}, {"format": "completion"}], ids=["texts", "examples"])
def test_each_target_has_the_numbers_of_its_document(tmp_path: Path, form: dict[str, str]) -> None:
    """Also where documents share a row, or are cut over rows."""
    seen = set[int]()
    for batch in whole(prepare(own(tmp_path, **form), cache=tmp_path / "cache").train):
        is_target = batch.labels[0] != IGNORE
        for start, stop in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            letters = [token for token in batch.input_ids[0, start:stop] if ord("a") <= token <= ord("g")]
            if not letters or not is_target[start:stop].any():
                continue
            number = letters[0] - ord("a")
            seen.add(int(number))
            kept = is_target[start:stop]
            assert (batch.columns["weight"][0, start:stop][kept] == 0.5 + number).all()
            assert (batch.columns["sign"][0, start:stop][kept] == -number).all()
    assert seen == {number for number, length in enumerate(LENGTHS) if length}


def test_other_columns_are_another_store(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found = [
        whole(prepare(own(tmp_path, columns), cache=cache).train)[0].columns
        for columns in (("weight",), ("sign", "weight"), ())
    ]
    assert [[*columns] for columns in found] == [["weight"], ["sign", "weight"], []]
    assert np.array_equal(found[0]["weight"], found[1]["weight"])


def test_a_token_store_has_the_numbers_it_was_made_with(tmp_path: Path) -> None:
    cache, config = tmp_path / "cache", own(tmp_path)
    made = whole(prepare(config, cache=cache).train)
    (store,) = (path.parent for path in cache.rglob("meta.json"))
    tree = config.model_dump(by_alias=True)
    tree["data"]["train"] = [{"path": str(store)}]
    found = whole(prepare(RunConfig.model_validate(tree), cache=cache).train)
    assert all(
        np.array_equal(one.columns["sign"], other.columns["sign"]) for one, other in zip(found, made, strict=True)
    )
    tree["objective"]["columns"] = ["sign"]
    with pytest.raises(UserError, match="has the numbers"):
        prepare(RunConfig.model_validate(tree), cache=cache)


def test_texts_beside_records_have_no_numbers(tmp_path: Path) -> None:
    config = own(tmp_path)
    folder = tmp_path / "both"
    folder.mkdir()
    (tmp_path / "records.jsonl").rename(folder / "a.jsonl")
    (folder / "b.txt").write_text("plain")
    tree = config.model_dump(by_alias=True)
    tree["data"]["train"] = [{"path": str(folder)}]
    with pytest.raises(UserError, match=r"objective\.columns names numbers of records, and .*b\.txt has none"):
        prepare(RunConfig.model_validate(tree), cache=tmp_path / "cache")
