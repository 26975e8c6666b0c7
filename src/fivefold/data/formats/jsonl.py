"""JSON Lines: a record is a document, its text under `text_key`. Blank lines are passed over."""

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.data.compression import lines_of, opened
from fivefold.data.records import Records
from fivefold.data.source import Source, no_documents, not_utf8


@dataclass(frozen=True)
class JsonLines(Records):
    """Read line by line: memory holds one record."""

    def records(self, path: Path, source: Source) -> Generator[tuple[str, Mapping[str, object]]]:
        where, is_empty = source.at(path), True
        with opened(path, where) as file:
            for row, line in lines_of(file, where):
                if line := line.removeprefix(b"\xef\xbb\xbf" if row == 1 else b"").strip():
                    is_empty, at = False, f"{where}:{row}"
                    yield at, json_object(_parsed(line, at), at, fix='one {"text": "..."} per line')
        if is_empty:
            raise no_documents(f"{where}:1")


def json_object(record: object, where: str, *, fix: str) -> Mapping[str, object]:
    """What was read from JSON as the record that it should be. Raises UserError."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON {type(record).__name__}, not an object", fix=fix)
    return record


def _parsed(line: bytes, where: str) -> object:
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


FORMAT = JsonLines(name="jsonl", suffixes=(".jsonl", ".ndjson"))
