"""JSON from a folder that someone else made: no key twice, no NaN. No torch."""

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 2**28  # of a file read whole


def read(path: Path) -> Any:
    """Parse a file. Raises `OSError`, and `ValueError` for more than `MOST_BYTES` or what `loads` refuses."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES:,} bytes")
    return loads(content)


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
