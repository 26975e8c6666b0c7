"""Copies of checkpoints on storage that `fsspec` reaches: the old copy or the new one counts, never a mix.

The storage is `fsspec`'s own, in memory. Every call that changes something can be made the last one, as by SIGKILL.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fivefold.checkpoint import CorruptCheckpoint, Remote
from fivefold.checkpoint.find import candidates, find_checkpoint
from fivefold.checkpoint.load import is_valid
from fivefold.checkpoint.manifest import MANIFEST, read_manifest
from fivefold.config import RunConfig
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.run_folder import step_folder
from tests.checkpoint.test_killed_save import content, save_step

URL = "memory://bucket/runs/demo"
CHANGES = ("put_file", "rm_file", "rm", "makedirs")


class Killed(BaseException):
    """Where the process would have ended."""


@pytest.fixture(autouse=True)
def storage() -> Iterator[MemoryFileSystem]:
    found = MemoryFileSystem()
    found.store.clear()
    found.pseudo_dirs[:] = [""]
    yield found
    found.store.clear()


def copy(folder: Path, remote: Remote, keep: int) -> None:
    """What `Saver` does after a step is published."""
    manifest = read_manifest(folder)
    remote.withdraw(folder.name)
    remote.put(folder, manifest.files)
    remote.put(folder, [MANIFEST])
    remote.retain(folder.name, keep)


def saved(directory: Path, *steps: int) -> list[Path]:
    for step in steps:
        save_step(directory, step, keep=9)
    return [directory / step_folder(step) for step in steps]


def test_what_is_fetched_is_what_was_copied(tmp_path: Path) -> None:
    remote = Remote(URL)
    assert remote.steps() == []
    for folder in saved(tmp_path / "here", 7, 8, 9):
        copy(folder, remote, keep=2)
    assert remote.steps() == [8, 9]
    fetched = remote.fetch(8, tmp_path / "there")
    assert is_valid(fetched) and content(fetched) == {8.0}
    names = {path.relative_to(fetched) for path in fetched.rglob("*")}
    original = tmp_path / "here" / fetched.name
    assert names == {path.relative_to(original) for path in original.rglob("*")}


def broken_off(at: int, *names: str) -> Any:
    """A context in which the `at`-th change to the storage, and every later one, does not happen."""
    calls = 0

    def limited(name: str) -> Any:
        plain = getattr(MemoryFileSystem, name)

        def change(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > at:
                raise Killed
            return plain(*args, **options)

        return change

    return patch.multiple(MemoryFileSystem, **{name: limited(name) for name in names or CHANGES})


def test_a_copy_that_is_broken_off_does_not_count(tmp_path: Path, storage: MemoryFileSystem) -> None:
    older, newer = saved(tmp_path / "here", 1, 2)
    outcomes, at = [], 0
    while not outcomes or outcomes[-1] != "done":
        storage.store.clear()
        remote = Remote(URL)
        copy(older, remote, keep=1)
        try:
            with broken_off(at):
                copy(newer, remote, keep=1)
            outcome = "done"
        except Killed:
            outcome = "killed"
        there = remote.steps()
        assert there and set(there) <= {1, 2}
        for step in there:
            fetched = remote.fetch(step, tmp_path / f"{at}")
            assert is_valid(fetched) and content(fetched) == {float(step)}
        copy(newer, remote, keep=1)  # the next one clears away what this one left
        assert {path.split("/")[5] for path in storage.store} == {step_folder(2)}
        outcomes.append(outcome)
        at += 1
    assert at > 15


def test_a_step_copied_anew_does_not_count_meanwhile(tmp_path: Path) -> None:
    (first,), (second,) = saved(tmp_path / "a", 3), saved(tmp_path / "b", 3)
    remote = Remote(URL)
    copy(first, remote, keep=1)
    with pytest.raises(Killed), broken_off(3):
        copy(second, remote, keep=1)
    assert remote.steps() == []
    copy(second, remote, keep=1)
    assert remote.steps() == [3]


def test_a_copy_that_reads_back_otherwise_is_refused(tmp_path: Path, storage: MemoryFileSystem) -> None:
    (folder,) = saved(tmp_path, 5)
    plain = MemoryFileSystem.put_file

    def cut(self: Any, source: str, path: str, **options: Any) -> None:
        plain(self, source, path, **options)
        self.pipe_file(path, self.cat_file(path)[:-1])

    with patch.object(MemoryFileSystem, "put_file", cut), pytest.raises(RunFailed, match="reads back otherwise"):
        copy(folder, Remote(URL), keep=1)
    assert Remote(URL).steps() == []


def test_damage_to_a_copy_is_refused(tmp_path: Path, storage: MemoryFileSystem) -> None:
    older, newer = saved(tmp_path / "here", 1, 2)
    remote = Remote(URL)
    for folder in (older, newer):
        copy(folder, remote, keep=2)
    path = "/bucket/runs/demo/checkpoints/step-000002/manifest.json"
    storage.pipe_file(path, storage.cat_file(path).replace(b"shard2", b"shard3"))
    with pytest.raises(CorruptCheckpoint, match=r"memory://.*step-000002"):
        remote.manifest(2)
    here, copy_2, copy_1 = candidates(tmp_path / "here", remote)[0], *candidates(tmp_path / "none", remote)
    assert (here.step, here.remote, copy_2.step, copy_1.step) == (2, None, 2, 1)


def test_a_damaged_folder_makes_way_for_its_copy(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path, 4)
    remote = Remote(URL)
    copy(folder, remote, keep=1)
    (folder / "weight-00000.safetensors").write_bytes(b"")
    assert is_valid(remote.fetch(4, tmp_path))


def test_a_run_is_named_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        find_checkpoint(URL)
    for folder in saved(tmp_path / "here", 1, 2):
        copy(folder, Remote(URL), keep=2)
    assert find_checkpoint(URL).step == 2
    with patch.object(MemoryFileSystem, "get_file", side_effect=Killed):
        assert find_checkpoint(URL, 2).step == 2  # from the cache
    assert content(find_checkpoint(URL, 1).path) == {1.0}
    with pytest.raises(UserError, match="no checkpoint of step 3") as error:
        find_checkpoint(URL, 3)
    assert error.value.fix == "steps: 1, 2"


@pytest.mark.parametrize("url", ["nonsense://bucket/run", "s4://x"])
def test_storage_that_is_not_known_is_said(url: str) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.remote") as error:
        Remote(url).steps()
    assert "pip install" in str(error.value.fix)


def test_newer_steps_that_were_passed_over_do_not_cost_the_one_that_is_saved(tmp_path: Path) -> None:
    remote = Remote(URL)
    for folder in saved(tmp_path / "here", 100, 200, 300):
        copy(folder, remote, keep=3)
    (later,) = saved(tmp_path / "there", 150)
    copy(later, remote, keep=1)
    assert remote.steps() == [150, 200, 300]


def test_a_copy_that_is_damaged_in_the_cache_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    copy(saved(tmp_path / "here", 1)[0], Remote(URL), keep=1)
    file = find_checkpoint(URL).path / "weight-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert content(find_checkpoint(URL).path) == {1.0}


@pytest.mark.parametrize("url", ["s3:/bucket/runs", "ftp://user:secret@host/runs"])
def test_addresses_that_are_none_or_hold_a_password_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        RunConfig.model_validate({"checkpoint": {"remote": url}})
