"""JSON: one list of records, or one record, each a document with its text under `text_key`. Read as a whole."""

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.data.compression import MOST_BYTES, opened, read_most
from fivefold.data.formats.jsonl import json_object
from fivefold.data.records import Records
from fivefold.data.source import Source, not_utf8


@dataclass(frozen=True)
class Json(Records):
    """Memory holds the file and its records, several times its size: hence a limit, and JSON Lines beyond it."""

    def records(self, path: Path, source: Source) -> Generator[tuple[str, Mapping[str, object]]]:
        for number, record in enumerate(_read(path, source), start=1):
            at = f"{source.at(path)}: record {number}"
            yield at, json_object(record, at, fix='a list of {"text": "..."}')


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
        what = "more than one JSON value" if error.msg == "Extra data" else f"not JSON: {error.msg}"
        raise UserError(f"{where}:{error.lineno}: {what} at column {error.colno}", fix=as_lines) from error
    except RecursionError as error:
        raise UserError(f"{where}: JSON nested too deeply", fix="remove the record") from error
    records = tree if isinstance(tree, list) else [tree]
    if not records:
        raise UserError(f"{where}: the list is empty", fix="remove the file, or name the files with a glob")
    return records


FORMAT = Json(name="json", suffixes=(".json",))
