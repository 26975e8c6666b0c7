"""The tokenizers: built in, trained, and of a Hugging Face folder; each a folder that `transformers` loads."""

import gzip
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig

from fivefold.core.errors import RunFailed, UserError
from fivefold.data import PreparedData, formats, prepare, tokenizer, tokenizer_probe
from fivefold.data.source import Source, resolve
from fivefold.data.store import _dtype
from tests.data.helpers import config_for, pieces, prepare_texts, random_texts, whole, write_jsonl
from tests.data.test_compressed import COMPRESS, csv_of

READ_APART = tokenizer._read_apart  # before `tests/conftest.py` reads them here
TEXT = "def f(x):\n\treturn 'caf\xe9 \U0001f600'  # \x00 \r\n  <|endoftext|x\n"


def trained(folder: Path, size: int = 331, **changes: Any) -> PreparedData:
    return prepare_texts(folder, random_texts(0, 211), tokenizer=f"train:{size}", **changes)


@pytest.mark.parametrize("name", ["byte", "train:331"])
def test_the_folder_loads_in_transformers_and_gives_back_every_text(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    data = prepare_texts(tmp_path, [*random_texts(0, 211), TEXT], tokenizer=name, packing=False, seq_length=997)
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer.folder)
    assert len(tokenizer) == data.tokenizer.vocab_size
    assert tokenizer.eos_token_id == data.tokenizer.eos_token_id
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([*ids, data.tokenizer.eos_token_id], skip_special_tokens=True) == TEXT
    read = [tokens for batch in whole(data.train) for tokens, _ in pieces(batch)]
    assert read[-1] == [*ids, data.tokenizer.eos_token_id]  # what training reads is what transformers encodes


def test_byte_is_the_bytes_and_eos(tmp_path: Path) -> None:
    data = prepare_texts(tmp_path, ["a" * 3], validation=0)
    assert (data.tokenizer.vocab_size, data.tokenizer.eos_token_id) == (257, 256)
    everything = bytes(range(128)).decode() + "".join(map(chr, range(128, 2000)))
    (tmp_path / "all.txt").write_bytes(everything.encode())
    rows = prepare(config_for(tmp_path / "all.txt", seq_length=8191), cache=tmp_path / "cache").train
    assert bytes(pieces(whole(rows)[0])[0][0][:-1]) == everything.encode()


def test_training_has_the_size_asked_and_is_the_same_every_time(tmp_path: Path) -> None:
    first = trained(tmp_path / "a").tokenizer.folder if (tmp_path / "a").mkdir() is None else None
    again = trained(tmp_path / "b").tokenizer.folder if (tmp_path / "b").mkdir() is None else None
    assert first and again and first != again
    assert (first / "tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()
    assert trained(tmp_path / "a").tokenizer.vocab_size == 331
    assert trained(tmp_path / "a", 332).tokenizer.vocab_size == 332


def test_training_needs_room_for_the_bytes(tmp_path: Path) -> None:
    from fivefold.data.tokenizer import find_tokenizer

    with pytest.raises(UserError, match="needs 257 entries or more"):
        find_tokenizer("train:256", model="", corpus=[], root=tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with a tokenizer that would add a BOS, cut and pad if it were let."""
    target = tmp_path / "model"
    shutil.copytree(trained(tmp_path).tokenizer.folder, target)
    facts = json.loads((target / "tokenizer.json").read_text())
    facts["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    facts["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    facts["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (target / "tokenizer.json").write_text(json.dumps(facts))
    return target


@pytest.mark.parametrize("way", ["auto", "path", "file"])
def test_a_hugging_face_folder_neither_cuts_nor_pads(tmp_path: Path, folder: Path, way: str) -> None:
    (folder / "config.json").write_text("{}")
    named: dict[str, Any] = {
        "auto": {"tokenizer": "auto", "model": folder},
        "path": {"tokenizer": folder},
        "file": {"tokenizer": "auto", "model": folder / "config.json"},
    }[way]
    data = prepare_texts(tmp_path, random_texts(0, 211), packing=False, bos=False, **named)
    assert data.tokenizer.folder == folder
    plain = trained(tmp_path, packing=False)
    assert [b.input_ids.tolist() for b in whole(data.train)] == [b.input_ids.tolist() for b in whole(plain.train)]


@pytest.mark.parametrize(
    ("tokenizer_config", "config", "expected"),
    [
        ({"eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}, {"eos_token_id": 5}, 0),
        ({"eos_token": None}, {"eos_token_id": 5}, 5),
        ({}, {"eos_token_id": [7, 5]}, 7),
    ],
)
def test_eos_is_what_the_tokenizer_says_else_the_model(
    tmp_path: Path, folder: Path, tokenizer_config: Any, config: Any, expected: int
) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps(config))
    assert prepare_texts(tmp_path, ["some text"], tokenizer=folder).tokenizer.eos_token_id == expected


def test_one_tokenizer_with_two_ends_gives_two_sets_of_tokens(tmp_path: Path, folder: Path) -> None:
    """What lies in the cache was made with an EOS, which is no part of tokenizer.json."""
    last, fingerprints = [], []
    (folder / "tokenizer_config.json").write_text("{}")
    for eos in (5, 7, 400):
        (folder / "config.json").write_text(json.dumps({"eos_token_id": eos}))
        data = prepare_texts(tmp_path, ["some text"], tokenizer=folder)
        last.append((pieces(whole(data.train)[0])[0][1][-1], data.tokenizer.vocab_size))
        fingerprints.append(data.fingerprint)
    assert last == [(5, 331), (7, 331), (400, 401)] and len(set(fingerprints)) == 3


def test_a_tokenizer_without_eos_or_without_a_file_is_refused(tmp_path: Path, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="has no EOS token, and every document must end with one"):
        prepare_texts(tmp_path, ["text"], tokenizer=folder)
    (folder / "tokenizer.json").write_text("{]")
    with pytest.raises(UserError, match="not a tokenizer"):
        prepare_texts(tmp_path, ["text"], tokenizer=folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="holds no tokenizer"):
        prepare_texts(tmp_path, ["text"], tokenizer=folder)
    with pytest.raises(UserError, match="no folder 'nowhere'"):
        prepare_texts(tmp_path, ["text"], tokenizer="nowhere")


def test_what_is_wrong_with_the_config_is_not_said_of_the_tokenizer(tmp_path: Path, folder: Path) -> None:
    for config in ("", "[]", '{"a":' * 5000 + "1" + "}" * 5000):
        (folder / "config.json").write_text(config)
        with pytest.raises(UserError, match=r"config\.json (cannot be read|holds no JSON object)"):
            prepare_texts(tmp_path, ["text"], tokenizer=folder)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": "48"}')
    with pytest.raises(Exception, match="hidden_size") as caught:
        AutoConfig.from_pretrained(folder)
    assert tokenizer_probe._said(caught.value, str(folder)).startswith("its config.json: StrictDataclass")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert tokenizer_probe._said(ValueError("x"), str(folder)) == "ValueError: x"


def test_a_probe_that_someone_ended_says_nothing_of_the_file(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.CompletedProcess([], -signal.SIGKILL, "", "")
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")  # none that was tried before
    monkeypatch.setattr(tokenizer, "_read_apart", READ_APART)
    monkeypatch.setattr(tokenizer.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(RunFailed, match="ended by SIGKILL") as caught:
        prepare_texts(tmp_path, ["text"], tokenizer=folder)
    assert "MiB" not in str(caught.value) and caught.value.fix == "start the command again"


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="a process elsewhere is not told")
def test_the_probe_ends_with_the_process_that_waits_for_it(tmp_path: Path, folder: Path) -> None:
    probe = [sys.executable, "-P", tokenizer_probe.__file__, str(folder), str(tmp_path / "out"), str(2**30), ""]
    code = f"import subprocess; started = subprocess.Popen({probe}); print(started.pid, flush=True); started.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = Path("/proc", parent.stdout.readline().strip())
        while "numpy" not in (process / "maps").read_text():  # it has not begun to import
            time.sleep(0.01)
        parent.kill()
    end = time.monotonic() + 10
    while process.exists() and "Z" not in (process / "stat").read_text().split() and time.monotonic() < end:
        time.sleep(0.01)
    assert not (tmp_path / "out").exists()


def test_a_text_that_the_tokenizer_fails_at_is_named(tmp_path: Path, folder: Path) -> None:
    """A regular expression that gives up is a panic of Rust, and no `Exception`."""
    facts = json.loads((folder / "tokenizer.json").read_text())
    greedy = {"type": "Split", "pattern": {"Regex": "(a+)+(b+)+$"}, "behavior": "Isolated", "invert": False}
    facts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [greedy, facts["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    endless = "a" * 40 + "b" * 40 + "."
    with pytest.raises(UserError) as caught:
        prepare_texts(tmp_path, ["a text", endless, "another"], tokenizer=folder)
    assert f"the tokenizer in {folder} fails at the text 'aaaa" in caught.value.what and caught.value.fix
    assert prepare_texts(tmp_path, ["a text"], tokenizer=folder).counts.documents == 1
    with pytest.raises(KeyboardInterrupt), tokenizer.encoding(folder, None, ["x"]):
        raise KeyboardInterrupt


def test_tokens_are_as_wide_as_the_vocabulary_needs() -> None:
    assert [_dtype(size).str for size in (2**15 + 1, 2**16, 2**16 + 1)] == ["<u2", "<u2", "<u4"]


def test_a_large_vocabulary_takes_wider_tokens(tmp_path: Path, folder: Path) -> None:
    facts = json.loads((folder / "tokenizer.json").read_text())
    facts["added_tokens"].append({**facts["added_tokens"][0], "id": 70_001, "content": "<|far|>"})
    facts["model"]["vocab"]["<|far|>"] = 70_001
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|far|>"}))
    data = prepare_texts(tmp_path, ["abc"], tokenizer=folder)
    assert (data.tokenizer.vocab_size, data.tokenizer.eos_token_id) == (70_002, 70_001)
    assert pieces(whole(data.train)[0])[0][1][-1] == 70_001


def test_unused_text_does_not_change_the_trained_tokenizer(tmp_path: Path) -> None:
    """The tokenizer is trained on the training sources: a validation list leaves it alone."""
    held = write_jsonl(tmp_path / "held.jsonl", ["zzzz"])
    assert trained(tmp_path).tokenizer.folder == trained(tmp_path, validation=[{"path": str(held)}]).tokenizer.folder


def test_the_trained_tokenizer_is_that_of_the_texts_in_every_format(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed file has far fewer bytes than its text has characters."""
    texts = [" ".join(text.split("c")) * 3 for text in random_texts(3, 53, 997)]
    plain = write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "a.csv").write_bytes(csv_of(tmp_path / "a.csv", texts))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="zstd")
    for suffix, compress in COMPRESS.items():
        (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(plain.read_bytes()))
    for characters in (4_000_000, 9_000):
        monkeypatch.setattr(tokenizer, "_SAMPLE_CHARACTERS", characters)
        learned = {}
        for path in sorted(tmp_path.glob("a.*")):
            info = prepare(config_for(path, tokenizer="train:400"), cache=tmp_path / "cache").tokenizer
            learned[path.name] = (info.folder / "tokenizer.json").read_bytes()
        for name, found in learned.items():
            with subtests.test(msg=f"{name}, {characters}"):
                assert found == learned["a.jsonl"]


def test_a_sample_is_shared_by_the_texts_of_packed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_SAMPLE_CHARACTERS", 9_000)
    contents = {"a": ["x y " * 3_000] * 2, "b": random_texts(0, 101, 997)}
    for name, texts in contents.items():
        plain = write_jsonl(tmp_path / f"{name}.jsonl", texts)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet", compression="zstd")
    sizes = {name: sum(map(len, texts)) for name, texts in contents.items()}
    for kind in ("jsonl", "jsonl.gz", "parquet"):
        files = resolve(Source(f"{tmp_path}/*.{kind}", "data.train"), formats.discover(), tmp_path)
        sample = "".join(tokenizer._sample([files]))
        of_first = sample.rpartition("x y ")[0]
        assert abs(len(sample) - 9_000) < 200, kind
        assert len(of_first) / len(sample) == pytest.approx(sizes["a"] / sum(sizes.values()), rel=0.02), kind
    learned = [
        prepare(config_for(f"{tmp_path}/*.{kind}", tokenizer="train:400"), cache=tmp_path / "cache").tokenizer.folder
        for kind in ("jsonl", "jsonl.gz", "parquet")
    ]
    assert len(set(learned)) == 3
    assert len({(folder / "tokenizer.json").read_bytes() for folder in learned}) == 1
