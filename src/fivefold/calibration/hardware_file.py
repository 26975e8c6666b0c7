"""A user's hardware file, as `--cluster` reads it. No torch."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.core.files import put
from fivefold.hardware.cluster import Cluster


def text(tables: Mapping[str, Any], about: str = "") -> str:
    """Format as TOML: `about` as a comment, the text form of the `cluster`, the tables `chip` and `node`, if any."""
    head = [*(f"# {line}".rstrip() for line in about.splitlines()), f"cluster = {json.dumps(tables['cluster'])}"]
    found = ((name, tables[name]) for name in ("chip", "node") if tables.get(name))
    return "\n".join([*head, *(line for name, table in found for line in _lines(name, table)), ""])


def _lines(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"[{name}]")
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(f"{name}.{key}", value)


def parsed(content: str) -> Cluster:
    """The cluster that a file with this text describes."""
    return Cluster.of_toml(content, "what was measured")


def save(path: str, content: str) -> None:
    """Write a file. Raises `UserError` if that fails."""
    put(Path(path), content.encode(), instead="name another file: --write FILE")
