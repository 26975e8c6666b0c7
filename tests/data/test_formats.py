"""What can be read, in which order, and what is said about what cannot."""

import errno
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from fivefold.config import load_config
from fivefold.core.errors import UserError
from fivefold.data import PreparedData, formats, prepare
from fivefold.data.source import Source, resolve
from tests.data.helpers import byte_tokens, config_for, pieces, prepare_texts, random_texts, whole, write_jsonl

SHAKESPEARE = Path(__file__).parents[2] / "../shared/data/tinyshakespeare.txt"


def documents(data: PreparedData) -> list[bytes]:
    """The documents that training reads, in order (each shorter than a row, not packed)."""
    return [bytes(tokens[:-1]) for batch in whole(data.train) for tokens, _ in pieces(batch)]


def read(folder: Path, train: Any, **changes: Any) -> list[bytes]:
    return documents(prepare(config_for(train, packing=False, **changes), cache=folder / "cache"))


def refusal(folder: Path, train: Any, **changes: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        prepare(config_for(train, **changes), cache=folder / "cache")
    assert caught.value.exit_code == 2 and caught.value.fix
    return caught.value


def test_a_folder_is_read_below_itself_sorted_with_formats_mixed(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "b").mkdir(parents=True)
    (corpus / ".hidden").mkdir()
    (corpus / "c.txt").write_text("last")
    write_jsonl(corpus / "b" / "two.jsonl", ["second", "third"])
    (corpus / "a.txt").write_text("first")
    (corpus / ".hidden" / "x.txt").write_text("never")
    (corpus / "README.md").write_text("never")
    data = prepare(config_for(corpus, packing=False), cache=tmp_path / "cache")
    assert documents(data) == [b"first", b"second", b"third", b"last"]
    assert (data.counts.files, data.counts.files_left_out, data.counts.documents) == (3, 1, 4)
    assert "1 file of an unknown kind left out" in data.counts.lines()[-1]


def test_links_in_a_folder_are_followed_and_each_folder_is_read_once(tmp_path: Path) -> None:
    for name in ("corpus", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"of {name}")
    (tmp_path / "corpus" / "part2").symlink_to("../elsewhere")
    (tmp_path / "elsewhere" / "round").symlink_to("../corpus")
    assert read(tmp_path, tmp_path / "corpus") == [b"of corpus", b"of elsewhere"]
    (tmp_path / "corpus" / "gone.txt").symlink_to("nowhere.txt")
    for named in (tmp_path / "corpus", tmp_path / "corpus" / "*.txt"):
        assert "nowhere.txt, which does not exist" in refusal(tmp_path, named).what


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus" / "shut").mkdir(parents=True)
    (tmp_path / "corpus" / "a.txt").write_text("text")
    scan = os.scandir

    def forbid(folder: str) -> Any:
        if str(folder).endswith("shut"):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", forbid)
    assert "shut cannot be read: Permission denied" in refusal(tmp_path, tmp_path / "corpus").what


@pytest.mark.skipif(sys.platform != "linux", reason="names a file of /proc")
def test_a_file_of_an_unknown_kind_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "/proc/self/mem cannot be read: Input/output error" in refusal(tmp_path, "/proc/self/mem").what


def test_a_folder_that_a_glob_matches_without_its_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus" / "part2").mkdir(parents=True)
    (tmp_path / "corpus" / "empty").mkdir()
    for name in ("a.txt", "part2/b.txt"):
        (tmp_path / "corpus" / name).write_text(name)
    assert "part2 and none of the files in it" in refusal(tmp_path, tmp_path / "corpus" / "*").what
    assert read(tmp_path, tmp_path / "corpus" / "**") == [b"a.txt", b"part2/b.txt"]


def test_a_path_that_is_empty_is_not_the_current_folder(subtests: pytest.Subtests) -> None:
    for key in ("data.train", "data.validation", "model.name_or_path", "tokenizer.name_or_path"):
        with subtests.test(msg=key), pytest.raises(UserError, match=key):
            load_config(None, [f"{key}=''"])


def test_globs_and_forced_formats(tmp_path: Path) -> None:
    for name in ("b.rst", "a.rst", "c.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    assert read(tmp_path, str(tmp_path / "*.txt")) == [b"text of c.txt"]
    forced = [{"path": str(tmp_path / "*.rst"), "format": "txt"}]
    assert read(tmp_path, forced) == [b"text of a.rst", b"text of b.rst"]
    assert "no format reads the suffix '.rst'" in refusal(tmp_path, str(tmp_path / "*.rst")).what


def test_text_is_kept_as_it_is_but_for_a_byte_order_mark(tmp_path: Path) -> None:
    text = "\ufeffa\r\nb\x00\u2028c \U0001f600\n\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x\\ud83d\\ude00"}\r\n\r\n{"text": "y"}')
    assert read(tmp_path, tmp_path / "a.txt") == [text.removeprefix("\ufeff").encode()]
    assert read(tmp_path, tmp_path / "b.jsonl") == ["x\U0001f600".encode(), b"y"]


def test_a_token_store_is_a_source(tmp_path: Path) -> None:
    texts = random_texts(0, 31, longest=59)
    from_text = prepare_texts(tmp_path, texts, packing=False)
    (store,) = (tmp_path / "cache" / "stores").glob("*/meta.json")
    assert read(tmp_path, store.parent) == documents(from_text)
    refused = refusal(tmp_path, store.parent, tokenizer=_other_tokenizer(tmp_path))
    assert "was made with another tokenizer (257 entries; the run's has 300)" in refused.what
    (store.parent / "tokens.bin").write_bytes(b"short")
    assert "is damaged" in refusal(tmp_path, store.parent).what


def _other_tokenizer(folder: Path) -> Path:
    text = write_jsonl(folder / "other.jsonl", random_texts(1, 211))
    return prepare(config_for(text, tokenizer="train:300"), cache=folder / "cache").tokenizer.folder


def test_a_token_store_cannot_train_a_tokenizer(tmp_path: Path) -> None:
    prepare_texts(tmp_path, ["text"])
    (store,) = (tmp_path / "cache" / "stores").glob("*/meta.json")
    assert "holds no text to train a tokenizer on" in refusal(tmp_path, store.parent, tokenizer="train:300").what


def test_a_new_format_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "poem.py").write_text(
        "from dataclasses import dataclass\n"
        "from fivefold.data.source import Format\n"
        "@dataclass(frozen=True)\n"
        "class Poem(Format):\n"
        "    def documents(self, path, source):\n"
        "        yield from path.read_text().split('---')\n"
        "FORMAT = Poem(name='poem', suffixes=('.poem',))\n"
    )
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(plugins)])
    (tmp_path / "my.poem").write_text("one---two")
    assert read(tmp_path, tmp_path / "my.poem") == [b"one", b"two"]


BAD_ROWS = {
    b'{"body": "a", "id": "1"}': ("no key 'text'; the keys are 'body', 'id'", "add data.train.text_key=body"),
    b'{"n": 1}': ("no key 'text'; the keys are 'n'", "data.train.text_key names the key"),
    b"{}": ("no key 'text'; the keys are none at all", "text_key"),
    b'{"text": 5}': ("'text' holds a int, not a string", "text_key"),
    b'{"text": null, "raw": "x"}': ("'text' holds null, not a string", "add data.train.text_key=raw"),
    b'["a"]': ("a JSON list, not an object", "per line"),
    b'{"text": "a"': ("not JSON: Expecting ',' delimiter at column 13", "one JSON object per line"),
    b'{"text": "\xff"}': ("not UTF-8: byte 0xff at offset 10 of the row", "UTF-8"),
    b'{"text": "a\\ud800"}': ("half of a surrogate pair, \\ud800, at character 1", "remove it"),
}


@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_bad_record_names_file_and_row(tmp_path: Path, row: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + row + b'\n{"text": "fine"}\n')
    what, fix = BAD_ROWS[row]
    error = refusal(tmp_path, path)
    assert error.what == f"data.train: {path}:3: {what}"
    assert fix in str(error.fix)
    assert not list((tmp_path / "cache").glob("stores/*/*"))


def test_the_text_key_is_followed_and_named_with_its_source(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", ["a", "b"], key="body")
    bad = write_jsonl(tmp_path / "bad.jsonl", ["a", "b"], key="txet")
    assert read(tmp_path, [{"path": str(good), "text_key": "body"}]) == [b"a", b"b"]
    held = [{"path": str(good), "text_key": "body"}, {"path": str(bad), "text_key": "body"}]
    error = refusal(tmp_path, held[:1], validation=held)
    assert error.what.startswith(f"data.validation[1]: {bad}:1: no key 'body'")
    assert error.fix == "add data.validation.1.text_key=txet"


@pytest.mark.parametrize("key", ["body", "yes", "1", "a key", "it's: x", "\U0001f600"])
@pytest.mark.parametrize("sources", [1, 2])
def test_the_fix_works_when_it_is_typed(tmp_path: Path, key: str, sources: int) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", ["a", "b"], key=key)
    good = write_jsonl(tmp_path / "good.jsonl", ["c"])
    given = [str(good), str(bad)][-sources:]
    error = refusal(tmp_path, given)
    (typed,) = shlex.split(str(error.fix).removeprefix("add "))
    (tmp_path / "run.yaml").write_text(json.dumps({"data": {"train": given}}))
    read_again = load_config(tmp_path / "run.yaml", [typed]).data.train[-1]
    assert (read_again.path, read_again.text_key) == (str(bad), key)


def test_bad_text_names_file_line_and_byte(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("one\ntwo\ncaf\xe9\n".encode("latin1"))
    assert f"{latin}:3: not UTF-8: byte 0xe9 at byte offset 11" in refusal(tmp_path, latin).what
    latin.write_text("as PowerShell writes it", encoding="utf-16")
    assert "if it is UTF-16: iconv -f utf-16 -t utf-8 latin.txt" in str(refusal(tmp_path, latin).fix)


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_an_empty_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "good.txt").write_text("fine")
    assert f"{tmp_path / name}:1: the file is empty" in refusal(tmp_path, tmp_path).what


@pytest.mark.parametrize("name", ["a.gguf", "a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet", "a"])
def test_the_weights_of_a_model_are_named(tmp_path: Path, name: str) -> None:
    """Whatever the file is called. A text about such files is a text."""
    (tmp_path / name).write_bytes(b"GGUF\x03\0\0\0" + bytes(range(256)))
    error = refusal(tmp_path, tmp_path / name)
    assert f"{tmp_path / name}: a GGUF file, which holds the weights of a model" in error.what
    assert "model.name_or_path" in str(error.fix)
    (tmp_path / "b.txt").write_text("GGUF: a format of files")
    assert read(tmp_path, tmp_path / "b.txt") == [b"GGUF: a format of files"]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.xyz").write_text("text")
    (tmp_path / "nothing").mkdir()
    cases = {
        "missing.txt": "missing.txt does not exist",
        "*.jsonl": "*.jsonl matches no file that can be read",
        "nothing": "matches no file that can be read",
        "odd.xyz": "no format reads the suffix '.xyz' (known: .csv, .tsv, .ds, .json, .jsonl, .ndjson, .parquet, .txt",
    }
    for path, what in cases.items():
        assert what in refusal(tmp_path, tmp_path / path).what
    odd = [{"path": str(tmp_path / "odd.xyz"), "format": "xls"}]
    assert "data.train.format: there is no format 'xls'" in refusal(tmp_path, odd).what


def test_texts_without_a_target_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", ""])
    assert "no document has two tokens or more (2 documents)" in refusal(tmp_path, path).what


def test_the_standard_library_is_the_same_files_every_time_and_no_tests(tmp_path: Path) -> None:
    source, known = Source("python-stdlib", "data.train[0]"), formats.discover()
    first, again = (resolve(source, known, tmp_path) for _ in range(2))
    assert first == again
    names = [path.as_posix() for path, _ in first.files]
    assert len(names) > 300 and any(name.endswith("/asyncio/tasks.py") for name in names)
    assert not any(part in name for name in names for part in ("/test/", "/idlelib/", "site-packages", "/encodings/"))
    texts = [text for path, form in first.files for text in form.documents(path, source)]
    assert len(texts) == len(names) and 2_000_000 < sum(map(len, texts)) < 20_000_000


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="the text is not at hand")
def test_a_long_text_is_one_document(tmp_path: Path) -> None:
    data = prepare(config_for(SHAKESPEARE, seq_length=1021, validation=0.01), cache=tmp_path / "cache")
    assert data.validation is not None
    assert (data.counts.documents, data.counts.tokens) == (1, len(byte_tokens(SHAKESPEARE.read_text())))
    assert data.counts.train.tokens + data.validation.counts.tokens >= data.counts.tokens - 3


def test_a_pipe_or_a_device_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    os.mkfifo(folder / "a.txt")
    for path in (folder / "a.txt", Path(os.devnull)):
        with pytest.raises(UserError, match="is no file but a pipe or a device"):
            prepare(config_for(path), cache=tmp_path / "cache")
    (folder / "b.txt").write_text("a text")
    assert read(tmp_path, folder) == [b"a text"]


def test_records_inside_of_an_object_are_not_one_conversation(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"instruction": "Q", "output": "A"}] * 2}))
    with pytest.raises(UserError, match="its records are in a list under 'data'") as refused:
        prepare(config_for(path), cache=tmp_path / "cache")
    assert refused.value.fix == "write a record per line: jq -c '.data[]' set.json > set.jsonl"


def test_a_folder_of_a_dataset_is_not_trained_with_its_test_files(tmp_path: Path) -> None:
    """As the hub lays one out. Where no file is one to train on, the names say nothing."""
    folder = tmp_path / "set"
    for name in ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "some words"}\n')
    with pytest.raises(UserError, match=r"set holds data/test-00000-of-00001\.jsonl beside data/train-0") as refused:
        prepare(config_for(folder), cache=tmp_path / "cache")
    assert refused.value.fix.startswith(f"name the files to train on, such as {folder}/data/*train*.jsonl")
    named = prepare(config_for(folder / "data" / "*train*.jsonl"), cache=tmp_path / "cache")
    (folder / "data/train-00000-of-00001.jsonl").rename(folder / "data/cases.jsonl")
    assert len(documents(prepare(config_for(folder), cache=tmp_path / "cache"))) == 2 * len(documents(named))
