"""What lies on the disk: published or not at all, whole or passed over, and old steps kept no longer than asked."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from fivefold.checkpoint import Checkpoint, CorruptCheckpoint, find_checkpoint, newest, steps
from fivefold.checkpoint.cut import TensorCut
from fivefold.checkpoint.manifest import signed
from fivefold.checkpoint.records import RankRecord, TensorRecord, joined
from fivefold.checkpoint.save import Metadata, _retain, _start
from fivefold.core import files
from fivefold.core.errors import UserError
from fivefold.core.run_folder import step_folder
from tests.checkpoint.ranks import restore_error, save_on_bad_disk, save_steps, save_twice
from tests.parity import Case
from tests.pool import run_ranks

CASE = Case("shard2+fp32")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The steps 100, 200 and 300."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    run_ranks(2, save_steps, CASE, folder, [100, 200, 300], 3)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run folder of its own with these steps."""
    shutil.copytree(saved, tmp_path / "checkpoints", symlinks=True)
    return tmp_path


@pytest.mark.full
def test_retention_deletes_after_publishing(tmp_path: Path) -> None:
    found = run_ranks(2, save_steps, CASE, tmp_path / "c", [1, 2, 3, 10], 2)
    assert found[0] == found[1] == [
        "step-000001",
        "step-000001 step-000002",
        "step-000002 step-000003",
        "step-000003 step-000010",
    ]  # fmt: skip


def test_steps_sort_by_number(tmp_path: Path) -> None:
    for name in ("step-1000000", "step-999999", ".tmp-step-2000000", "step-x", "notes"):
        (tmp_path / name).mkdir()
    assert steps(tmp_path) == [999999, 1000000]
    assert steps(tmp_path / "absent") == []
    assert newest(tmp_path / "absent") is None


def test_a_step_that_is_a_link_is_removed_and_what_it_points_at_stays(tmp_path: Path) -> None:
    """Old steps may have been moved to a larger disk, mounted or not."""
    (tmp_path / "archive" / "step-000005").mkdir(parents=True)
    (tmp_path / "archive" / "step-000005" / "manifest.json").touch()
    run = tmp_path / "checkpoints"
    for step in (20, 30):
        (run / step_folder(step)).mkdir(parents=True)
    (run / "step-000005").symlink_to(tmp_path / "archive" / "step-000005")
    (run / "step-000010").symlink_to("/not/mounted/step-000010")
    (run / ".tmp-old-step-000001").symlink_to(tmp_path / "archive")
    (run / ".tmp-old-step-000002").touch()
    assert steps(run) == [5, 10, 20, 30]
    _start(run / ".tmp-step-000040", run / "step-000040")
    assert {path.name for path in run.glob(".tmp-*")} == {".tmp-step-000040"}
    _retain(run / "step-000030", 2, Metadata(step=30, state={}), room=run)
    assert steps(run) == [20, 30]
    assert [path.name for path in tmp_path.glob("archive/*/*")] == ["manifest.json"]


def test_an_old_step_that_cannot_be_removed_stops_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (".tmp-old-step-000001", "step-000002", "step-000003", "step-000004"):
        (tmp_path / name).mkdir()
    remove = files.remove

    def refused(path: Path) -> None:
        if "old-step" in path.name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        remove(path)

    monkeypatch.setattr(files, "remove", refused)
    _start(tmp_path / ".tmp-step-000005", tmp_path / "step-000005")
    assert (tmp_path / ".tmp-step-000005").is_dir()
    _retain(tmp_path / "step-000004", 1, Metadata(step=4, state={}), room=tmp_path)
    assert steps(tmp_path) == [4]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"WARNING: {tmp_path / name} cannot be removed: Permission denied; remove it yourself"
        for name in (".tmp-old-step-000001", "step-000002", "step-000003")
    ]


def test_a_step_on_a_disk_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    """It is the newest, and whole where it is: a run that passed over it would do its steps again."""
    (tmp_path / "step-000005").mkdir()
    (tmp_path / "step-000010").symlink_to("/not/mounted/step-000010")
    with pytest.raises(UserError) as caught:
        newest(tmp_path)
    assert type(caught.value) is UserError
    assert caught.value.what == f"{tmp_path}/step-000010 is a link to /not/mounted/step-000010, which is not there"
    assert caught.value.fix == "mount it, or remove the link"


@pytest.mark.full
def test_a_published_step_is_never_rewritten(tmp_path: Path) -> None:
    for error in run_ranks(2, save_twice, CASE, tmp_path):
        assert error.startswith("UserError") and "published already" in error and "overwrite" not in error


@pytest.mark.full
def test_what_a_killed_save_left_is_ignored_and_cleared(run: Path) -> None:
    directory = run / "checkpoints"
    (directory / "step-000300").rename(directory / ".tmp-step-000400")
    assert newest(directory) == directory / "step-000200"
    run_ranks(2, save_steps, CASE, directory, [500], 3)
    assert sorted(path.name for path in directory.iterdir()) == ["step-000100", "step-000200", "step-000500"]


def _without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _without_shard(folder: Path) -> None:
    (folder / "optimizer-00001.safetensors").unlink(missing_ok=True)
    (folder / "weight-00001.safetensors").unlink()


def _truncated(folder: Path) -> None:
    with (folder / "weight-00000.safetensors").open("r+b") as file:
        file.truncate(1000)


def _cut_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def _edited(change: Any) -> Any:
    def damage(folder: Path) -> None:
        tree = json.loads((folder / "manifest.json").read_text())
        change(tree)
        (folder / "manifest.json").write_text(signed({key: tree[key] for key in tree if key != "checksum"}))

    return damage


def _first_record(tree: Any) -> Any:
    return next(iter(tree["tensors"]["weight"].values()))


def _cuts(tree: Any, **numbers: Any) -> None:
    """Other numbers in the rule of the first tensor."""
    tree["cuts"][_first_record(tree)["cut"]].update(numbers)


def _listed(boxes: Any) -> Any:
    """The first tensor has no rule, but these slices of rank 0."""

    def change(tree: Any) -> None:
        record = _first_record(tree)
        del record["cut"], record["rank"]
        record["instead"] = [[0, boxes(*record["shape"])]]

    return _edited(change)


def _repeated(folder: Path) -> str:
    """A manifest in which a later `step` overrules the first, with the right checksum."""
    text = (folder / "manifest.json").read_text()
    body = '"step":7,' + text[text.index('"format"') :]
    return f'{{"checksum":"{xxh3_128_hexdigest(body.encode())}",{body}'


def _linked(folder: Path) -> None:
    """A file of the right size, outside of the checkpoint."""
    file = folder / "weight-00000.safetensors"
    file.rename(folder.parent.parent / "elsewhere")
    file.symlink_to(folder.parent.parent / "elsewhere")


DAMAGES = {
    "no manifest": _without_manifest,
    "no shard": _without_shard,
    "truncated shard": _truncated,
    "half a manifest": _cut_manifest,
    "an unsigned manifest": lambda folder: (folder / "manifest.json").write_text('{"format":"fivefold-checkpoint"}'),
    "slices that overlap": _listed(lambda n, m: [[[0, n // 2], [0, m]], [[0, n - n // 2], [0, m]]]),
    "a key twice": lambda folder: (folder / "manifest.json").write_text(_repeated(folder)),
    "a link for a file": _linked,
    "not JSON we know": _edited(lambda tree: tree.update(format="other")),
    "a missing slice": _listed(lambda n, m: [[[0, n - 1], [0, m]]]),
    "a slice outside": _listed(lambda n, m: [[[1, n + 1], [0, m]]]),
    "negative offset": _listed(lambda n, m: [[[-1, n - 1], [0, m]]]),
    "a cut that is not there": _edited(lambda tree: _first_record(tree).update(cut=99)),
    "more shards": _edited(lambda tree: _cuts(tree, shards=3)),
    "no shards": _edited(lambda tree: _cuts(tree, shards=0)),
    "more parts": _edited(lambda tree: _cuts(tree, parts=2)),
    "another rank": _edited(lambda tree: _first_record(tree).update(rank=1)),
    "a checksum fewer": _edited(lambda tree: tree["ranks"]["weight"]["checksums"].pop()),
    "files of many ranks": _edited(lambda tree: tree["ranks"]["weight"].update(ranks=[[0, 10**12]])),
    "files of another name": _edited(lambda tree: tree["ranks"].update(x=tree["ranks"].pop("weight"))),
    "unknown type": _edited(lambda tree: _first_record(tree).update(dtype="uint16")),
    "file outside": _edited(lambda tree: tree["files"].update({"../x": {"bytes": 1, "checksum": ""}})),
    "absolute file": _edited(lambda tree: tree["files"].update({"/etc/passwd": {"bytes": 1, "checksum": ""}})),
    "hidden file": _edited(lambda tree: tree["files"].update({"model/.x": {"bytes": 1, "checksum": ""}})),
    "unlisted file": _edited(lambda tree: _first_record(tree).update(rank=7)),
    "no weights": _edited(lambda tree: tree["tensors"].pop("weight")),
    "a list": lambda folder: (folder / "manifest.json").write_text("[]"),
    "deep JSON": lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
}


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_passed_over(run: Path, damage: str) -> None:
    folder = run / "checkpoints" / "step-000300"
    DAMAGES[damage](folder)
    with pytest.raises(CorruptCheckpoint, match="step-000300"):
        Checkpoint.open(folder)
    assert newest(run / "checkpoints") == run / "checkpoints" / "step-000200"


@pytest.mark.full
def test_a_rule_that_the_files_do_not_bear_out_is_refused(run: Path) -> None:
    """It tiles the tensor and is signed: the keys in the files say otherwise."""
    folder = run / "checkpoints" / "step-000300"
    _edited(lambda tree: _first_record(tree)["shape"].reverse())(folder)
    with pytest.raises(CorruptCheckpoint, match="it holds other tensors than it should; it should hold weight of"):
        Checkpoint.open(folder).verify()


@pytest.mark.full
def test_a_later_format_is_no_damage(run: Path) -> None:
    folder = run / "checkpoints" / "step-000300"
    _edited(lambda tree: tree.update(version=3))(folder)
    with pytest.raises(UserError, match="version 3"):
        newest(run / "checkpoints")


@pytest.mark.full
def test_a_damaged_step_is_replaced_when_it_is_reached_again(run: Path) -> None:
    _truncated(run / "checkpoints" / "step-000300")
    run_ranks(2, save_steps, CASE, run / "checkpoints", [300], 3)
    assert newest(run / "checkpoints") == run / "checkpoints" / "step-000300"


@pytest.mark.full
@pytest.mark.parametrize(("kind", "said"), [("full", "No space left"), ("wrong", "not those that were saved")])
def test_a_bad_disk_fails_on_every_rank_and_leaves_the_old_steps(run: Path, kind: str, said: str) -> None:
    """What is not read back as it was written is never published."""
    errors = run_ranks(2, save_on_bad_disk, CASE, run / "checkpoints", kind)
    assert errors[0] == errors[1] and errors[0].startswith("RunFailed") and said in errors[0]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step-000{n}00" for n in (1, 2, 3)]


@pytest.mark.full
def test_what_the_manifest_says(run: Path) -> None:
    manifest = Checkpoint.open(run / "checkpoints" / "step-000300").manifest
    assert manifest.step == 300 and manifest.layout == "shard2+fp32"
    assert set(manifest.versions) == {"fivefold", "torch", "transformers", "safetensors"}
    assert not any(path.suffix in (".pt", ".bin", ".pkl") for path in run.rglob("*"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("other", "error"),
    [
        (Case("shard2+fp32", overrides=(("hidden_size", 48),)), "is [101, 32], and this model has [101, 48]"),
        (Case("shard2+fp32", overrides=(("num_hidden_layers", 4),)), "does not hold model.layers.3."),
        (Case("shard2+fp32", overrides=(("num_hidden_layers", 2),)), "this model does not have"),
        (Case("shard2+fp64"), "set precision.compute: fp32 or bf16"),
    ],
)
def test_another_model_is_refused_before_a_weight_changes(run: Path, other: Case, error: str) -> None:
    for found in run_ranks(2, restore_error, other, run / "checkpoints" / "step-000300"):
        assert found.startswith("UserError") and error in found


@pytest.mark.full
def test_find_checkpoint(run: Path) -> None:
    assert find_checkpoint(run).step == 300
    assert find_checkpoint(run, 200).step == 200
    with pytest.raises(UserError, match=r"no checkpoint of step 7\nsteps: 100, 200, 300"):
        find_checkpoint(run, 7)
    with pytest.raises(UserError, match="is not a run folder"):
        find_checkpoint(run / "absent")
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        find_checkpoint(run / "checkpoints")


def _part(record: TensorRecord, numbers: int) -> RankRecord:
    return RankRecord(files={}, scalars={}, tensors={"weight": {"head": record}}, numbers={"weight": numbers})


def test_ranks_that_save_another_tensor_than_they_say_are_told() -> None:
    """One that has fewer slices than the rule says, or none of a tensor of which another has some, and two rules."""
    record = TensorRecord(shape=(4, 2), dtype="float32", cut=TensorCut(1, 2))
    nothing = RankRecord(files={}, scalars={}, tensors={}, numbers={"weight": 4})
    assert joined([_part(record, 4), nothing]) == {"weight": {"head": record}}
    own = [{0: (((0, 1), (0, 2)),)}, {1: (((1, 4), (0, 2)),)}]  # of ranks that have others than the rule says
    found = joined([_part(replace(record, instead=one), count) for one, count in zip(own, (2, 6), strict=True)])
    assert found == {"weight": {"head": replace(record, instead=own[0] | own[1])}}
    with pytest.raises(ValueError, match="have 4 elements, and the tensors 8"):
        joined([_part(record, 4)])
    with pytest.raises(ValueError, match="exp_avg: the slices of all ranks have 4 elements, and the tensors 0"):
        joined([_part(record, 4), replace(nothing, numbers={"weight": 4, "exp_avg": 4})])
    with pytest.raises(ValueError, match="weight of head: ranks cut it in different ways"):
        joined([_part(record, 4), _part(replace(record, rank=1), 4)])
