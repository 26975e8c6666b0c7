"""Checksums of the cache and of token stores: damage is found on opening, before it is trained on.

xxh3 reads some GB/s. A file of 64 MiB or more is not read again if it was verified in the last day and not written to
since: workers trust the launcher's check, and a start takes no longer for a larger corpus.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_hexdigest

from fivefold.core import strict_json
from fivefold.core.cache import key_of

CHUNK = 2**20  # bytes under one checksum of a large file
_TRUSTED_FROM = 2**26  # bytes
_TRUSTED_SECONDS = 86400.0


class DamagedError(ValueError):
    """A file differs from what was written; the message says which, and where in it."""


def signed(tree: Mapping[str, Any], *, indent: int | None = 2) -> str:
    """JSON with a checksum of itself: see `read_signed`."""
    return json.dumps({**tree, "checksum": _sum(tree)}, indent=indent)


def read_signed(path: Path) -> dict[str, Any]:
    """Read back JSON from `signed`, without its checksum. Raises DamagedError."""
    try:
        tree = dict(json.loads(strict_json.content(path, strict_json.MOST_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path.name} cannot be read: {error}") from error
    if "checksum" not in tree:
        raise DamagedError(f"{path.name} has no checksum: it is of an earlier version")
    if tree.pop("checksum") != _sum(tree):
        raise DamagedError(f"{path.name} is not what was written: its checksum differs")
    return tree


def file_checksum(path: Path) -> str:
    """xxh3 checksum of a whole file."""
    state = xxh3_128()
    for chunk in _chunks(path):
        state.update(chunk)
    return state.hexdigest()


def check_file(path: Path, checksum: str, root: Path) -> None:
    """Raise DamagedError unless `path` has this checksum; `root` is the cache's folder."""
    try:
        if is_trusted(path, root):
            return
        if file_checksum(path) != checksum:
            raise DamagedError(f"{path.name} is not what was written: its checksum differs")
        trust(path, root)
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {error.strerror}") from error


def chunk_checksums(path: Path) -> NDArray[np.uint64]:
    """Checksums of each `CHUNK` bytes of the file, uint64 [chunks]."""
    return np.array([xxh3_64_intdigest(chunk) for chunk in _chunks(path)], np.uint64)


def check_chunks(path: Path, checksums: NDArray[np.uint64]) -> None:
    """Raise DamagedError at the first damaged chunk."""
    for number, chunk in enumerate(_chunks(path)):
        start = number * CHUNK
        if number >= len(checksums) or xxh3_64_intdigest(chunk) != int(checksums[number]):
            raise DamagedError(
                f"{path.name} is not what was written, between byte {start:,} and {start + len(chunk):,}"
            )


def is_trusted(path: Path, root: Path) -> bool:
    """True if a large file was verified in the last day and has not been touched since."""
    if path.stat().st_size < _TRUSTED_FROM:
        return False
    note = _note(path, root)
    return note.exists() and abs(time.time() - note.stat().st_mtime) < _TRUSTED_SECONDS


def trust(path: Path, root: Path) -> None:
    """Record that a large file was verified."""
    if path.stat().st_size >= _TRUSTED_FROM:
        note = _note(path, root)
        with suppress(OSError):  # a read-only or full cache: the file is read again next time
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()


def _note(path: Path, root: Path) -> Path:
    """Marker file, named by everything that a write to `path` changes, including the inode's change time."""
    stat = path.stat()
    state = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    return root / "whole" / key_of(str(path.resolve()), state)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            while len(chunk) < CHUNK and (more := file.read(CHUNK - len(chunk))):
                chunk += more
            yield chunk


def _sum(tree: Mapping[str, Any]) -> str:
    return xxh3_128_hexdigest(json.dumps(tree, sort_keys=True).encode())
