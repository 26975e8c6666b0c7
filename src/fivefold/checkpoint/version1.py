"""Manifests of version 1, which list every slice of every tensor with its file, key and checksum. No torch."""

import re
from collections.abc import Mapping
from typing import Any

from fivefold.checkpoint.cut import Box, file_of, key_of

_FILE = re.compile(r"[a-z]+-(\d{5,})\.safetensors")


def upgraded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON values of a manifest of version 1 as those of today: tensors without a cut, whose slices are listed rank
    by rank. Raises `ValueError` for a slice whose file or key does not follow from what it is."""
    sums: dict[str, dict[str, str]] = {}
    tensors = {
        kind: {name: _record(kind, name, one, sums) for name, one in records.items()}
        for kind, records in tree["tensors"].items()
    }
    return {**tree, "tensors": tensors, "sums": sums, "ranks": {}, "cuts": []}


def _record(kind: str, name: str, record: Mapping[str, Any], sums: dict[str, dict[str, str]]) -> dict[str, Any]:
    """One tensor. `sums` is filled with the checksums of its slices."""
    instead: dict[int, list[Box]] = {}
    for one in record["slices"]:
        file, own = one["file"], tuple((at, at + size) for at, size in zip(one["offset"], one["shape"], strict=True))
        rank = int(named[1]) if (named := _FILE.fullmatch(file)) else -1
        if file != file_of(kind, rank) or one["key"] != key_of(kind, name, own):
            raise ValueError(f"{kind} of {name}: {one['key']!r} in {file!r} is no slice of it")
        instead.setdefault(rank, []).append(own)
        sums.setdefault(file, {})[one["key"]] = one["checksum"]
    return {"shape": record["shape"], "dtype": record["dtype"], "instead": [*instead.items()]}
