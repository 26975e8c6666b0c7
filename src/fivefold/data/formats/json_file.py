"""JSON, a list of records or one record, and JSON Lines, one record per line: a record is a document, its text under
`text_key`."""

import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from fivefold.core.errors import UserError
from fivefold.data.compression import MOST_BYTES, lines_of, opened, read_most
from fivefold.data.records import Records
from fivefold.data.source import FilePart, Source, no_documents, not_utf8

_CHUNK = 2**20  # bytes
_MARK = b"\xef\xbb\xbf"  # byte order mark
_LONG = re.compile(rb"(?<=[\s:,\[])-?\d{4301}")


@dataclass(frozen=True)
class Json(Records):
    """Read as a whole: memory holds the file and its records, several times its size. So the size is limited, and
    larger files have to be JSON Lines."""

    def records(
        self, path: Path, source: Source, part: FilePart | None = None
    ) -> Generator[tuple[str, Mapping[str, object]]]:
        for number, record in enumerate(_read(path, source), start=1):
            at = f"{source.at(path)}: record {number}"
            yield at, _object(record, at, fix='a list of {"text": "..."}')


def _read(path: Path, source: Source) -> list[object]:
    where = source.at(path)
    with opened(path, where) as file:
        raw = read_most(file, MOST_BYTES)
    as_lines = f"if every line is a record: {source.option('format', 'jsonl')}"
    if len(raw) > MOST_BYTES:
        raise UserError(
            f"{where}: a .json file of more than {MOST_BYTES // 2**20} MiB, which is read as a whole",
            fix=f"write a record per line: jq -c '.[]' {path.name} > {path.stem}.jsonl",
            more=as_lines,
        )
    try:
        tree = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise not_utf8(f"{where}:{line}", error, f"byte offset {error.start}") from error
    except json.JSONDecodeError as error:
        what = "more than one JSON value" if error.msg == "Extra data" else f"not JSON: {error.msg.removesuffix(' at')}"
        raise UserError(f"{where}:{error.lineno}: {what} at column {error.colno}", fix=as_lines) from error
    except RecursionError as error:
        raise UserError(f"{where}: JSON nested too deeply", fix="remove the record") from error
    except ValueError as error:
        line = next((raw.count(b"\n", 0, match.start()) + 1 for match in _LONG.finditer(raw)), 1)
        raise _too_long(f"{where}:{line}") from error
    inner = tree.get("data") if isinstance(tree, dict) else None
    if isinstance(inner, list) and inner and isinstance(inner[0], dict) and not inner[0].keys() & {"role", "from"}:
        raise UserError(
            f"{where}: its records are in a list under 'data', which would be one conversation",
            fix=f"write a record per line: jq -c '.data[]' {path.name} > {path.stem}.jsonl",
        )
    records = tree if isinstance(tree, list) else [tree]
    if not records:
        raise UserError(f"{where}: the list is empty", fix="remove the file, or name the files with a glob")
    return records


@dataclass(frozen=True)
class JsonLinesFormat(Records):
    """Read line by line, with one record in memory. Blank lines are skipped.

    A part of a file has the lines that begin in it. Three kinds of files are not divided: compressed ones, those of
    rated answers, each of which is paired with another prompt of its file, and those without a record, which are an
    error of the whole file.
    """

    def records(
        self, path: Path, source: Source, part: FilePart | None = None
    ) -> Generator[tuple[str, Mapping[str, object]]]:
        where, is_empty = source.at(path), True
        with opened(path, where) as file:
            for record in _objects(_lines(file, part, where) if part else lines_of(file, where), where):
                is_empty = False
                yield record
        if is_empty and not part:
            raise no_documents(f"{where}:1")

    def parts(self, path: Path, source: Source, size: int) -> Sequence[tuple[FilePart, int]]:
        end = path.stat().st_size
        if self.is_packed(path) or source.rates or not _has_record(path, source.at(path)):
            return ()
        stops = [(start, min(start + size, end)) for start in range(0, end, size)]
        # A byte order mark stands in the first row alone.
        return [(FilePart(start, stop, rows_before=int(start > 0)), stop - start) for start, stop in stops]

    def counted(self, path: Path, source: Source, part: FilePart) -> FilePart:
        left, rows, last = part.start, 0, b"\n"
        with path.open("rb") as file:
            while chunk := file.read(min(left, _CHUNK)):
                left, rows, last = left - len(chunk), rows + chunk.count(b"\n"), chunk[-1:]
        return replace(part, rows_before=rows + (last != b"\n"))  # with the line that runs into the part


def _has_record(path: Path, where: str) -> bool:
    with path.open("rb") as file:
        return any(line.removeprefix(_MARK).strip() for _, line in lines_of(file, where))


def _lines(file: IO[bytes], part: FilePart, where: str) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a part of a file, with their numbers."""
    file.seek(max(0, part.start - 1))
    while part.start and (rest := file.readline(_CHUNK)) and not rest.endswith(b"\n"):
        pass
    begin = file.tell()
    for row, line in lines_of(file, where) if begin < part.stop else ():
        yield part.rows_before + row, line
        begin += len(line)
        if begin >= part.stop:
            return


def _objects(lines: Iterable[tuple[int, bytes]], where: str) -> Generator[tuple[str, Mapping[str, object]]]:
    for row, line in lines:
        if line := line.removeprefix(_MARK if row == 1 else b"").strip():
            at = f"{where}:{row}"
            yield at, _object(_parsed(line, at), at, fix='one {"text": "..."} per line')


def _parsed(line: bytes, where: str) -> object:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise not_utf8(where, error, f"offset {error.start} of the row") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}",
            fix="one JSON object per line; a file that is one JSON list is read by format json",
        ) from error
    except RecursionError as error:
        raise UserError(f"{where}: JSON nested too deeply", fix="remove the record") from error
    except ValueError as error:
        raise _too_long(where) from error


def _too_long(where: str) -> UserError:
    return UserError(f"{where}: a number of more digits than Python reads (4,300)", fix="write it as a string")


def _object(record: object, where: str, *, fix: str) -> Mapping[str, object]:
    """Return the JSON value as a record. Raises `UserError` if it is no object."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON {type(record).__name__}, not an object", fix=fix)
    return record


JSON = Json(name="json", suffixes=(".json",))
JSON_LINES = JsonLinesFormat(name="jsonl", suffixes=(".jsonl", ".ndjson"))
