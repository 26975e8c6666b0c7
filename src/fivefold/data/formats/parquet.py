"""Parquet, read with pyarrow, which is an extra. A row is a document, its text in the column `text_key`."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.core.errors import UserError
from fivefold.data.compression import check_is_data
from fivefold.data.records import Records, given, keys_read, no_text, parts_of
from fivefold.data.source import FilePart, Source, no_documents, not_utf8

_ROWS, _TOGETHER = 64, 2**24  # rows and bytes that are decoded together, roughly
_BUFFER = 2**20  # bytes read at once of a column


@dataclass(frozen=True)
class Parquet(Records):
    """Read row group by row group, only the needed columns: memory holds a page or two and `_ROWS` records."""

    def is_packed(self, path: Path) -> bool:
        return True

    def parts(self, path: Path, source: Source, size: int) -> Sequence[tuple[FilePart, int]]:
        if source.rates:  # each answer is paired with another prompt of its file
            return ()
        where = source.at(path)
        with _readable(where), _open(path, where) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        parts: list[tuple[FilePart, int]] = []
        start = rows = before = room = 0
        for number, group in enumerate(groups):
            rows, room = rows + group.num_rows, room + group.total_byte_size
            if room >= size or number + 1 == len(groups):
                parts.append((FilePart(start, number + 1, before), room))
                start, before, room = number + 1, rows, 0
        return parts

    def records(
        self, path: Path, source: Source, part: FilePart | None = None
    ) -> Generator[tuple[str, Mapping[str, object]]]:
        where, row = source.at(path), part.rows_before if part else 0
        with _readable(where), _open(path, where) as file:
            groups = range(part.start, part.stop) if part else range(file.num_row_groups)
            parts = parts_of(file.schema_arrow.names, source)
            if parts is None:
                _check_column(file, source, where)
            keys = keys_read(file.schema_arrow.names, source, parts.keys if parts else (source.text_key,))
            unread = dict.fromkeys(file.schema_arrow.names)
            for batch in file.iter_batches(_rows(file), list(groups), columns=keys, use_threads=False):
                for number in range(batch.num_rows):
                    row += 1
                    at = f"{where}:{row}"
                    yield at, {**unread, **given({key: _value_of(batch.column(key)[number], at) for key in keys})}
        if not (row or part):
            raise no_documents(where, "the file has no rows")


def _open(path: Path, where: str) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(
            f"{where}: reading parquet needs pyarrow, which is not installed",
            fix="pip install 'fivefold[parquet]'",
            more="or write the texts to a .jsonl file",
        ) from error
    check_is_data(path, where)
    return ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)


def _rows(file: Any) -> int:
    """Number of rows to decode together."""
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    longest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(_ROWS, _TOGETHER // max(1, longest)))


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Convert errors of pyarrow about an unreadable file to `UserError`."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, NotImplementedError, MemoryError) as error:  # the bases of pyarrow's own
        raise UserError(
            f"{where}: not readable as parquet: {str(error).splitlines()[0]}", fix="copy the file from its origin again"
        ) from error


def _check_column(file: Any, source: Source, where: str) -> None:
    types = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
    if source.text_key not in types or not _holds_strings(types[source.text_key]):
        kind = f"a {types[source.text_key]}" if source.text_key in types else None
        raise no_text(types, source, where, kind=kind, likely=_largest(file, types), noun="column")


def _holds_strings(kind: Any) -> bool:
    """True for strings, stored directly or in a dictionary."""
    from pyarrow import types

    return any(
        test(kind.value_type if types.is_dictionary(kind) else kind)
        for test in (types.is_string, types.is_large_string, types.is_string_view)
    )


def _holds_integers(kind: Any) -> bool:
    from pyarrow import types

    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(test(kind) for test in tests) and bool(types.is_integer(kind.value_type))


def _largest(file: Any, types: dict[str, Any]) -> str | None:
    """The column of strings that takes most space in the first row group."""
    if not file.num_row_groups:
        return None
    group = file.metadata.row_group(0)
    columns = (group.column(i) for i in range(group.num_columns))
    sizes = {column.path_in_schema: column.total_uncompressed_size for column in columns}
    strings = [name for name, kind in types.items() if _holds_strings(kind) and name in sizes]
    return max(strings, key=lambda name: sizes[name], default=None)


def _value_of(value: Any, where: str) -> object:
    """A value of Arrow in Python; integers of a list as an array, which is not copied."""
    if value.is_valid and _holds_integers(value.type):
        return value.values.to_numpy(zero_copy_only=False)
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise not_utf8(where, error, f"offset {error.start} of the text") from error


FORMAT = Parquet(name="parquet", suffixes=(".parquet",), noun="column")
