"""JSON Lines: a record is a document, its text under `text_key`. Blank lines are passed over."""

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.data.compression import lines_of, opened
from fivefold.data.records import text_of
from fivefold.data.source import Records, Source, no_documents, not_utf8


@dataclass(frozen=True)
class JsonLines(Records):
    """Read line by line: memory holds one record."""

    def documents(self, path: Path, source: Source) -> Iterator[str]:
        row, where = 0, f"{source.label}: {path}"
        for row, line in _lines(path, where):
            yield _text(line, source, f"{where}:{row}")
        if not row:
            raise no_documents(f"{where}:1")

    def columns(self, path: Path, source: Source) -> tuple[str, ...]:
        where = f"{source.label}: {path}"
        with closing(_lines(path, where)) as lines:
            first = next((parsed(line, f"{where}:{row}") for row, line in lines), None)
        return tuple(first) if isinstance(first, dict) else ()


def _lines(path: Path, where: str) -> Generator[tuple[int, bytes]]:
    """Those that are not blank."""
    with opened(path, where) as file:
        for row, line in lines_of(file, where):
            if line := line.removeprefix(b"\xef\xbb\xbf" if row == 1 else b"").strip():
                yield row, line


def _text(line: bytes, source: Source, where: str) -> str:
    record = parsed(line, where)
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON {type(record).__name__}, not an object", fix='one {"text": "..."} per line')
    text = text_of(record, source, where)
    if b"\\u" in line:
        refuse_surrogates(text, where)
    return text


def parsed(line: bytes, where: str) -> object:
    """The JSON of a line. Raises UserError."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise not_utf8(where, error, f"offset {error.start} of the row") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON: {error.msg} at column {error.colno}",
            fix="one JSON object per line; a file that is one JSON list is read by format json",
        ) from error
    except RecursionError as error:
        raise UserError(f"{where}: JSON nested too deeply", fix="remove the record") from error


def refuse_surrogates(text: str, where: str) -> None:
    """JSON can say half a character. Raises UserError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: half of a surrogate pair, \\u{ord(text[error.start]):04x}, at character {error.start}",
            fix="it stands for no character; remove it or write the file again from its origin",
        ) from error


FORMAT = JsonLines(name="jsonl", suffixes=(".jsonl", ".ndjson"))
