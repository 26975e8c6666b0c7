"""Token files of other engines: the same documents and targets, and what is said about files that are not whole.

The files are written here byte by byte, as their formats say; `tests/data/test_token_writers.py` writes them with the
packages of those engines, where they are installed.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.data import PreparedData, prepare
from tests.data.helpers import config_for, pieces, prepare_texts, random_texts, whole
from tests.data.test_bos import BOS, EOS, tokenizer_folder
from tests.data.test_formats import refusal

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
