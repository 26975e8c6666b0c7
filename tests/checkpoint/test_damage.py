"""Damage of every byte is seen before a weight changes, and named: the file, and the tensor whose bytes they are."""

import json
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from fivefold.checkpoint import Checkpoint, CorruptCheckpoint, newest
from tests.checkpoint.ranks import restore_error, save_steps, train_and_save
from tests.parity import Case
from tests.pool import run_ranks
from tests.tiers import put_off

pytestmark = pytest.mark.full

CASE = Case("shard2+fp32")
FLIPS, CUTS = 300, 60  # benchmarks/reliability/damage.py does thousands


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with weights and moments by two ranks."""
    directory = tmp_path_factory.mktemp("checkpoints")
    run_ranks(2, train_and_save, CASE, directory, 2)
    folder = newest(directory)
    assert folder is not None
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def damage_of(folder: Path) -> str:
    """What one process finds wrong with the folder; empty when it is as it was saved."""
    try:
        return next(Checkpoint.open(folder).damages(), "")
    except CorruptCheckpoint as damage:
        return damage.what


def test_what_ranks_share_out_is_all_of_it(folder: Path) -> None:
    """Each tensor has a flipped byte: three ranks together name every one of them, and each one once."""
    checkpoint, keys = Checkpoint.open(folder), []
    for file in sorted(folder.rglob("*.safetensors")):
        content = bytearray(file.read_bytes())
        start = 8 + struct.unpack("<Q", content[:8])[0]
        entries = {key: entry for key, entry in json.loads(content[8:start]).items() if ":" in key}
        for entry in entries.values():
            content[start + entry["data_offsets"][0]] ^= 1
        file.write_bytes(content)
        keys += [(file, key) for key in entries]
    found = [list(checkpoint.damages(rank, 3)) for rank in range(3)]
    assert len(keys) == sum(map(len, found)) == len({each for own in found for each in own}) and all(found)


def key_at(file: Path, at: int) -> str | None:
    """The key of the tensor that holds byte `at` of a safetensors file; None in its header and its checksums."""
    content = file.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    for key, entry in json.loads(content[8:start]).items():
        if ":" in key and entry["data_offsets"][0] <= at - start < entry["data_offsets"][1]:
            return str(key)
    return None


def places(folder: Path, count: int, seed: int) -> Iterator[tuple[Path, int]]:
    """(file, offset) of random bytes; every file gets some."""
    rng, files = random.Random(seed), sorted(path for path in folder.rglob("*") if path.is_file())
    for index in range(count):
        file = files[index % len(files)]
        yield file, rng.randrange(file.stat().st_size)


def test_nothing_is_wrong_with_what_was_saved(folder: Path) -> None:
    assert damage_of(folder) == ""


def test_every_flipped_bit_is_named(folder: Path) -> None:
    rng, named = random.Random(3), 0
    for file, at in places(folder, FLIPS, seed=1):
        content = file.read_bytes()
        key = key_at(file, at) if file.suffix == ".safetensors" else None
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        found = damage_of(folder)
        assert str(file) in found, (file, at)
        if key:
            kind, name = key.split("[")[0].split(":")
            assert f"{kind} of {name}:" in found
            named += 1
        file.write_bytes(content)
    assert damage_of(folder) == "" and named > FLIPS // 5


def test_every_cut_is_named(folder: Path) -> None:
    for file, at in places(folder, CUTS, seed=2):
        content = file.read_bytes()
        file.write_bytes(content[:at])
        found = damage_of(folder)
        assert str(file) in found and ("it should hold" in found) == (file.suffix == ".safetensors")
        file.write_bytes(content)
    assert damage_of(folder) == ""


def test_a_file_that_is_not_there_is_missing(folder: Path) -> None:
    content = (file := folder / "weight-00000.safetensors").read_bytes()
    file.unlink()
    assert f"{file} is missing; it should hold" in damage_of(folder)
    file.write_bytes(content)


def test_bytes_of_a_tensor_in_anothers_place(folder: Path) -> None:
    """Two whole tensors of one shape, exchanged in a file whose header is untouched."""
    file = folder / "weight-00000.safetensors"
    content = bytearray(file.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    entries = json.loads(content[8:start])
    one, other = (
        next(entry for key, entry in entries.items() if f"layers.{layer}.mlp.up_proj" in key) for layer in (0, 1)
    )
    assert one["shape"] == other["shape"]
    (a, b), (c, d) = one["data_offsets"], other["data_offsets"]
    first, second = content[start + a : start + b], content[start + c : start + d]
    assert first != second
    content[start + a : start + b], content[start + c : start + d] = second, first
    file.write_bytes(bytes(content))
    assert "weight of model.layers.0.mlp.up_proj.weight: its bytes" in damage_of(folder)


def test_a_file_of_another_rank_or_step(folder: Path, tmp_path: Path) -> None:
    one, other = folder / "weight-00000.safetensors", folder / "weight-00001.safetensors"
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    assert "weight-00000.safetensors" in damage_of(folder)
    run_ranks(2, save_steps, CASE, tmp_path / "older", [1], 1)  # untrained: the same shapes and names
    one.write_bytes((tmp_path / "older" / "step-000001" / one.name).read_bytes())
    assert one.stat().st_size == len(content)
    assert "its header and checksums: not those that were saved" in damage_of(folder)


@pytest.mark.parametrize(
    ("layout", "file"),
    [
        ("shard2+fp32", "weight-00001.safetensors"),
        ("tp2+fp32", "optimizer-00000.safetensors"),
        put_off("shard2+fp32", "optimizer-00000.safetensors"),
        put_off("tp2+fp32", "weight-00001.safetensors"),
    ],
)
def test_no_weight_changes(folder: Path, file: str, layout: str) -> None:
    """On every rank, also those that read none of the damaged bytes."""
    content = bytearray((folder / file).read_bytes())
    content[-1] ^= 1
    (folder / file).write_bytes(bytes(content))
    for found in run_ranks(2, restore_error, CASE.with_layout(layout), folder):
        assert found.startswith("CorruptCheckpoint") and file in found
