"""A folder of `datasets.save_to_disk`: Arrow files, listed in `state.json`. Read with pyarrow, which is an extra."""

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.core.cache import file_digest, key_of
from fivefold.core.errors import UserError
from fivefold.data.formats.parquet import needs_pyarrow, readable, value_of
from fivefold.data.records import Records, given, keys_read
from fivefold.data.source import Source, file_in, no_documents

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


FORMAT = ArrowFolder(name="datasets", noun="column", tokens_first=True)
