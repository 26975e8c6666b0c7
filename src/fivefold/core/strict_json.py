"""Strict JSON from a folder that someone else made: no duplicate keys, no NaN. No torch."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

PART_BYTES = 2**20  # of a file, read at once
MOST_BYTES = 2**28  # of a file read whole
MOST_CONFIG_BYTES = 2**24  # of a config.json and its like


def content(path: Path, most: int) -> bytes:
    """Read a whole file. Raises `OSError`, and `ValueError` for more than `most` bytes, and for anything but a regular
    file (a pipe never ends)."""
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")
    found = bytearray()
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):  # one read of `most` would allocate that much memory
            found += part
            if len(found) > most:
                raise ValueError(f"more than {most:,} bytes")
    return bytes(found)


def read(path: Path) -> Any:
    """Parse a file. Raises `OSError`, and `ValueError` for what `content` or `loads` refuses."""
    return loads(content(path, MOST_BYTES))


def read_config(path: Path) -> Any:
    """Parse a small file of a model folder, with the infinities that `transformers` writes. Raises `OSError`, and
    `ValueError` for invalid JSON and for what `content` refuses."""
    try:
        return json.loads(content(path, MOST_CONFIG_BYTES))
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def loads(text: str | bytes) -> Any:
    """Parse `text`. Raises `ValueError` for invalid JSON, duplicate keys, NaN and infinities."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} stands twice")
    return tree


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
