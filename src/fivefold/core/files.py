"""Durable file writing, one system call at a time, and write errors in words. No torch.

Files, and the folders that name them, are on disk (fsync) when a call returns. A small file is replaced whole, so that
a kill or a full disk leaves the old one. The tests stop a process before each call of `os`.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fivefold.core.errors import UserError

AT_ONCE = 8 * 2**20  # bytes of one write

# Errors that a person can fix; any other may be a bug.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_MISNAMED = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)


def expanded(name: str) -> Path:
    """Path as the user wrote it, with `~` expanded. Raises `UserError` if the home folder is not known."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # no such user, or one without HOME and a passwd entry
        raise UserError(f"{name}: the home folder that ~ stands for is not known", fix="write the path out") from None


def replace(path: Path, content: bytes, *, room: Path | None = None) -> None:
    """Write `content` to `path` atomically: there is the old file or the new one. `room`: the folder in which the new
    one is prepared; None: that of `path`. Raises `OSError`."""
    beside = (room or path.parent) / f".{path.name}.{os.getpid()}.tmp"
    beside.unlink(missing_ok=True)  # left by a killed process: every start of a container has the same pid
    try:
        write(beside, [content])
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def put(path: Path, content: bytes, *, instead: str) -> None:
    """Write a file that a user has named, whole or not at all, and create its folder if it is missing.

    Devices and pipes are written to, and links followed: neither is replaced by a file. `instead`: how to name another
    place. Raises `UserError` if it cannot be written."""
    with writing(path, instead=instead):
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            replace(path.resolve(), content)


def write(path: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write a new file and return its size in bytes. The caller syncs the folder. Raises `OSError`."""
    descriptor, size = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), 0
    try:
        for part in parts:
            write_all(descriptor, part)
            size += len(part)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of `content`: one system call may write only a part. Raises `OSError`."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left[:AT_ONCE]) :]


def take_space(descriptor: int, start: int, size: int) -> None:
    """Allocate `size` bytes of an open file from `start` on. A full disk is then an error here, not a signal when a
    mapped page is written. Raises `OSError`."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, size)
    else:
        os.ftruncate(descriptor, start + size)


def make_folder(path: Path) -> None:
    """Create a folder whose parent exists; an existing folder is fine."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    sync_folder(path.parent)


def rename(old: Path, new: Path) -> None:
    """Rename a folder within a filesystem: there is the old name or the new one, never both."""
    os.rename(old, new)
    for folder in {new.parent, old.parent}:
        if folder.is_dir():  # another process may have renamed it
            sync_folder(folder)


def remove(path: Path) -> None:
    """Remove a folder and its contents, a file or a link. The target of a link is left alone. A missing one is fine."""
    if path.is_dir() and not path.is_symlink():
        for entry in os.scandir(path):
            remove(Path(entry))
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_place(path: Path, *, instead: str) -> None:
    """Raise the `UserError` of `writing` if a file cannot be written, before any work for it. A missing folder is fine:
    it can be created."""
    for part in (path, *path.parents):
        if part.is_symlink() and not part.exists():
            raise UserError(
                f"cannot write {path}: {part} is a link to {os.readlink(part)}, which is not there",
                fix=f"mount or make it, or remove the link, or {instead}",
            )
    there = path if path.exists() else next(parent for parent in path.absolute().parents if parent.exists())
    wrong = None
    if path.is_dir():
        wrong = errno.EISDIR
    elif not path.exists() and not there.is_dir():
        wrong = errno.ENOTDIR
    elif not os.access(there, os.W_OK):
        wrong = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
    if wrong is not None:
        raise cannot_write(path, OSError(wrong, os.strerror(wrong)), instead=instead)


@contextmanager
def writing(path: Path, *, instead: str) -> Iterator[None]:
    """Turn an `OSError` while `path` is written into a `UserError`. `instead`: how to name another place for it."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error, instead=instead) from error


def cannot_write(path: Path | str, error: OSError, *, instead: str = "") -> UserError:
    """Return the `UserError` for a system error in writing `path`."""
    why = f"{error.strerror or error}"
    place = f"; {error.filename} is in its way" if error.errno in _MISNAMED and _elsewhere(error, path) else ""
    if error.errno == errno.EFBIG:
        advice = ["raise ulimit -f"]
    elif is_full(error):
        advice = ["free space"]
    elif error.errno in _REFUSED:
        advice = ["make it writable"]
    else:
        advice = []
    return UserError(f"cannot write {path}: {why}{place}", fix=", or ".join(filter(None, (*advice, instead))) or None)


def of_system(error: Exception) -> OSError | None:
    """Find the system error behind an exception of a Rust or C++ library, which reports it only as text."""
    if isinstance(error, OSError):
        return error
    found = re.search(r"\(os error (\d+)\)", str(error))
    codes = [int(found[1])] if found else [code for code in _FULL if os.strerror(code) in str(error)]
    return OSError(codes[0], os.strerror(codes[0])) if codes else None


def is_full(error: OSError) -> bool:
    """True if there is no room: the disk or quota is full, or the file too large."""
    return error.errno in _FULL


def is_users(error: OSError) -> bool:
    """True if a path is full, read-only, forbidden or misnamed: the program cannot fix that."""
    return error.errno in (*_FULL, *_REFUSED, *_MISNAMED)


def _elsewhere(error: OSError, path: Path | str) -> bool:
    return error.filename is not None and str(error.filename) != str(path)
