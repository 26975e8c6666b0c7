"""One safetensors file of a checkpoint: written in one pass with a checksum per tensor, checked in one pass.

A checksum is XXH3 (128 bits) over the description of the bytes (key, type, shape) and then the bytes: an intact slice
in the place of another one fails it. It finds accidents; it is no signature.
"""

import json
import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from fivefold.checkpoint.manifest import DTYPES, FileRecord
from fivefold.core import files, safetensors_header

SUFFIX = ".safetensors"
AT_ONCE = 8 * 2**20  # bytes read and hashed at a time; two such pieces are in flight


def write(path: Path, tensors: Mapping[str, Tensor]) -> tuple[FileRecord, Mapping[str, str]]:
    """Write CPU tensors, contiguous or not, as a new safetensors file; returns its record and checksums by key."""
    header = _header(tensors)
    sums: dict[str, str] = {}
    with ThreadPoolExecutor(1, "checksum") as beside:
        size = files.write(path, chain([header], _contents(tensors, sums, beside)))
    return FileRecord(size, checksum(header)), sums


def check(path: Path, header: str, tensors: Mapping[str, str], wanted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Compare a file with the checksums of its header and of its tensors.

    `tensors`: key -> checksum, all that the file must contain; `wanted`: the keys whose bytes are read. Yields (key,
    problem), with key "" for the file itself. Memory holds no more than a header and twice `AT_ONCE` bytes.
    """
    try:
        with path.open("rb") as file, ThreadPoolExecutor(1, "checksum") as beside:
            raw = safetensors_header.read_raw(file)
            if checksum(raw) != header:
                raise ValueError("its header is not the one that was saved")
            entries = safetensors_header.parse(raw, os.fstat(file.fileno()).st_size)
            if entries.keys() != tensors.keys():
                raise ValueError("it holds other tensors than it should")
            for key in sorted(wanted, key=lambda key: entries[key].start):
                entry = entries[key]
                file.seek(entry.start)
                hasher = _hasher(key, entry.dtype, entry.shape)
                deque(_hashed(_pieces(file, entry.stop - entry.start), hasher, beside), maxlen=0)
                if hasher.hexdigest() != tensors[key]:
                    yield key, "its bytes are not those that were saved"
    except OSError as error:
        yield "", f"it cannot be read: {error.strerror}"
    except ValueError as error:
        yield "", str(error)


def checksum(content: bytes) -> str:
    """The checksum of a text or a header."""
    return xxh3_128(content).hexdigest()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, tensor in tensors.items():
        entries[key] = {
            "dtype": _type(tensor), "shape": list(tensor.shape), "data_offsets": [at, at := at + tensor.nbytes]
        }  # fmt: skip
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def _contents(tensors: Mapping[str, Tensor], sums: dict[str, str], beside: Executor) -> Iterator[memoryview]:
    """The bytes of each tensor, a piece at a time; `sums` is filled with their checksums."""
    for key, tensor in tensors.items():
        hasher = _hasher(key, _type(tensor), tensor.shape)
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        pieces = (content[start : start + AT_ONCE] for start in range(0, len(content), AT_ONCE))
        yield from _hashed(pieces, hasher, beside)
        sums[key] = hasher.hexdigest()


def _hashed(pieces: Iterator[memoryview], hasher: Any, beside: Executor) -> Iterator[memoryview]:
    """The pieces, each hashed in another thread while the caller works on it and the next one is read.

    `pieces` may reuse the memory of a piece for the next but one.
    """
    last: Future[None] | None = None
    for piece in pieces:
        if last:
            last.result()
        last = beside.submit(hasher.update, piece)
        yield piece
    if last:
        last.result()


def _hasher(key: str, dtype: str, shape: Sequence[int]) -> Any:
    return xxh3_128(f"{key}\n{dtype}\n{','.join(map(str, shape))}\n".encode())


def _type(tensor: Tensor) -> str:
    return DTYPES[str(tensor.dtype).removeprefix("torch.")]


def _pieces(file: Any, size: int) -> Iterator[memoryview]:
    """The next `size` bytes of a file, alternating between two buffers."""
    buffers = [memoryview(bytearray(min(size, AT_ONCE))) for _ in range(2 if size > AT_ONCE else 1)]
    for buffer in cycle(buffers):
        if not size:
            return
        got = file.readinto(buffer[: min(size, AT_ONCE)])
        if not got:
            raise ValueError("it ends too early")
        yield buffer[:got]
        size -= got
