"""Read the header of a safetensors file defensively: the size of the file must bear out every claim.

The format: 8 bytes with the length N of the header (little endian), N bytes of JSON, then the tensors without a gap.
The `safetensors` library reads the tensors; it takes the last of two equal keys, and headers up to 100 MB. No torch.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

from fivefold.core import strict_json

MOST_BYTES = 2**26  # of a header: 64 MiB hold 400,000 tensors
BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its dtype as the format writes it, its shape, and its byte range from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_raw(file: BinaryIO) -> bytes:
    """Read the header of a file open at its start. Raises `ValueError` for a header too long for its file."""
    size = os.fstat(file.fileno()).st_size
    length = file.read(8)
    if len(length) < 8:
        raise ValueError(f"it has {len(length)} bytes, fewer than a header")
    count = struct.unpack("<Q", length)[0]
    if count > min(size - 8, MOST_BYTES):
        raise ValueError(f"its header claims {count:,} bytes; the file has {size:,}, and {MOST_BYTES:,} are the most")
    return length + file.read(count)


def parse(raw: bytes, size: int) -> Mapping[str, Entry]:
    """Parse the tensors by key from the header of a file of `size` bytes.

    Raises `ValueError` unless they fill the file exactly.
    """
    tree = strict_json.loads(raw[8:])
    if not isinstance(tree, dict):
        raise ValueError("its header is no JSON object")
    tree.pop("__metadata__", None)
    tensors = {key: _entry(key, entry, len(raw)) for key, entry in tree.items()}
    at = len(raw)
    for key, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            raise ValueError(f"{key!r} starts at byte {entry.start:,}, where {at:,} is next: a gap or an overlap")
        at = entry.stop
    if at != size:
        raise ValueError(f"its tensors end at byte {at:,}, and the file at {size:,}")
    return tensors


def read(file: BinaryIO) -> Mapping[str, Entry]:
    return parse(read_raw(file), os.fstat(file.fileno()).st_size)


def _entry(key: str, tree: Any, start: int) -> Entry:
    if not isinstance(tree, dict) or not isinstance(tree.get("dtype"), str) or tree["dtype"] not in BYTES:
        raise ValueError(f"{key!r} has no type that is known")
    shape, offsets = (_sizes(key, tree.get(name)) for name in ("shape", "data_offsets"))
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * BYTES[tree["dtype"]]:
        raise ValueError(f"{key!r}: {tree['dtype']} of shape {shape} does not take the bytes {offsets}")
    return Entry(tree["dtype"], shape, start + offsets[0], start + offsets[1])


def _sizes(key: str, numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{key!r}: {numbers} is no list of sizes")
    return tuple(numbers)
