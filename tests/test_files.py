"""Small files that are replaced whole: on the disk before they take the name, readable by whom the user lets."""

import errno
import os
import stat
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fivefold.core import files
from fivefold.core.errors import UserError
from fivefold.core.json_lines import JsonLines


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The system calls that were made, with the name of the file or folder that they were about."""
    made: list[str] = []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            plain = getattr(os, name)
            if name not in ("fsync", "replace"):
                return plain

            def call(*args: Any) -> Any:
                about = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[1])
                made.append(f"{name} {'beside' if about.endswith('.tmp') else Path(about).name}")
                return plain(*args)

            return call

    monkeypatch.setattr(files, "os", Recorded())
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="names descriptors by /proc")
def test_content_is_on_the_disk_before_its_name_and_then_the_name(tmp_path: Path, calls: list[str]) -> None:
    """A machine that loses its power leaves the old file or the new one, not an empty one."""
    (tmp_path / "run").mkdir()
    files.replace(tmp_path / "run" / "metrics.jsonl", b"new")
    assert calls == ["fsync beside", "replace metrics.jsonl", "fsync run"]


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_file_that_is_replaced_is_as_readable_as_any_other(tmp_path: Path, umask: None) -> None:
    files.replace(tmp_path / "a", b"x")
    JsonLines(tmp_path / "b", last_step=None, say=print).close()
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"} == {0o644}


def test_nothing_of_what_a_killed_process_of_the_same_number_left_comes_back(tmp_path: Path) -> None:
    """In a container every start has the same process id."""
    (tmp_path / f".a.{os.getpid()}.tmp").write_bytes(b"a long text of another time")
    files.replace(tmp_path / "a", b"short")
    assert (tmp_path / "a").read_bytes() == b"short" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [("", "Is a directory"), ("file/page.html", "Not a directory"), ("new/page.html", ""), ("file", ""), ("none", "")],
)
def test_a_place_is_looked_at_before_work_is_done_for_it(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    if not says:
        files.check_place(tmp_path / name, instead="another")
        files.put(tmp_path / name, b"x", instead="another")
        return
    for write in (files.check_place, partial(files.put, content=b"x")):
        with pytest.raises(UserError, match=f"cannot write .*: {says}"):
            write(tmp_path / name, instead="another")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_is_not_ones_own_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        files.check_place(tmp_path / "file", instead="another")


def test_a_file_that_may_not_grow_is_not_put_down_to_the_disk() -> None:
    refused = files.cannot_write("x", OSError(errno.EFBIG, os.strerror(errno.EFBIG)), instead="name another folder")
    assert refused.fix == "raise ulimit -f, or name another folder"
