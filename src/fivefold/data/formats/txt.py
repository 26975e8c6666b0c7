"""Plain text, Markdown among it: a file is a document."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fivefold.data.compression import opened
from fivefold.data.source import Format, Source, is_binary, no_documents, not_utf8


@dataclass(frozen=True)
class Txt(Format):
    """UTF-8 text, kept as it is but for a byte order mark."""

    def documents(self, path: Path, source: Source) -> Iterator[str]:
        with opened(path, source.at(path)) as file:
            raw = file.read()
        yield decode(raw, path, source)


def decode(raw: bytes, path: Path, source: Source) -> str:
    """The text of a file. Raises UserError for an empty file or invalid UTF-8 (with line and byte offset)."""
    if not raw:
        raise no_documents(f"{source.at(path)}:1")
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        convert = f"convert it, if it is Latin-1: iconv -f latin1 -t utf-8 {path.name} > fixed{path.suffix}"
        fix = "it is not text: write its texts to a .txt or .jsonl file" if is_binary(raw) else convert
        raise not_utf8(f"{source.at(path)}:{line}", error, f"byte offset {error.start}", fix=fix) from error


FORMAT = Txt(name="txt", suffixes=(".txt", ".text", ".md", ".markdown"))
