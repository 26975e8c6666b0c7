"""The content-addressed cache: what was built once from the same bytes and options is never built again.

An entry is a folder named by the hash of everything that went into it. It is written beside its final place and renamed
there, under a file lock, so that a reader sees the whole entry or none and concurrent processes build it once.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

from fivefold.core.errors import UserError
from fivefold.core.files import cannot_write, expanded, replace, writing
from fivefold.core.terminal import say

# (stage in words, done, total): the unit is bytes of text; `done` never passes `total`.
Progress = Callable[[str, int, int], None]
Found = TypeVar("Found")

_REMEMBER_DIGEST_FROM = 2**20  # bytes; smaller files are hashed again each time (about 1 GB/s)
INSTEAD = "point FIVEFOLD_CACHE to a folder you can write to"
_SETTLED_SECONDS = 2.0  # a file changed more recently may change again within one tick of its time stamp


def say_aloud(text: str) -> None:
    """To the screen, beside whatever standard output is for."""
    say(text, stream=sys.stderr)


def cache_root(override: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """`override`, else `$FIVEFOLD_CACHE`, else `$XDG_CACHE_HOME/fivefold`, else `~/.cache/fivefold`. Raises `UserError`
    where that is not UTF-8, or there is no home folder."""
    found = _named_root(environ) if override is None else override
    try:
        str(found).encode()
    except UnicodeEncodeError:  # the library of tokenizers opens no such file
        raise UserError(f"the name of the cache folder, {str(found)!a}, is not UTF-8", fix=INSTEAD) from None
    return found


def _named_root(environ: Mapping[str, str]) -> Path:
    if named := environ.get("FIVEFOLD_CACHE"):
        return expanded(named)
    if xdg := environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "fivefold"
    try:
        return Path.home() / ".cache" / "fivefold"
    except RuntimeError:  # a container that runs as a number without a name
        raise UserError(
            "this user has no home folder, where the cache would be", fix=f"set HOME, or {INSTEAD}"
        ) from None


def key_of(*parts: object) -> str:
    """A name for the JSON-like `parts` (str, int, float, bool, None, lists and dicts of them)."""
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def entry(folder: Path, *, read: Callable[[Path], Found], build: Callable[[Path, str], object]) -> Found:
    """What `read(folder)` gives, of a folder that is built first if it is not there or `read` raises `OSError`,
    `ValueError` or `UserError`: `build(empty folder, damage)`, where `damage` is what `read` said, "" for no folder.

    Of several processes that ask at once one builds and the others wait.
    Raises UserError if the cache cannot be written.
    """

    def read_it() -> Found:
        if not folder.exists():
            raise ValueError  # without a word: nothing is damaged
        return read(folder)

    with suppress(OSError, ValueError, UserError):
        return read_it()
    with locked(folder):
        try:
            return read_it()  # another process may have built it while this one waited
        except (OSError, ValueError, UserError) as error:
            damage = str(error)
        _build_beside(folder, lambda beside: build(beside, damage))
    return read(folder)


def file_digest(path: Path, root: Path) -> str:
    """Hash of the contents of `path`. A big file's digest is remembered by its place, size and time stamp."""
    stat = path.stat()
    if stat.st_size < _REMEMBER_DIGEST_FROM or time.time() - stat.st_mtime < _SETTLED_SECONDS:
        return _hash_file(path)
    note = root / "digests" / key_of(str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    with suppress(OSError, ValueError):
        digest, checksum = note.read_text(encoding="ascii").split()
        if checksum == key_of(note.name, digest):  # a damaged one could name the tokens of another file
            return digest
    digest = _hash_file(path)
    with suppress(UserError):  # of a cache that is read-only or full, what is there can be used all the same
        write_atomically(note, f"{digest} {key_of(note.name, digest)}")
    return digest


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that no reader ever sees half of it. Raises UserError if it cannot be written."""
    with writing(path, instead=INSTEAD):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text.encode())


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(blake2b, digest_size=16)).hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """While no other process is here with the same `folder`. Raises UserError where the cache cannot be locked."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise cannot_write(f"to the cache folder {folder.parent}", error, instead=INSTEAD) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # of a filesystem that knows no locks
            raise cannot_write(f"to the cache folder {folder.parent}", error, instead=INSTEAD) from error
        yield


def _build_beside(folder: Path, build: Callable[[Path], object]) -> None:
    prefix = f".{folder.name}."
    for left_behind in folder.parent.glob(f"{prefix}*"):  # the lock is ours: a builder that died left these
        shutil.rmtree(left_behind, ignore_errors=True)
    with writing(folder.parent, instead=INSTEAD):
        beside = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        build(beside)
        beside.chmod(0o755)
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
        else:  # what a person or a repair of the disk has put there
            folder.unlink(missing_ok=True)
        beside.rename(folder)
    except OSError as error:
        raise UserError(
            f"cannot write {folder}: {error.strerror or error}", fix="free space, or move FIVEFOLD_CACHE"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
