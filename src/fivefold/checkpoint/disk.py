"""Every effect that saving has on a disk, one system call at a time; the tests stop the process before each of them.

What returns from here is on the disk: files and the folders that name them are synchronised (fsync).
"""

import os
from collections.abc import Iterable
from pathlib import Path

AT_ONCE = 8 * 2**20  # bytes of one write


def make_folder(path: Path) -> None:
    """Make a folder, whose parent exists; one that is there already is fine."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    sync_folder(path.parent)


def write(path: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write a new file; its size in bytes. The folder's entry is the caller's to synchronise."""
    descriptor, size = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), 0
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                written = os.write(descriptor, left[:AT_ONCE])
                size, left = size + written, left[written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size


def rename(old: Path, new: Path) -> None:
    """Rename a folder within its parent folder: there is the old name or the new one, never both or half."""
    os.rename(old, new)
    sync_folder(new.parent)


def remove(path: Path) -> None:
    """Remove a folder with all it holds; links in it are removed, not followed. One that is not there is fine."""
    if not path.is_dir():
        return
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            remove(Path(entry))
        else:
            os.unlink(entry)
    os.rmdir(path)


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
