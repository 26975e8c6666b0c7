"""Plain text, Markdown among it: a file is a document."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.data.compression import opened
from fivefold.data.source import Format, Source, is_binary


@dataclass(frozen=True)
class Txt(Format):
    """UTF-8 text, kept as it is but for a byte order mark."""

    def documents(self, path: Path, source: Source) -> Iterator[str]:
        with opened(path, f"{source.label}: {path}") as file:
            raw = file.read()
        yield decode(raw, path, source)


def decode(raw: bytes, path: Path, source: Source) -> str:
    """The text of a file. Raises UserError for an empty file or invalid UTF-8 (with line and byte offset)."""
    if not raw:
        raise UserError(f"{source.label}: {path}:1: the file is empty", fix="remove it, or name the files with a glob")
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        convert = f"convert it, if it is Latin-1: iconv -f latin1 -t utf-8 {path.name} > fixed{path.suffix}"
        raise UserError(
            f"{source.label}: {path}:{line}: not UTF-8: byte 0x{raw[error.start]:02x} at byte offset {error.start}",
            fix="it is not text: write its texts to a .txt or .jsonl file" if is_binary(raw) else convert,
        ) from error


FORMAT = Txt(name="txt", suffixes=(".txt", ".text", ".md", ".markdown"))
