"""The content-addressed cache: an entry is built once for the same bytes and options.

An entry is a folder named by the hash of its inputs. It is written next to its final place and renamed under a file
lock, so that readers see the whole entry or none, and concurrent processes build it once.
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
from threading import Timer
from typing import IO, TypeVar

from fivefold.core.errors import UserError
from fivefold.core.files import cannot_write, expanded, replace, writing
from fivefold.core.text import say

# (stage in words, done, total): the unit is bytes of text; `done` never passes `total`.
Progress = Callable[[str, int, int], None]
Found = TypeVar("Found")

_REMEMBER_DIGEST_FROM = 2**20  # bytes; smaller files are hashed again each time (about 1 GB/s)
INSTEAD = "point FIVEFOLD_CACHE to a folder you can write to"
_TELL_AFTER = 10.0  # seconds of waiting
_SETTLED_SECONDS = 2.0  # a file changed more recently may change again within one tick of its time stamp


def say_aloud(text: str) -> None:
    """Print to standard error, which leaves standard output to the command."""
    say(text, stream=sys.stderr)


def cache_root(override: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return `override`, else `$FIVEFOLD_CACHE`, else `$XDG_CACHE_HOME/fivefold`, else `~/.cache/fivefold`. Raises
    `UserError` if the path is not UTF-8, or there is no home folder."""
    found = _named_root(environ) if override is None else override
    try:
        str(found).encode()
    except UnicodeEncodeError:  # the tokenizers library cannot open such a path
        raise UserError(f"the name of the cache folder, {str(found)!a}, is not UTF-8", fix=INSTEAD) from None
    return found


def _named_root(environ: Mapping[str, str]) -> Path:
    if named := environ.get("FIVEFOLD_CACHE"):
        return expanded(named)
    if xdg := environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "fivefold"
    try:
        return Path.home() / ".cache" / "fivefold"
    except RuntimeError:  # a container whose user id has no name
        raise UserError(
            "this user has no home folder, where the cache would be", fix=f"set HOME, or {INSTEAD}"
        ) from None


def key_of(*parts: object) -> str:
    """Hash the JSON-like `parts` (str, int, float, bool, None, lists and dicts of them) to a name."""
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def entry(folder: Path, *, read: Callable[[Path], Found], build: Callable[[Path, str], object]) -> Found:
    """Return `read(folder)`; first build the folder if it is missing or `read` raises OSError, ValueError or UserError.

    `build(empty folder, damage)`: `damage` is the message of that error, "" for a missing folder. If several processes
    call this at once, one builds and the others wait. Raises UserError if the cache cannot be written.
    """

    def read_it() -> Found:
        if not folder.exists():
            raise ValueError  # without a message: nothing is damaged
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
    """Hash the contents of `path`. The digest of a large file is cached by path, size and time stamp."""
    stat = path.stat()
    if stat.st_size < _REMEMBER_DIGEST_FROM or time.time() - stat.st_mtime < _SETTLED_SECONDS:
        return _hash_file(path)
    note = root / "digests" / key_of(str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    with suppress(OSError, ValueError):
        digest, checksum = note.read_text(encoding="ascii").split()
        if checksum == key_of(note.name, digest):  # a damaged note could name the tokens of another file
            return digest
    digest = _hash_file(path)
    with suppress(UserError):  # a read-only or full cache can still be read
        write_atomically(note, f"{digest} {key_of(note.name, digest)}")
    return digest


def digest_of_contents(folder: Path) -> str:
    """A hash of the contents of the weights in a folder."""
    root = cache_root()
    return key_of([[path.name, file_digest(path, root)] for path in sorted(folder.glob("*.safetensors"))])


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
    """Hold the lock of `folder` against other processes. Raises UserError if the cache cannot be locked."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise cannot_write(f"to the cache folder {folder.parent}", error, instead=INSTEAD) from error
    with lock:
        try:
            _take(lock, folder)
        except OSError as error:  # a filesystem without locks
            raise cannot_write(f"to the cache folder {folder.parent}", error, instead=INSTEAD) from error
        yield


def _take(lock: IO[str], folder: Path) -> None:
    """Wait for a lock. A long wait is told: its holder may be stopped."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    with telling(f"waiting for another process, which is at work on {folder}; fuser {lock.name} shows its number"):
        fcntl.flock(lock, fcntl.LOCK_EX)


@contextmanager
def telling(text: str, say: Callable[[str], None] = say_aloud) -> Iterator[None]:
    timer = Timer(_TELL_AFTER, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _build_beside(folder: Path, build: Callable[[Path], object]) -> None:
    prefix = f".{folder.name}."
    for left_behind in folder.parent.glob(f"{prefix}*"):  # we hold the lock, so a dead builder left these
        shutil.rmtree(left_behind, ignore_errors=True)
    with writing(folder.parent, instead=INSTEAD):
        beside = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        build(beside)
        beside.chmod(0o755)
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
        else:  # put there by a person or a disk repair
            folder.unlink(missing_ok=True)
        beside.rename(folder)
    except OSError as error:
        raise UserError(
            f"cannot write {folder}: {error.strerror or error}", fix="free space, or move FIVEFOLD_CACHE"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
