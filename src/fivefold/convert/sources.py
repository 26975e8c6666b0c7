"""Common parts of the datasets of all trainers: their places, the form of turns, the keys of records."""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fivefold.convert.given import Given

Source = dict[str, Any]  # an entry of `data.train`; `changed`: the remark on it

ROLES = {"user": {"user", "human"}, "assistant": {"assistant", "gpt"}, "system": {"system"}, "tool": {"tool"}}
PROPERTIES = {"role": {"role", "from"}, "content": {"content", "value"}}
_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".md", ".gz", ".zst", ".xz", ".bz2")
_BUILDERS = ("json", "csv", "text", "parquet", "arrow")  # names in the `datasets` library, used in place of a path
# Keys of a dataset that `at_its_paths` reads, and those that change nothing.
_READ = ("path", "name", "split", "revision", "type", "data_files")
_HARMLESS = ("ds_type", "trust_remote_code", "preprocess_shards")


def refuse_others(given: Given, where: str, about: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse every active key of a dataset that is not `known`; list those that change nothing."""
    for key, value in about.items():
        if key in _HARMLESS:
            given.found.left[f"{where}.{key}"] = "speed and memory, not what is trained"
        if key not in (*known, *_READ, *_HARMLESS) and value not in (None, False, "", [], {}):
            given.refuse(f"{where}.{key}", "it is not converted")


def at_its_paths(given: Given, where: str, about: Mapping[str, Any], form: Source) -> Iterator[Source]:
    """A source for each file of a dataset, or one for its name on the hub."""
    path, files, split = str(about.get("path") or ""), about.get("data_files"), about.get("split")
    if split and re.search(r"[\[+]", str(split)):
        given.refuse(f"{where}.split", f"{split} is a part of a split")
    if "://" in path:
        given.refuse(f"{where}.path", "download it, and name the files")
    folder = next((candidate for candidate in (Path(path), given.folder / path) if path and candidate.is_dir()), None)
    is_local = folder is not None or _is_file(given, path)
    if files and (isinstance(files, dict) or not (is_local or path in _BUILDERS)):
        given.refuse(f"{where}.data_files", "name the files of a folder; of the hub, a config and a split")
    elif files:
        for file in [files] if isinstance(files, str) else files:
            yield {"path": str(folder / file) if folder else file, **form}
    elif is_local or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        if split not in (None, "train"):
            given.refuse(f"{where}.split", "files have no splits: name those of it")
        yield {"path": path, **form}
    else:
        yield {"path": on_hub(path, about.get("name"), split, about.get("revision")), **form}


def _is_file(given: Given, path: str) -> bool:
    return path.endswith(_SUFFIXES) or path.startswith((".", "/", "~")) or (given.folder / path).is_file()


def on_hub(name: str, config: str | None, split: str | None, revision: str | None = None) -> str:
    options = {"config": config, "split": split, "revision": revision}
    asked = "&".join(f"{key}={value}" for key, value in options.items() if value)
    return f"hub:{name}{'?' if asked else ''}{asked}"


def keys_of(given: Given, path: str) -> tuple[str, ...]:
    """The keys of the first record of a file; empty if there is no such local file."""
    return tuple(next(iter(_records(given, path)), {}))


def has_more(given: Given, path: str, most: int) -> bool | None:
    """True if a file has more than `most` records; None if there is no such local file."""
    found = sum(1 for _ in islice(_records(given, path), most + 1))
    return found > most if found else None


def _records(given: Given, path: str) -> Iterator[Mapping[str, object]]:
    from fivefold.data.formats import discover
    from fivefold.data.records import Records
    from fivefold.data.source import Source as File

    file = next((candidate for candidate in (Path(path), given.folder / path) if candidate.is_file()), None)
    form = next((candidate for candidate in discover() if file and candidate.matches(file)), None)
    if file and isinstance(form, Records):
        yield from (record for _, record in form.records(file, File(path=path, label="data.train")))
