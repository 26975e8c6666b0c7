"""Parquet, and the Arrow files of a folder of `datasets.save_to_disk`. Read with pyarrow, which is an extra.

A row is a document, its text in the column `text_key`.
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.core.cache import file_digest, key_of
from fivefold.core.errors import UserError
from fivefold.data.compression import check_is_data
from fivefold.data.records import Records, given, keys_read, no_text, parts_of
from fivefold.data.source import Part, Source, file_in, no_documents, not_utf8

_ROWS, _TOGETHER = 64, 2**24  # rows and bytes that are decoded together, roughly
_BUFFER = 2**20  # bytes read at once of a column


@dataclass(frozen=True)
class Parquet(Records):
    """Read row group by row group, only the needed columns: memory holds a page or two and `_ROWS` records."""

    def is_packed(self, path: Path) -> bool:
        return True

    def records(self, path: Path, source: Source) -> Generator[tuple[str, Mapping[str, object]]]:
        is_empty = True
        with closing(self._records(path, source, None)) as records:
            for record in records:
                is_empty = False
                yield record
        if is_empty:
            raise no_documents(source.at(path), "the file has no rows")

    def parts(self, path: Path, source: Source, size: int) -> Sequence[tuple[Part, int]]:
        if source.rates:  # each answer is paired with another prompt of its file
            return ()
        where = source.at(path)
        with readable(where, "parquet"), _open(path, where) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        parts: list[tuple[Part, int]] = []
        start = rows = before = room = 0
        for number, group in enumerate(groups):
            rows, room = rows + group.num_rows, room + group.total_byte_size
            if room >= size or number + 1 == len(groups):
                parts.append((Part(start, number + 1, before), room))
                start, before, room = number + 1, rows, 0
        return parts

    def records_of(self, part: Part, path: Path, source: Source) -> Generator[tuple[str, Mapping[str, object]]]:
        return self._records(path, source, part)

    def _records(self, path: Path, source: Source, part: Part | None) -> Generator[tuple[str, Mapping[str, object]]]:
        where, row = source.at(path), part.rows_before if part else 0
        with readable(where, "parquet"), _open(path, where) as file:
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
                    yield at, {**unread, **given({key: value_of(batch.column(key)[number], at) for key in keys})}


def _open(path: Path, where: str) -> Any:
    with needs_pyarrow(where, "parquet"):
        from pyarrow.parquet import ParquetFile
    check_is_data(path, where)
    return ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)


@contextmanager
def needs_pyarrow(where: str, kind: str) -> Iterator[None]:
    """Inside, convert a failing import of pyarrow to `UserError`."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{where}: reading {kind} needs pyarrow, which is not installed",
            fix="pip install 'fivefold[parquet]'",
            more="or write the texts to a .jsonl file",
        ) from error


def _rows(file: Any) -> int:
    """Number of rows to decode together."""
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    longest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(_ROWS, _TOGETHER // max(1, longest)))


@contextmanager
def readable(where: str, kind: str) -> Iterator[None]:
    """Convert errors of pyarrow about an unreadable file to `UserError`."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, NotImplementedError, MemoryError) as error:  # the bases of pyarrow's own
        raise UserError(
            f"{where}: not readable as {kind}: {str(error).splitlines()[0]}", fix="copy the file from its origin again"
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
    """True for lists of integers."""
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


def value_of(value: Any, where: str) -> object:
    """A value of Arrow in Python; integers of a list as an array, which is not copied."""
    if value.is_valid and _holds_integers(value.type):
        return value.values.to_numpy(zero_copy_only=False)
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise not_utf8(where, error, f"offset {error.start} of the text") from error


FORMAT = Parquet(name="parquet", suffixes=(".parquet",), noun="column")


# ---- folders of `datasets.save_to_disk`, whose state.json lists Arrow files ------------------------------------------

_STATE, _SPLITS = "state.json", "dataset_dict.json"


@dataclass(frozen=True)
class ArrowFolder(Records):
    """A row is a document: its token ids in `input_ids`, else as in Parquet. Files are memory-mapped, and read one
    record batch after the other, of the needed columns."""

    def files(self, path: Path, source: Source, root: Path) -> Sequence[Path] | None:
        folder = _split(path, source)
        return (folder,) if (folder / _STATE).is_file() and (folder / "dataset_info.json").is_file() else None

    def members(self, path: Path) -> Sequence[Path]:
        return _files(path, str(path))

    def digest(self, path: Path, root: Path) -> str:
        return key_of(*(file_digest(file, root) for file in self.members(path)))

    def size(self, path: Path) -> int:
        return sum(file.stat().st_size for file in path.glob("*.arrow"))

    def records(self, path: Path, source: Source) -> Generator[tuple[str, Mapping[str, object]]]:
        with needs_pyarrow(source.at(path), "Arrow"):
            import pyarrow as pa
        is_empty = True
        for file in _files(path, source.at(path)):
            where, rows = source.at(file), 0
            with readable(where, "Arrow"), pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as batches:
                for batch in batches:
                    yield from self._rows(batch, source, where, rows)
                    rows += batch.num_rows
            is_empty = is_empty and not rows
        if is_empty:
            raise no_documents(source.at(path), "the dataset has no rows")

    def _rows(self, batch: Any, source: Source, where: str, before: int) -> Generator[tuple[str, Mapping[str, object]]]:
        names = batch.schema.names
        parts = self.keys_of(names, source)
        keys = keys_read(names, source, parts.keys if parts else (source.text_key,))
        unread = dict.fromkeys(names)
        for key in keys:  # Arrow itself does not check the offsets of a file, and would read beyond its end
            batch.column(key).validate(full=True)
        for number in range(batch.num_rows):
            at = f"{where}:{before + number + 1}"
            yield at, {**unread, **given({key: value_of(batch.column(key)[number], at) for key in keys})}


def _split(path: Path, source: Source) -> Path:
    """The folder of the only split of a `DatasetDict`; else `path`. Raises `UserError` for several."""
    if not (path / _SPLITS).is_file():
        return path
    splits = _read(path / _SPLITS, source.at(path)).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits) or not splits:
        raise UserError(f"{source.at(path)}: {_SPLITS} names no splits", fix="name the folder of one split")
    if len(splits) > 1:
        raise UserError(
            f"{source.at(path)} holds the splits {', '.join(splits)}",
            fix=f"name the one to train on: {path / ('train' if 'train' in splits else splits[0])}",
        )
    return path / Path(splits[0]).name


def _files(folder: Path, where: str) -> list[Path]:
    state = _read(folder / _STATE, where)
    if state.get("_indices_files"):
        raise UserError(
            f"{where}: rows that an index selects", fix="write it again: flatten_indices().save_to_disk(...)"
        )
    listed = state.get("_data_files")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    names = [str(entry.get("filename")) for entry in entries]
    if not names or not all(Path(name).name == name for name in names):
        raise UserError(f"{where}: {_STATE} names no files of this folder", fix="write it again by save_to_disk")
    if len(set(names)) < len(names):  # a small folder could fill the disk
        raise UserError(f"{where}: {_STATE} names a file twice", fix="write it again by save_to_disk")
    files = [(name, file_in(folder, name)) for name in names]
    for name in (name for name, file in files if file is None):
        raise UserError(f"{where}: {name[:256]}, which {_STATE} names, is not there", fix="copy the whole folder again")
    return [file for _, file in files if file]


def _read(path: Path, where: str) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {path.name} cannot be read: {error}", fix="copy the whole folder again") from error
    return tree if isinstance(tree, dict) else {}


FOLDER = ArrowFolder(name="datasets", noun="column", tokens_first=True)
