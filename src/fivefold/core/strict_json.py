"""JSON from a folder that someone else made: no key twice, no NaN. No torch."""

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 2**28  # of a file read whole
MOST_CONFIG_BYTES = 2**24  # of a config.json and its like


def read(path: Path) -> Any:
    """Parse a file. Raises `OSError`, and `ValueError` for more than `MOST_BYTES` or what `loads` refuses."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES:,} bytes")
    return loads(content)


def read_config(path: Path) -> Any:
    """Parse a small file of a model folder, in which `transformers` writes infinities. Raises `OSError`, and
    `ValueError` for what is not JSON, not a regular file (a pipe never ends), or larger than `MOST_CONFIG_BYTES`."""
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        content = file.read(MOST_CONFIG_BYTES + 1)
    if len(content) > MOST_CONFIG_BYTES:
        raise ValueError(f"more than {MOST_CONFIG_BYTES:,} bytes")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def loads(text: str | bytes) -> Any:
    """Parse `text`. Raises `ValueError` for what is not JSON, a key that stands twice, NaN and infinities."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return tree


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
