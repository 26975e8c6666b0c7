"""Token files as the packages of other engines write them, where these are installed."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import prepare_texts
from tests.data.test_token_files import TEXTS, documents, ids_of, megatron, read

IDS = ids_of(TEXTS)


@pytest.fixture
def expected(tmp_path: Path) -> list[tuple[list[int], list[int]]]:
    return documents(prepare_texts(tmp_path, TEXTS, packing=False))


def test_megatrons_builder(tmp_path: Path, expected: object) -> None:
    torch, written = pytest.importorskip("torch"), tmp_path / "theirs.bin"
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = indexed.IndexedDatasetBuilder(str(written), dtype=np.int32)
    for ids in IDS:
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(written.with_suffix(".idx")))
    assert documents(read(tmp_path, written)) == expected
    ours = megatron(tmp_path / "ours", IDS, "<i4")
    assert ours.read_bytes() == written.read_bytes()
    assert ours.with_suffix(".idx").read_bytes() == written.with_suffix(".idx").read_bytes()


@pytest.mark.parametrize("width", [2, 4])
def test_datatroves_file(tmp_path: Path, expected: object, width: int) -> None:
    tokenizer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    file = tokenizer.TokenizedFile(str(tmp_path / "out"), "a.ds", save_final_metadata=True, token_size=width)
    for ids in IDS:
        file.write(ids, None)
    file.close()
    assert documents(read(tmp_path, tmp_path / "out")) == expected
