"""Fields that every rank and every node reads for itself, and the first in which two of them differ. No torch.

Fields are plain data by name. A mapping is compared entry by entry. If it has the key `WHOLE`, that one decides: its
other entries only name what differs. `UNREAD` equals any value: its side does not read that field.
"""

import os
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from xxhash import xxh3_64, xxh3_64_hexdigest

FIX = "give every node the same run file, model, data, code and packages, or folders that all of them see"
WHOLE, UNREAD, _ABSENT = "", "not read", "not there"
_PACKAGES = ("fivefold", "torch", "transformers", "safetensors", "tokenizers")
_CODE = (".py", ".c", ".h", ".toml", ".yaml")
_SAMPLE, _SAMPLES, _EACH = 4096, 16, 2**23  # bytes; samples of any range; one more for each 8 MiB


def program() -> dict[str, Any]:
    """The versions of Python and of the packages, and a digest of each file of fivefold itself: a checkout has the
    version number of the commits around it."""
    return {
        "the version of python": platform.python_version(),
        **{f"the version of {package}": version(package) for package in _PACKAGES},
        "fivefold's own code": _own_code(),
    }


@cache
def _own_code() -> dict[str, str]:
    root = Path(__file__).parents[1]
    return digests(root, (file for file in sorted(root.rglob("*")) if file.suffix in _CODE))


def digests(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """A digest of each small file, by its path in `folder`."""
    return {str(file.relative_to(folder)): xxh3_64_hexdigest(file.read_bytes()) for file in files}


def sampled(descriptor: int, start: int, stop: int, kind: str = "") -> str:
    """A digest of a range of bytes of an open file: of all of a small range, else of samples spread evenly over it,
    its ends included; and of its size and `kind`."""
    size, count = stop - start, _SAMPLES + (stop - start) // _EACH
    state = xxh3_64(f"{kind} {size}".encode())
    if size <= count * _SAMPLE:
        state.update(os.pread(descriptor, size, start))
    else:
        for number in range(count):
            state.update(os.pread(descriptor, _SAMPLE, start + number * (size - _SAMPLE) // (count - 1)))
    return state.hexdigest()


def difference(mine: Mapping[str, Any], first: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first field that differs, and its two values in words; None if all agree."""
    for name in {**first, **mine}:
        own, other = mine.get(name, _ABSENT), first.get(name, _ABSENT)
        if own in (other, UNREAD) or other == UNREAD:
            continue
        if not (isinstance(own, Mapping) and isinstance(other, Mapping)):
            return name, _in_words(own), _in_words(other)
        if own.get(WHOLE, own) != other.get(WHOLE, other) and (inner := difference(own, other)):
            return (f"{name}: {inner[0]}" if inner[0] else name, *inner[1:])
    return None


def _in_words(value: Any) -> str:
    return shorten(str(value), 80, placeholder=" ...")
