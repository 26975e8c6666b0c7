"""Token files of other engines: the same documents and targets, and what is said about files that are not whole.

The files are written here byte by byte, as their formats say; `tests/data/test_token_writers.py` writes them with the
packages of those engines, where they are installed.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import Subtests

from fivefold.data import PreparedData, prepare
from tests.data.helpers import config_for, pieces, prepare_texts, random_texts, whole, write_jsonl
from tests.data.test_bos import BOS, EOS, tokenizer_folder
from tests.data.test_formats import refusal
from tests.training.bodies import column, run_file, train

CODES = {"<u1": 1, "<i4": 4, "<i8": 5, "<u2": 8}


def documents(data: PreparedData) -> list[tuple[list[int], list[int]]]:
    """The tokens and the targets of each document, in order."""
    return [piece for batch in whole(data.train) for piece in pieces(batch)]


def ids_of(texts: Sequence[str], eos: bool = True) -> list[list[int]]:
    return [[*text.encode(), *[EOS] * eos] for text in texts]


def read(folder: Path, train: Any, **changes: Any) -> PreparedData:
    return prepare(config_for(train, packing=False, **changes), cache=folder / "cache")


def megatron(
    prefix: Path, ids: Sequence[Sequence[int]], dtype: str = "<u2", bounds: Sequence[int] | None = None,
    version: int = 1, code: int | None = None, tail: bytes = b"",
) -> Path:  # fmt: skip
    """Write an indexed dataset of these sequences; returns its .bin."""
    lengths = np.array([len(sequence) for sequence in ids], "<i4")
    offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    ends = np.array(range(len(ids) + 1) if bounds is None else bounds, "<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code or CODES[dtype], len(ids), len(ends))
    tokens = [np.array(sequence, dtype).tobytes() for sequence in ids]
    Path(f"{prefix}.bin").write_bytes(b"".join(tokens))
    Path(f"{prefix}.idx").write_bytes(b"".join([header, *(a.tobytes() for a in (lengths, offsets, ends)), tail]))
    return Path(f"{prefix}.bin")


TEXTS = [text for text in random_texts(3, 31, longest=59) if len(text.encode()) > 1]


@pytest.mark.parametrize(("dtype", "eos"), [("<u2", True), ("<i4", False), ("<i8", True)])
def test_megatron_documents_are_those_of_the_texts(tmp_path: Path, dtype: str, eos: bool) -> None:
    expected = prepare_texts(tmp_path, TEXTS, packing=False)
    path = megatron(tmp_path / "corpus", ids_of(TEXTS, eos), dtype)
    data = read(tmp_path, path)
    assert documents(data) == documents(expected) and len(documents(data)) == len(TEXTS)
    (line,) = (line for line in data.counts.lines() if line.startswith("token ids"))
    assert f"{len(TEXTS)} documents, " in line
    assert (f"all of which end in EOS ({EOS})" if eos else f"EOS ({EOS}) added to {len(TEXTS)}") in line


def test_megatron_is_named_by_its_prefix_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    megatron(tmp_path / "tokens" / "corpus", ids_of(TEXTS))
    named = ["corpus", "corpus.bin", "corpus.idx", "*.bin", "*", ""]
    found = [read(tmp_path, str(tmp_path / "tokens" / name)) for name in named]
    assert all(documents(data) == documents(found[0]) and data.counts.files_left_out == 0 for data in found)


def test_megatron_sequences_of_a_document_are_joined(tmp_path: Path) -> None:
    texts = ["one. two", "three", "four. five. six"]
    sentences = [list(part.encode()) for part in ("one", ". two", "three", "four", ". five", ". six")]
    data = read(tmp_path, megatron(tmp_path / "corpus", sentences, bounds=[0, 2, 3, 6]))
    assert documents(data) == documents(prepare_texts(tmp_path, texts, packing=False))
    alone = read(tmp_path, megatron(tmp_path / "alone", sentences, bounds=[0]))
    assert [tokens for tokens, _ in documents(alone)] == [[*sentence, EOS] for sentence in sentences]


def test_documents_without_tokens_predict_nothing(tmp_path: Path) -> None:
    data = read(tmp_path, megatron(tmp_path / "corpus", [[97, 98, EOS], [], [EOS], [99, EOS]]))
    assert [tokens for tokens, _ in documents(data)] == [[97, 98, EOS], [99, EOS]]
    assert data.counts.documents == 4 and "2 pieces of a single token left out" in data.counts.lines()[-1]


def test_ids_that_the_tokenizer_does_not_have_are_named(tmp_path: Path) -> None:
    path = megatron(tmp_path / "corpus", [[1, 2], [3, 257, 4]])
    refused = refusal(tmp_path, path)
    assert f"{path}: document 2: token 2 is 257" in refused.what and "ids 0 to 256" in refused.what
    assert "token 1 is -1" in refusal(tmp_path, megatron(tmp_path / "less", [[-1, 2]], "<i4")).what


def test_token_ids_cannot_train_a_tokenizer_and_have_no_columns(tmp_path: Path) -> None:
    path = megatron(tmp_path / "corpus", [[1, 2]])
    assert "no text to train a tokenizer on" in refusal(tmp_path, path, tokenizer="train:300").what
    assert "text_key is of records" in refusal(tmp_path, [{"path": str(path), "text_key": "x"}]).what


def test_megatron_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    def said(**changes: Any) -> str:
        return refusal(tmp_path, megatron(tmp_path / "corpus", [[1, 2], [3]], **changes)).what

    assert "an index of version 2" in said(version=2)
    assert "dtype code 6" in said(code=6)
    assert "multimodal" in said(tail=b"\0\1")
    assert "the index has 83 bytes, not the 82 of 2 sequences" in said(tail=b"\0")
    assert "not the 2 sequences in order" in said(bounds=[0, 1])
    assert "not the 2 sequences in order" in said(bounds=[0, 2, 1, 2])
    assert "6 bytes, and its .idx has 16 bytes of tokens (int64)" in said(code=5)
    for name, message in {"corpus.bin": "bytes, and its .idx", "corpus.idx": "the index is cut short"}.items():
        path = megatron(tmp_path / "corpus", [[1, 2], [3]])
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:5] if "bin" in name else b"MMIDIDX\0\0\1")
        assert message in refusal(tmp_path, path).what


def test_bos_is_put_in_front_where_it_is_missing(tmp_path: Path) -> None:
    tokenizer = tokenizer_folder(tmp_path, template=True)
    path = megatron(tmp_path / "corpus", [[97, EOS], [BOS, 98]])
    data = read(tmp_path, path, tokenizer=tokenizer)
    assert [tokens for tokens, _ in documents(data)] == [[BOS, 97, EOS], [BOS, 98, EOS]]
    assert "EOS (256) added to 1; BOS added to 1" in data.counts.lines()[-1]
    data = read(tmp_path, path, tokenizer=tokenizer, bos=False)
    assert [tokens for tokens, _ in documents(data)] == [[97, EOS], [BOS, 98, EOS]]


def datatrove(
    path: Path, ids: Sequence[Sequence[int]], width: int = 2, metadata: str = "", loss: Sequence[int] = ()
) -> Path:
    """Write a tokenised file of these documents."""
    tokens = [token for document in ids for token in document]
    path.write_bytes(np.array(tokens, f"<u{width}").tobytes())
    Path(f"{path}.index").write_bytes(np.cumsum([len(document) for document in ids], dtype="<u8").tobytes())
    for part, content in {"metadata": metadata.encode(), "loss": bytes(loss)}.items():
        Path(f"{path}.{part}").unlink(missing_ok=True)
        if content:
            Path(f"{path}.{part}").write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("width", "eos", "metadata"), [(2, True, "gpt2|2\n9\n9 T"), (4, False, "gpt2|4"), (4, True, "")]
)
def test_datatrove_documents_are_those_of_the_texts(tmp_path: Path, width: int, eos: bool, metadata: str) -> None:
    (tmp_path / "tokens").mkdir()
    path = datatrove(tmp_path / "tokens" / "0_tokens.ds", ids_of(TEXTS, eos), width, metadata)
    for named in (path, f"{path}.index", tmp_path / "tokens"):
        data = read(tmp_path, named)
        assert documents(data) == documents(prepare_texts(tmp_path, TEXTS, packing=False))
        assert ("made with the tokenizer gpt2, and the run's is in" in line_of(data)) == bool(metadata)
        assert data.counts.files_left_out == 0


def line_of(data: PreparedData) -> str:
    (line,) = (line for line in data.counts.lines() if line.startswith("token ids"))
    return line


def test_the_tokenizer_that_is_named_may_be_the_runs(tmp_path: Path) -> None:
    tokenizer = tokenizer_folder(tmp_path, template=False)
    data = read(tmp_path, datatrove(tmp_path / "a.ds", [[1, 2, EOS]], 2, f"{tokenizer}|2"), tokenizer=tokenizer)
    assert "made with" not in line_of(data) and "EOS" in line_of(data)


def test_datatrove_loss_says_what_is_trained(tmp_path: Path) -> None:
    ids, loss = [[1, 2, 3, 4], [5, 6, 7]], [0, 0, 1, 1, 1, 0, 1]
    data = read(tmp_path, datatrove(tmp_path / "a.ds", ids, loss=loss))
    assert documents(data) == [([1, 2, 3, 4], [3, 4]), ([5, 6, 7], [7])]
    assert "2 rows with labels: no EOS added" in line_of(data)


def test_datatrove_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    def said(after: Any = lambda path: None, **changes: Any) -> str:
        path = datatrove(tmp_path / "a.ds", [[1, 2], [3]], **changes)
        after(path)
        return refusal(tmp_path, path).what

    assert "3 bytes, and the 3 tokens of its index" in said(lambda path: path.write_bytes(b"123"))
    for size in (4, 7):
        message = f"{size} bytes, and its index ends at 3 tokens of 2 bytes"
        assert message in said(lambda path, size=size: path.write_bytes(b"1" * size), metadata="gpt2|2")
    assert "no a.ds.index beside it" in said(lambda path: Path(f"{path}.index").unlink())
    assert "index is cut short" in said(lambda path: Path(f"{path}.index").write_bytes(b"12345"))
    swapped = np.array([3, 2], "<u8").tobytes()
    assert "not of documents in order" in said(lambda path: Path(f"{path}.index").write_bytes(swapped))
    assert "not tokenizer|2" in said(metadata="gpt2")
    assert "3 tokens, and 2 of its .loss" in said(loss=[1, 1])


def table(path: Path, columns: dict[str, list[Any]]) -> Path:
    pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table(columns), path)
    return path


def test_a_table_of_ids_has_the_documents_of_the_texts(tmp_path: Path) -> None:
    expected = documents(prepare_texts(tmp_path, TEXTS, packing=False))
    for eos in (True, False):
        ids = ids_of(TEXTS, eos)
        data = read(tmp_path, table(tmp_path / f"ids{eos}.parquet", {"input_ids": ids, "note": TEXTS}))
        assert documents(data) == expected
        assert any("'input_ids' read; left out: 'note'" in line for line in data.counts.lines())
        mask = [[0, *[1] * len(row), 0, 0] for row in ids]
        padded = {"input_ids": [[9, *row, 8, 8] for row in ids], "attention_mask": mask}
        assert documents(read(tmp_path, table(tmp_path / f"padded{eos}.parquet", padded))) == expected


ROWS = {"input_ids": [[1, 2, 3, 4], [5, 6, 7]], "labels": [[-100, -100, 3, 4], [-100, 6, -100]]}
TRAINED = [([1, 2, 3, 4], [3, 4]), ([5, 6, 7], [6])]


def test_labels_say_what_is_trained(tmp_path: Path) -> None:
    data = read(tmp_path, table(tmp_path / "saved.parquet", ROWS))
    assert documents(data) == TRAINED and "2 rows with labels: no EOS added" in line_of(data)
    masks = {"input_ids": ROWS["input_ids"], "completion_mask": [[0, 0, 1, 1], [0, 1, 0]]}
    assert documents(read(tmp_path, table(tmp_path / "masks.parquet", masks))) == TRAINED
    all_of_it = table(tmp_path / "all.parquet", {"input_ids": ROWS["input_ids"], "labels": ROWS["input_ids"]})
    data = read(tmp_path, all_of_it)
    assert documents(data) == [([1, 2, 3, 4], [2, 3, 4]), ([5, 6, 7], [6, 7])]
    assert data.counts.train.examples == 0  # texts, which may be cut over rows


def test_ids_in_other_records_are_read_where_there_is_no_text(tmp_path: Path) -> None:
    records = [dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert documents(read(tmp_path, path)) == TRAINED
    assert documents(read(tmp_path, table(tmp_path / "rows.parquet", ROWS))) == TRAINED
    path.write_text("".join(json.dumps({**record, "text": "ab"}) + "\n" for record in records))
    assert documents(read(tmp_path, path)) == [([97, 98, EOS], [98, EOS])] * 2
    assert documents(read(tmp_path, [{"path": str(path), "text_key": "input_ids"}])) == TRAINED


def test_rows_of_one_length_are_parts_of_a_stream(tmp_path: Path) -> None:
    rows = [[1, 2, EOS, 3], [4, 5, 6, 7], [8, EOS, 9, 10], [11, 12]]
    data = read(tmp_path, table(tmp_path / "saved.parquet", {"input_ids": rows}))
    assert [tokens for tokens, _ in documents(data)] == rows
    assert "4 rows of one length, as cut from a stream: no EOS added" in line_of(data)


def test_rows_that_say_two_things_are_refused(tmp_path: Path) -> None:
    def said(**columns: Any) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(columns) + "\n")
        return refusal(tmp_path, path).what

    assert "rows.jsonl:1: label 2 is 3, and the token there 2" in said(input_ids=[1, 2], labels=[1, 3])
    assert "shifted by one" in said(input_ids=[1, 2, 3], labels=[2, 3, -100])
    assert "2 input_ids, and 1 labels" in said(input_ids=[1, 2], labels=[1])
    assert "attention_mask is 0 between tokens" in said(input_ids=[1, 2, 3], attention_mask=[1, 0, 1])
    assert "'input_ids' holds a list, not a list of integers" in said(input_ids=["a"])
    assert "'input_ids' holds a list, not a list of integers" in said(input_ids=[1, [2]])
    assert "'input_ids' holds null" in said(input_ids=None)
    assert "token 2 is 300" in said(input_ids=[1, 300])


def test_folders_of_datasets_are_refused_and_converted_elsewhere(tmp_path: Path, subtests: Subtests) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = tmp_path / "saved" / "train"
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(ROWS)}).save_to_disk(str(folder.parent))
    for path in (folder, folder.parent, *folder.glob("*.arrow")):
        with subtests.test(path.name):
            error = refusal(tmp_path, path)
            assert error.what.endswith(".arrow: folders of `datasets` (save_to_disk) are not read")
            assert "datasets.load_from_disk(FOLDER).to_parquet" in str(error.fix)
    assert "folders of `datasets`" in refusal(tmp_path, [{"path": str(folder), "format": "datasets"}]).what
    datasets.load_from_disk(str(folder)).to_parquet(str(tmp_path / "train.parquet"))
    assert documents(read(tmp_path, tmp_path / "train.parquet")) == TRAINED


def test_shards_of_mosaicml_are_refused_and_converted_elsewhere(tmp_path: Path, subtests: Subtests) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "index.json").write_text('{"version": 2, "shards": []}')
    shard = folder / "shard.00000.mds.zstd"
    shard.write_bytes(b"\0")
    for path in (folder, shard, folder / "*"):
        with subtests.test(path.name):
            error = refusal(tmp_path, path)
            assert error.what == f"data.train: {shard}: shards of MosaicML's streaming (MDS) are not read"
            assert (
                "to Parquet" in str(error.fix)
                and error.more == "fivefold docs howto/data, 'Convert Arrow files and MDS'"
            )
    named = refusal(tmp_path, [{"path": str(folder), "format": "mds"}])
    assert named.what.startswith("data.train.format: mds: shards of MosaicML's streaming (MDS)")
    tokens = tmp_path / "train.jsonl"
    tokens.write_text('{"tokens": [1, 2]}\n{"tokens": [3, 4, 5]}\n')
    data = read(tmp_path, [{"path": str(tokens), "text_key": "tokens"}])
    assert [ids for ids, _ in documents(data)] == [[1, 2, EOS], [3, 4, 5, EOS]]


@pytest.mark.full
def test_a_run_trains_on_megatrons_tokens_as_on_the_texts(tmp_path: Path) -> None:
    texts = random_texts(5, 53)
    sources = {
        "texts": write_jsonl(tmp_path / "texts.jsonl", texts),
        "ids": megatron(tmp_path / "corpus", ids_of(texts)),
    }
    runs = {}
    for name, path in sources.items():
        runs[name] = run_file(tmp_path, data__train=str(path), train__max_steps=2, run__name=name)
        assert train(runs[name], world=1).error is None
    assert column(runs["ids"], "loss") == column(runs["texts"], "loss") and len(column(runs["ids"], "loss")) == 2
