"""A checkpoint of format version 1, saved by an earlier fivefold: its slices are listed, and it is read like others."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.checkpoint import Checkpoint, CorruptCheckpoint
from fivefold.checkpoint.manifest import Manifest, signed

SAVED = Path(__file__).parent / "version1" / "step-000007"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAVED, tmp_path / SAVED.name))


def drawn(kind: str, name: str) -> torch.Tensor:
    """What was saved."""
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(len(kind) * 100 + len(name)))


def test_it_is_read(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    assert (
        checkpoint.step == 7 and checkpoint.state == {"tokens_seen": 70} and checkpoint.kinds == ("weight", "exp_avg")
    )
    assert checkpoint.manifest.scalars == {"embed.weight": {"step": 7.0}}
    for kind in checkpoint.kinds:
        source = checkpoint.source(kind)
        for name in ("embed.weight", "layers.0.qkv.weight"):
            assert torch.equal(source.whole(name), drawn(kind, name))
            region = (slice(3, 6), slice(1, 5))  # of several slices
            assert torch.equal(source.read(name, region), drawn(kind, name)[region])
    assert torch.equal(checkpoint.source().whole("norm.weight"), torch.arange(6.0))


def test_a_damaged_slice_is_named(folder: Path) -> None:
    """By two ranks that share out what is read."""
    file = folder / "optimizer-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = [damage for rank in (0, 1) for damage in Checkpoint.open(folder).damages(rank, 2)]
    assert found == [f"{file}: exp_avg of layers.0.qkv.weight: its bytes are not those that were saved"]
    assert not any(Checkpoint.open(folder).damages(kinds=["weight"]))


def edited(folder: Path, **changes: Any) -> None:
    """Other values in a slice of a signed manifest."""
    tree = json.loads((folder / "manifest.json").read_text())
    tree["tensors"]["weight"]["embed.weight"]["slices"][1].update(changes)
    (folder / "manifest.json").write_text(signed({key: tree[key] for key in tree if key != "checksum"}))


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"offset": [3, 0]}, "is no slice of it"),
        ({"file": "weight-00000.safetensors"}, "holds other tensors"),
        ({"file": "optimizer-00001.safetensors"}, "is no slice of it"),
        ({"file": "../weight-00001.safetensors"}, "is no slice of it"),
        ({"file": "weight-00005.safetensors"}, "'weight-00005.safetensors' is not listed"),
        ({"key": "weight:embed.weight[3:7,0:6]", "offset": [3, 0], "shape": [4, 6]}, "do not add up"),
        ({"checksum": "0" * 32}, "its bytes are not those"),
    ],
)
def test_a_changed_list_is_refused(folder: Path, changes: dict[str, Any], wrong: str) -> None:
    edited(folder, **changes)
    with pytest.raises(CorruptCheckpoint, match=wrong):
        Checkpoint.open(folder).verify()


def test_it_is_written_as_one_of_today(folder: Path) -> None:
    """Its list stays a list."""
    manifest = Checkpoint.open(folder).manifest
    again = Manifest.from_json(manifest.to_json(), where="here")
    assert again.tensors == manifest.tensors and again.files == manifest.files
