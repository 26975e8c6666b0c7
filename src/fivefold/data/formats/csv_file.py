"""CSV and TSV: the first row names the columns, every other row is a document, its text in the column `text_key`."""

import csv
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.core.units import many
from fivefold.data.compression import MOST_BYTES, ending, lines_of, opened
from fivefold.data.records import Records, no_text, parts_of
from fivefold.data.source import FilePart, Source, no_documents, not_utf8


@dataclass(frozen=True)
class Csv(Records):
    """CSV as Excel and pandas write it, in UTF-8: fields in double quotes may contain line ends, and quotes are
    doubled. Read row by row, with one row in memory. Every row has the fields of the first one."""

    def records(
        self, path: Path, source: Source, part: FilePart | None = None
    ) -> Generator[tuple[str, Mapping[str, object]]]:
        where, is_empty = source.at(path), True
        with closing(_rows(path, where)) as rows:
            header = _header(path, next(rows, (1, []))[1], source)
            for line, row in rows:
                if len(row) != len(header):
                    raise UserError(
                        f"{where}:{line}: {many(len(row), 'field')}, and the first row has {len(header)}",
                        fix='put a field that holds the separator or a line end in quotes: "..."',
                    )
                is_empty = False
                record: dict[str, object] = dict(zip(header, row, strict=True))
                numbers = {key: _number(record[key]) for key in source.numbers if key in record}
                yield f"{where}:{line}", record | numbers
        if is_empty:
            raise no_documents(where, "no row below the names of the columns")


def _number(field: object) -> object:
    """The number that a field is, or the field itself."""
    try:
        return float(str(field))
    except ValueError:
        return field


def _header(path: Path, names: list[str], source: Source) -> list[str]:
    """The column names, with that of the text exactly once."""
    where = f"{source.at(path)}:1"
    if not names:
        raise no_documents(where)
    parts = parts_of(names, source)
    if not parts and source.text_key not in names:
        other = next((delimiter for delimiter in (";", "\t", "|") if len(names) == 1 and delimiter in names[0]), None)
        if other:
            raise UserError(f"{where}: the fields are separated by {other!r}", fix="write them as .csv with commas")
        refused = no_text(names, source, where, likely=None, noun="column")
        raise UserError(refused.what, fix=refused.fix, more=refused.more or "the first row names the columns")
    for key in parts.keys if parts else (source.text_key,):
        if names.count(key) > 1:
            raise UserError(f"{where}: {names.count(key)} columns are named {key!r}", fix="name one")
    return names


def _rows(path: Path, where: str) -> Generator[tuple[int, list[str]]]:
    """The rows that are not blank, each with its first line number."""
    with _long_fields(), opened(path, where) as file:
        reader = csv.reader(
            _decoded(lines_of(file, where), where), delimiter="\t" if ending(path) == ".tsv" else ",", strict=True
        )
        line = 1
        try:
            for row in reader:
                if row:
                    yield line, row
                line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(
                f"{where}:{line}: not CSV: {error} (read up to line {reader.line_num})",
                fix="a field that holds a quote is quoted, and the quote in it doubled",
            ) from error


def _decoded(lines: Iterator[tuple[int, bytes]], where: str) -> Iterator[str]:
    for row, line in lines:
        try:
            yield line.decode("utf-8-sig" if row == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(f"{where}:{row}", error, f"offset {error.start} of the line") from error


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift the csv module's process-wide limit of 128 KiB per field."""
    before = csv.field_size_limit(MOST_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


FORMAT = Csv(name="csv", suffixes=(".csv", ".tsv"), noun="column")
