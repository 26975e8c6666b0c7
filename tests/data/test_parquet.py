"""Parquet files: the same documents as from JSONL, and what is said about those that cannot be read."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fivefold.core.errors import UserError
from fivefold.data import formats, prepare
from fivefold.data.source import Source, resolve
from tests.data.helpers import config_for, prepare_texts, random_texts, whole, write_jsonl

TEXTS = random_texts(0, 211)


def write(path: Path, *, rows_per_group: int = 17, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows_per_group)
    return path


def refusal(path: Path, **source: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        prepare(config_for([{"path": str(path), **source}]), cache=path.parent / "cache")
    assert caught.value.exit_code == 2 and caught.value.fix and "\n" not in caught.value.what
    return caught.value


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("rows_per_group", [1, 17, 10**6])
def test_the_documents_are_those_of_the_column(tmp_path: Path, kind: pa.DataType, rows_per_group: int) -> None:
    path = write(
        tmp_path / "a.parquet",
        rows_per_group=rows_per_group,
        id=range(len(TEXTS)),
        body=pa.array(TEXTS).cast(kind),
        text=["no"] * len(TEXTS),
    )
    data = prepare(config_for([{"path": str(path), "text_key": "body"}]), cache=tmp_path / "cache")
    expected = prepare_texts(tmp_path, TEXTS)
    lines = data.counts.lines()
    assert f"columns     {path}: 'body' read; left out: 'id', 'text'" in lines
    told = [line for line in expected.counts.lines() if not line.startswith("source")]
    assert [line for line in lines if not line.startswith(("columns", "source"))] == told
    for batch, other in zip(whole(data.train), whole(expected.train), strict=True):
        assert batch.input_ids.tolist() == other.input_ids.tolist()


def test_folders_globs_and_other_endings(tmp_path: Path) -> None:
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    write(tmp_path / "corpus" / "b.parquet", text=["three", "four"])
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["one", "two"])
    write(tmp_path / "corpus" / "deep" / "c.dat", text=["five"])
    for source, names in (
        (Source(str(tmp_path / "corpus"), "data.train"), ["a.jsonl", "b.parquet"]),
        (Source(str(tmp_path / "corpus" / "*.parquet"), "data.train"), ["b.parquet"]),
        (Source(str(tmp_path / "corpus" / "deep" / "*"), "data.train", format="parquet"), ["c.dat"]),
    ):
        found = resolve(source, formats.discover(), tmp_path)
        assert [path.name for path, _ in found.files] == names
        assert prepare(config_for([{"path": source.path, "format": source.format}]), cache=tmp_path / "cache")


def test_the_column_is_part_of_what_is_cached(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", text=["one"], other=["another"])
    texts, others = (
        prepare(config_for([{"path": str(path), "text_key": key}]), cache=tmp_path / "cache")
        for key in ("text", "other")
    )
    assert texts.fingerprint != others.fingerprint


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", id=["1", "2"], body=["long text", "longer text"], n=[1, 2])
    error = refusal(path)
    assert error.what == f"data.train: {path}: no column 'text'; the columns are 'id', 'body', 'n'"
    assert error.fix == "add data.train.text_key=body"
    error = refusal(path, text_key="n")
    assert error.what == f"data.train: {path}: 'n' holds a int64, not a string"
    assert error.fix == "add data.train.text_key=body"
    numbers = write(tmp_path / "numbers.parquet", n=[1])
    assert refusal(numbers).fix == "data.train.text_key names the column that holds the text"


def test_a_null_names_its_row_as_in_jsonl(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", rows_per_group=2, text=["one", "two", "three", None, "five"])
    assert refusal(path).what == f"data.train: {path}:4: 'text' holds null, not a string"


def test_bytes_that_are_no_text_name_their_row(tmp_path: Path) -> None:
    raw = pa.array([b"one", b"caf\xe9"]).view(pa.binary())
    broken = pa.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    path = write(tmp_path / "a.parquet", text=broken)
    assert refusal(path).what == f"data.train: {path}:2: not UTF-8: byte 0xe9 at offset 3 of the text"


@pytest.mark.parametrize("how", ["empty", "text", "cut", "overwritten", "no rows"])
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "a.parquet", text=TEXTS)
    raw = path.read_bytes()
    middle = bytes(len(raw) - 400)
    path.write_bytes({"empty": b"", "text": b"text", "cut": raw[:-9], "overwritten": middle + raw[-400:]}.get(how, raw))
    if how == "no rows":
        write(path, text=pa.array([], pa.string()))
    what = refusal(path).what
    assert what.startswith(f"data.train: {path}: {'the file has no rows' if how == 'no rows' else 'not readable as '}")
    assert not list((tmp_path / "cache").glob("stores/*/*"))


def test_what_to_install_is_said_in_three_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", text=["one"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    error = refusal(path)
    assert error.what == f"data.train: {path}: reading parquet needs pyarrow, which is not installed"
    assert error.fix == "pip install 'fivefold[parquet]'" and len(str(error).splitlines()) == 3


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_large_row_group_is_read_in_little_memory(tmp_path: Path, compression: str) -> None:
    texts = [f"{row} {'a piece of text ' * 1024}" for row in range(4096)]  # 64 MiB
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression=compression, use_dictionary=False)
    assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == 1
    before, most = pa.total_allocated_bytes(), 0
    form = next(form for form in formats.discover() if form.name == "parquet")
    for text, read in zip(texts, form.documents(tmp_path / "a.parquet", Source("", "data.train")), strict=True):
        assert read == text
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 24 * 2**20  # a page of 1024 texts is 16 MiB


def test_long_rows_are_read_one_by_one(tmp_path: Path) -> None:
    texts = [f"{row} {'long ' * 2**19}" for row in range(16)]  # 2.5 MiB each
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", write_batch_size=1)
    before, most = pa.total_allocated_bytes(), 0
    form = next(form for form in formats.discover() if form.name == "parquet")
    for text, read in zip(texts, form.documents(tmp_path / "a.parquet", Source("", "data.train")), strict=True):
        assert read == text
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 32 * 2**20


def test_numbers_of_records_are_read_from_every_kind_of_table(tmp_path: Path) -> None:
    """The columns that a loss of the user's own names, beside the text."""
    texts, weights = TEXTS[:20], [number / 4 for number in range(20)]
    table = {"note": ["x"] * 20, "text": texts, "weight": weights, "class": [number % 3 for number in range(20)]}
    write(tmp_path / "a.parquet", **table)
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([list(table), *(list(row.values()) for row in rows)])
    own = {"name": "python", "path": "my_loss.py:fn", "columns": ["weight", "class"]}

    def read(name: str) -> list[float]:
        config = config_for(tmp_path / name)
        config = config.model_copy(update={"objective": type(config.objective).model_validate(own)})
        batches = whole(prepare(config, cache=tmp_path / "cache").train)
        return [float(x) for key in own["columns"] for batch in batches for x in batch.columns[key].reshape(-1)]

    expected = read("a.jsonl")
    assert {*weights, 2.0} <= {*expected}
    for name in ("a.parquet", "a.csv"):
        assert read(name) == expected, name
