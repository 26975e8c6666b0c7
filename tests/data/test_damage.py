"""Damage in the cache and in token stores: found when they are opened, made again aloud or refused by name."""

import io
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from fivefold.core import integrity
from fivefold.core.errors import UserError
from fivefold.core.integrity import CHUNK, DamagedError, file_checksum, signed
from fivefold.data import PreparedData, prepare
from fivefold.data.store import StoreMeta, open_store
from tests.data.helpers import config_for, prepare_texts, random_texts, whole

TEXTS = random_texts(0)


def rows(data: PreparedData) -> list[list[list[int]]]:
    return [batch.input_ids.tolist() for batch in whole(data.train)]


def flip(path: Path, at: int = -9) -> None:
    """One bit, and the times of the file as they were."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def again(folder: Path, said: list[str]) -> PreparedData:
    config = config_for(folder / "texts.jsonl", validation=0.1)
    return prepare(config, cache=folder / "cache", say=said.append)


@pytest.mark.parametrize("file", ["tokens.bin", "offsets.npy", "blocks.npy", "checksums.npy", "meta.json"])
def test_flipped_tokens_are_made_again_and_that_is_said(tmp_path: Path, file: str) -> None:
    expected = rows(prepare_texts(tmp_path, TEXTS, validation=0.1))
    (path,) = (tmp_path / "cache").glob(f"stores/*/{file}")
    flip(path)
    said: list[str] = []
    assert rows(again(tmp_path, said)) == expected
    assert len(said) == 1 and "DAMAGED" in said[0] and "texts.jsonl" in said[0] and file in said[0]
    assert rows(again(tmp_path, said)) == expected and len(said) == 1  # mended


@pytest.mark.parametrize("file", ["train/start.npy", "validation/length.npy", "train/has_next.npy", "counts.json"])
def test_flipped_rows_are_packed_again_and_that_is_said(tmp_path: Path, file: str) -> None:
    expected = rows(prepare_texts(tmp_path, TEXTS, validation=0.1))
    (path,) = (tmp_path / "cache").glob(f"rows/*/{file}")
    flip(path)
    said: list[str] = []
    assert rows(again(tmp_path, said)) == expected
    assert len(said) == 1 and "DAMAGED: the cached rows" in said[0] and path.name in said[0]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "checksums.json"])
def test_a_flipped_tokenizer_is_made_again_and_that_is_said(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = prepare_texts(tmp_path, TEXTS, tokenizer="train:300")
    (path,) = (tmp_path / "cache").glob(f"tokenizers/*/{file}")
    flip(path, 50)
    again = prepare_texts(tmp_path, TEXTS, tokenizer="train:300")
    assert (again.fingerprint, rows(again)) == (expected.fingerprint, rows(expected))
    said = capsys.readouterr().err
    assert said.count("DAMAGED: the cached tokenizer train-") == 1 and file in said


def test_what_cannot_be_made_again_is_said_with_the_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.data.source.file_digest", lambda path, root: "the same")  # as if it had not changed
    prepare_texts(tmp_path, TEXTS, validation=0.1)
    (path,) = (tmp_path / "cache").glob("stores/*/tokens.bin")
    flip(path)
    (tmp_path / "texts.jsonl").write_text("no JSON")
    with pytest.raises(UserError, match=r"cached tokens of .* damaged \(tokens.bin .* cannot be made again: .*:1: not"):
        again(tmp_path, [])
    (tmp_path / "texts.jsonl").unlink()
    with pytest.raises(UserError, match=r"texts\.jsonl does not exist"):
        again(tmp_path, [])


def test_tokens_of_another_store_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    expected = rows(prepare_texts(tmp_path, TEXTS, validation=0.1))
    (path,) = (tmp_path / "cache").glob("stores/*/tokens.bin")
    tokens = np.fromfile(path, "<u2")
    tokens[::-1].tofile(path)
    said: list[str] = []
    assert rows(again(tmp_path, said)) == expected and len(said) == 1


# ---- a token store that is given ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of more than two chunks."""
    folder = tmp_path_factory.mktemp("made")
    prepare_texts(folder, [*TEXTS, "x " * (CHUNK // 2), *TEXTS], packing=False)
    (meta,) = (folder / "cache").glob("stores/*/meta.json")
    return meta.parent


@pytest.fixture
def store(tmp_path: Path, made: Path) -> Path:
    """A token store somewhere else."""
    return Path(shutil.copytree(made, tmp_path / "given"))


def rewritten(store: Path, **changes: object) -> None:
    """The meta.json of a store with other values and a checksum that fits: no accident, an unfit store."""
    meta = asdict(open_store(store, store.parent).meta) | changes
    (store / "meta.json").write_text(signed(meta))


def _cut(store: Path) -> None:
    os.truncate(store / "tokens.bin", (store / "tokens.bin").stat().st_size - 2)


def _flip_the_second_chunk(store: Path) -> None:
    flip(store / "tokens.bin", CHUNK + 17)


def _swap_bytes(store: Path) -> None:
    np.fromfile(store / "tokens.bin", "<u2").byteswap().tofile(store / "tokens.bin")


def _wider(store: Path) -> None:
    np.fromfile(store / "tokens.bin", "<u2").astype("<u4").tofile(store / "tokens.bin")


def _earlier_version(store: Path) -> None:
    (store / "meta.json").write_text(json.dumps({"kind": "fivefold token store", "version": 1}))


def _later_version(store: Path) -> None:
    rewritten(store, version=3)


WRONG: dict[Callable[[Path], None], str] = {
    _cut: "tokens.bin has ",
    _flip_the_second_chunk: "tokens.bin is not what was written, between byte 1,048,576 and 2,097,152",
    _swap_bytes: "tokens.bin is not what was written, between byte 0 and 1,048,576",
    _wider: "tokens.bin has ",
    _earlier_version: "meta.json has no checksum: it is of an earlier version",
    _later_version: "meta.json is of version 3; this fivefold reads 2",
}


@pytest.mark.parametrize("damage", WRONG, ids=lambda damage: damage.__name__)
def test_a_store_that_is_not_whole_is_refused_with_file_and_place(
    tmp_path: Path, store: Path, damage: Callable[[Path], None]
) -> None:
    damage(store)
    with pytest.raises(UserError) as caught:
        prepare(config_for(store), cache=tmp_path / "cache")
    assert caught.value.exit_code == 2
    assert f"data.train: the token store {store} is damaged: {WRONG[damage]}" in caught.value.what
    assert "copy it again" in str(caught.value.fix)


@pytest.mark.parametrize("name", ["offsets.npy", "blocks.npy", "tokens.bin"])
def test_what_is_damaged_is_refused_each_time(
    name: str, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found whole is not read again for a day, were it small; what is not, is."""
    monkeypatch.setattr(integrity, "_TRUSTED_FROM", 0)
    flip(store / name)
    for _ in range(2):
        with pytest.raises(DamagedError):
            open_store(store, tmp_path)


def test_a_whole_store_is_read(tmp_path: Path, store: Path) -> None:
    assert rows(prepare(config_for(store), cache=tmp_path / "cache"))
    assert isinstance(open_store(store, tmp_path).meta, StoreMeta)


def test_a_large_file_is_read_once_a_day_unless_it_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "_TRUSTED_FROM", 3)
    prepare_texts(tmp_path, TEXTS, validation=0.1)
    again(tmp_path, [])
    monkeypatch.setattr(integrity, "_chunks", lambda path: pytest.fail(f"{path} is read again"))
    again(tmp_path, [])
    monkeypatch.undo()
    monkeypatch.setattr(integrity, "_TRUSTED_FROM", 3)
    (path,) = (tmp_path / "cache").glob("stores/*/tokens.bin")
    flip(path)  # the times are put back, but that is a change of the inode
    said: list[str] = []
    again(tmp_path, said)
    assert "tokens.bin" in said[0]
    read: list[Path] = []
    plain = integrity._chunks
    monkeypatch.setattr(integrity, "_chunks", lambda path: (read.append(path), plain(path))[1])
    later = time.time() + 86400 + 1
    monkeypatch.setattr(integrity.time, "time", lambda: later)
    again(tmp_path, [])
    assert {"tokens.bin", "start.npy"} <= {path.name for path in read}


def test_every_byte_counts_however_few_a_read_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large"
    content = np.random.default_rng(0).bytes(2 * CHUNK + 17)
    path.write_bytes(content)
    whole_file, chunks = file_checksum(path), integrity.chunk_checksums(path).tolist()
    assert len(chunks) == 3

    class Short(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 700_001))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *_, **__: Short(self))
        assert (file_checksum(path), integrity.chunk_checksums(path).tolist()) == (whole_file, chunks)
    for at in (0, CHUNK, len(content) - 1):
        flip(path, at)
        assert file_checksum(path) != whole_file
        flip(path, at)


def test_old_cached_rows_and_stores_are_not_taken(tmp_path: Path) -> None:
    """A counts.json of an earlier version, and a store of version 1 under the name it would have now."""
    expected = rows(prepare_texts(tmp_path, TEXTS, validation=0.1))
    for path, tree in (("rows/*/counts.json", {"train": {}}), ("stores/*/meta.json", {"version": 1})):
        (found,) = (tmp_path / "cache").glob(path)
        found.write_text(json.dumps(tree))
        assert rows(again(tmp_path, [])) == expected
