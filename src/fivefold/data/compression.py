"""Compressed texts: `notes.jsonl.gz` is read as `notes.jsonl`, as a stream.

The expanded size is limited, so that a small file cannot fill the memory or the disk: text shrinks to a third or a
tenth, and a file that grows two hundredfold is a mistake or an attack. A line, or a file with one document, is read as
a whole and has a limit of its own.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from fivefold.core.errors import UserError
from fivefold.core.folder_config import is_gguf

MOST_BYTES = 2**28  # most bytes in memory at once: a line, a record or a .json file
_MOST_TIMES = 200  # growth limit of a compressed file ...
_ALWAYS_BYTES = 2**26  # ... but this size is always allowed
_BUFFER = 2**18  # bytes expanded together
_MODULES = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "pyarrow", ".zstd": "pyarrow"}


def _expanded(path: Path) -> Any:
    """The stream of the library, which is imported only now: some Pythons are built without one of them."""
    module = import_module(_MODULES[path.suffix.lower()])
    return module.input_stream(str(path), compression="zstd") if module.__name__ == "pyarrow" else module.open(path)


def ending(path: Path) -> str:
    """The suffix of the name, in lower case, without that of a compression: `.jsonl` of `notes.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in _MODULES:
        return suffixes[0] if len(suffixes) == 2 else ""
    return suffixes[-1] if suffixes else ""


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in _MODULES


@contextmanager
def opened(path: Path, where: str) -> Iterator[IO[bytes]]:
    """The bytes of a file, expanded if it is compressed; `where` names it in errors.

    Raises `UserError`, here and on use, for a file that is truncated, does not match its suffix, or expands too much.
    """
    check_is_data(path, where)
    if not is_compressed(path):
        with path.open("rb") as file:
            yield file
        return
    with _readable(path, where), _expanded(path) as expanded:
        yield io.BufferedReader(_Bounded(expanded, path, where), _BUFFER)


def check_is_data(path: Path, where: str) -> None:
    """Raise `UserError` for a file with the weights of a model."""
    if is_gguf(path):
        raise UserError(
            f"{where}: a GGUF file, which holds the weights of a model and no text",
            fix="name texts here, and the model by model.name_or_path, as a Hugging Face folder",
            more="fivefold docs start/first_fine_tune",
        )


def read_most(file: IO[bytes], most: int) -> bytes:
    """All of a file, or a little more than `most` bytes, in chunks: a large `read` allocates its full size."""
    chunks, size = [], 0
    while size <= most and (chunk := file.read(2**20)):
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks)


def lines_of(file: IO[bytes], where: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, from 1. Raises `UserError` for a line that is too long for memory."""
    row = 0
    while line := file.readline(MOST_BYTES + 1):
        row += 1
        if len(line) > MOST_BYTES:
            raise UserError(
                f"{where}:{row}: a line of more than {MOST_BYTES // 2**20} MiB", fix="cut the text into several records"
            )
        yield row, line


class _Bounded(io.RawIOBase):
    """A stream that raises `UserError` when it expands far beyond its input."""

    def __init__(self, source: IO[bytes], path: Path, where: str) -> None:
        self._source, self._where, self._given = source, where, 0
        self._most = max(_ALWAYS_BYTES, _MOST_TIMES * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self._source.read(len(buffer))
        self._given += len(chunk)
        if self._given > self._most:
            raise UserError(
                f"{self._where}: expands to more than {_MOST_TIMES} times its size",
                fix="expand it yourself, if that is meant, and name the file that comes out",
            )
        buffer[: len(chunk)] = chunk
        return len(chunk)


@contextmanager
def _readable(path: Path, where: str) -> Iterator[None]:
    """Convert errors of the decompressors to `UserError`."""
    from lzma import LZMAError
    from zlib import error as zlib_error

    kind = path.suffix.lower().removeprefix(".")
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"{where}: reading .zst needs pyarrow, which is not installed",
            fix="pip install 'fivefold[parquet]'",
            more="or expand the file: zstd -d",
        ) from error
    except (EOFError, OSError, LZMAError, zlib_error) as error:
        is_cut = isinstance(error, EOFError) or "Truncated" in str(error)  # as gzip and pyarrow say it
        what = f"the {kind} file is cut short" if is_cut else f"not readable as {kind}: {error}"
        raise UserError(f"{where}: {what}", fix="copy the file from its origin again") from error
