"""CSV, JSON, Markdown, and compressed files of every format: read, or refused with the place and the reason."""

import bz2
import csv
import gzip
import json
import lzma
import sys
import tracemalloc
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from fivefold.data import compression, prepare
from fivefold.data.formats import json_file
from tests.data.helpers import config_for, random_texts
from tests.data.test_formats import read, refusal

TEXTS = ["one", 'two, "quoted"\nand a second line', "é \U0001f600\tx", "four"]
EXPECTED = [text.encode() for text in TEXTS]


def zstd(content: bytes) -> bytes:
    pa = pytest.importorskip("pyarrow")
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(content)
    return bytes(out.getvalue())


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def csv_of(path: Path, texts: list[str], *, delimiter: str = ",", key: str = "text", **others: str) -> bytes:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["id", key, *others])
        writer.writerows([number, text, *others.values()] for number, text in enumerate(texts))
    return path.read_bytes()


def written(folder: Path, kind: str, texts: list[str] = TEXTS) -> tuple[Path, bytes]:
    path = folder / f"texts.{kind}"
    if kind in ("csv", "tsv"):
        return path, csv_of(path, texts, delimiter="," if kind == "csv" else "\t")
    if kind == "json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        path.write_text(texts[1], encoding="utf-8")
    return path, path.read_bytes()


def test_the_documents_are_the_texts_plain_and_compressed(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, kind in enumerate(["csv", "tsv", "json", "jsonl", "md", "txt"]):
        with subtests.test(msg=kind):
            place = tmp_path / str(number)
            place.mkdir()
            path, content = written(place, kind)
            expected = EXPECTED if kind not in ("md", "txt") else EXPECTED[1:2]
            assert read(place, path) == expected
            for suffix, compress in COMPRESS.items():
                compressed = place / f"texts.{kind}{suffix}"
                compressed.write_bytes(compress(content))
                assert read(place, compressed) == expected
                two = place / f"members.{kind}{suffix}"  # as `cat a.gz b.gz` makes them
                two.write_bytes(compress(content[:7]) + compress(content[7:]))
                assert read(place, two) == expected


def test_one_json_object_is_one_document_and_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_bytes(b'\xef\xbb\xbf{"text": "one"}')
    (tmp_path / "two.csv").write_bytes(b'\xef\xbb\xbftext,n\r\none,1\r\n\r\n"two\r\nlines",2\r\n')
    assert read(tmp_path, tmp_path / "one.json") == [b"one"]
    assert read(tmp_path, tmp_path / "two.csv") == [b"one", b"two\r\nlines"]


def test_a_long_field_is_read(tmp_path: Path) -> None:
    long = "x" * 200_000  # more than the csv module takes by itself
    csv_of(tmp_path / "long.csv", [long])
    assert [len(text) for text in read(tmp_path, tmp_path / "long.csv", seq_length=300_000)] == [200_000]
    assert csv.field_size_limit() == 131_072


def test_what_lies_beside_a_dataset_is_not_read_with_its_folder(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "README.md").write_text("the card")
    (corpus / "dataset_info.json").write_text("{}")
    (corpus / "notes.md").write_text("notes")
    (corpus / "more.txt.gz").write_bytes(gzip.compress(b"more"))
    assert read(tmp_path, corpus) == [b"more", b"notes"]
    assert read(tmp_path, corpus / "README.md") == [b"the card"]


BAD: dict[str, tuple[bytes, str, str]] = {
    "no-header.csv": (b"a text,1\nmore,2\n", ":1: no column 'text'; the columns are 'a text', '1'", "text_key"),
    "asked.csv": (b"frage,antwort\na,b\n", ":1: no column 'text'", "data.train.columns: {prompt: KEY, completion: "),
    "ragged.csv": (b'text,n\none,1\n"two\nlines",2\na,b,3\n', ":5: 3 fields, and the first row has 2", "quotes"),
    "open.csv": (b'text\none\n"two\nthree\n', ":3: not CSV: unexpected end of data", "doubled"),
    "semicolons.csv": (b"id;text\n1;one\n", ":1: the fields are separated by ';'", "commas"),
    "twice.csv": (b"text,text\na,b\n", ":1: 2 columns are named 'text'", "name one"),
    "header.csv": (b"text,n\n", ": no row below the names of the columns", "remove it"),
    "empty.csv": (b"", ":1: the file is empty", "remove it"),
    "latin.csv": ("text\ncaf\xe9\n".encode("latin1"), ":2: not UTF-8: byte 0xe9 at offset 3 of the line", "UTF-8"),
    "lines.json": (b'{"text": "a"}\n{"text": "b"}\n', ":2: more than one JSON value", "data.train.format=jsonl"),
    "broken.json": (b'[{"text": "a"},\n {"text": }]', ":2: not JSON: Expecting value at column 11", "format=jsonl"),
    "strings.json": (b'["a"]', ": record 1: a JSON str, not an object", "a list of"),
    "keys.json": (b'[{"text": "a"}, {"body": "b"}]', ": record 2: no key 'text'; the keys are 'body'", "text_key=body"),
    "number.json": (b'[{"text": 5}]', ": record 1: 'text' holds a int, not a string", "text_key"),
    "half.json": (b'[{"text": "\\ud800"}]', ": record 1: half of a surrogate pair", "remove it"),
    "none.json": (b"[]", ": the list is empty", "remove the file"),
    "deep.json": (b"[" * 100_000, ": JSON nested too deeply", "remove"),
    "empty.md": (b"", ":1: the file is empty", "remove it"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 999)[:-11], ": the gz file is cut short", "copy the file"),
    "cut.txt.bz2": (bz2.compress(b"a" * 999)[:-5], ": the bz2 file is cut short", "copy the file"),
    "cut.txt.xz": (lzma.compress(b"a" * 999)[:-5], ": the xz file is cut short", "copy the file"),
    "cut.txt.zst": (zstd(b"a" * 999)[:-5], ": the zst file is cut short", "copy the file"),
    "no.txt.zst": (b"not compressed at all", ": not readable as zst: ", "copy the file"),
    "no.txt.gz": (b"not compressed at all", ": not readable as gz: Not a gzipped file", "copy the file"),
    "no.json.xz": (b"not compressed at all", ": not readable as xz: ", "copy the file"),
    "damaged.txt.gz": (gzip.compress(b"abc" * 99)[:-8] + bytes(8), ": not readable as gz: CRC check failed", "copy"),
    "rows.jsonl.gz": (gzip.compress(b'{"text": "a"}\n{"t'), ":2: not JSON: ", "one JSON object per line"),
}  # fmt: skip


def test_what_cannot_be_read_is_named_with_its_place(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, name in enumerate(BAD):
        with subtests.test(msg=name):
            place = tmp_path / str(number)
            place.mkdir()
            content, what, fix = BAD[name]
            path = place / name
            path.write_bytes(content)
            error = refusal(place, path)
            assert error.what.startswith(f"data.train: {path}{what}")
            assert fix in str(error.fix)
            assert not list((place / "cache").glob("stores/*/*"))


@pytest.mark.parametrize("name", ["a.pdf", "notes.gz", "notes.tar.gz", "a.docx"])
def test_a_binary_is_never_advised_to_be_read_as_text(tmp_path: Path, name: str) -> None:
    content = b"%PDF-1.7\n\x00\xff\xfe" * 99
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    error = refusal(tmp_path, tmp_path / name)
    assert "no format reads the suffix" in error.what and "it is not text" in error.what
    assert "format=txt" not in str(error)
    (tmp_path / "forced.bin").write_bytes(content)
    forced = refusal(tmp_path, [{"path": str(tmp_path / "forced.bin"), "format": "txt"}])
    assert "not UTF-8" in forced.what and "iconv" not in str(forced)


def test_a_compressed_text_without_a_kind_can_be_told_one(tmp_path: Path) -> None:
    (tmp_path / "notes.gz").write_bytes(gzip.compress(b"some notes"))
    assert "data.train.format=txt" in str(refusal(tmp_path, tmp_path / "notes.gz").fix)
    assert read(tmp_path, [{"path": str(tmp_path / "notes.gz"), "format": "txt"}]) == [b"some notes"]


@cache
def bomb_of(suffix: str) -> bytes:
    return COMPRESS[suffix](bytes(2**26))


def test_a_bomb_is_refused_in_little_memory(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_ALWAYS_BYTES", 2**20)
    for kind, suffix in product(["txt", "jsonl", "json", "csv"], COMPRESS):
        with subtests.test(kind=kind, suffix=suffix):
            path = tmp_path / f"bomb.{kind}{suffix}"
            path.write_bytes(bomb_of(suffix))
            most = max(2**20, 200 * path.stat().st_size)
            tracemalloc.start()
            try:
                error = refusal(tmp_path, path)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert "expands to more than 200 times its size" in error.what and str(path) in error.what
            assert peak < 3 * most + 2**24  # 2**23: what xz looks back on


def test_a_line_and_a_json_file_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compression, json_file):
        monkeypatch.setattr(module, "MOST_BYTES", 2**20)
    for kind, what in (("jsonl", ":1: a line of more than 1 MiB"), ("json", ": a .json file of more than 1 MiB")):
        path, _ = written(tmp_path, kind, ["x" * 2**20])
        assert what in refusal(tmp_path, path).what


def test_zst_needs_pyarrow_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(b'{"text": "one"}\n'))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = refusal(tmp_path, tmp_path / "a.jsonl.zst")
    assert "reading .zst needs pyarrow" in error.what and error.fix == "pip install 'fivefold[parquet]'"


def test_the_sample_of_a_trained_tokenizer_is_of_the_expanded_text(tmp_path: Path) -> None:
    texts = [text for text in random_texts(0, 211) if text]
    plain, content = written(tmp_path, "jsonl", texts)
    (tmp_path / "texts.jsonl.gz").write_bytes(gzip.compress(content))
    first, other = (
        prepare(config_for(path, tokenizer="train:300"), cache=tmp_path / "cache").tokenizer.folder / "tokenizer.json"
        for path in (plain, tmp_path / "texts.jsonl.gz")
    )
    assert first != other and first.read_bytes() == other.read_bytes()
