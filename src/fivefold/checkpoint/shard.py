"""One safetensors file of a checkpoint: written in one pass with a checksum per tensor, checked in one pass.

A checksum is XXH3 (128 bits) over the description of the bytes (key, type, shape) and then the bytes: an intact slice
in the place of another one fails it. Those of all tensors, in the order of the header, are the last tensor of the file,
`checksums` [tensors, 16]. A checksum over the header and these is in the manifest. It finds accidents; it is no
signature.
"""

import json
import os
import struct
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from fivefold.checkpoint.records import DTYPES, FileRecord
from fivefold.core import files, safetensors_header

SUMS, SUM_BYTES = "checksums", 16  # key of the last tensor, and bytes of each of its rows
AT_ONCE = 8 * 2**20  # bytes read and hashed at a time; two such pieces are in flight


def write(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write CPU tensors, contiguous or not, as a new safetensors file, with their checksums; returns its record."""
    header = _header(tensors)
    sums = bytearray()
    with ThreadPoolExecutor(1, "checksum") as beside:
        size = files.write(path, chain([header], _contents(tensors, sums, beside)))
    return FileRecord(size, checksum(header + sums))


def check(
    path: Path, head: str, keys: Collection[str], wanted: Collection[str], within: range | None = None,
    sums: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Compare a file with its checksums.

    `head`: the checksum of its header and its slices' checksums. `keys`: all slices that it must contain. `wanted`:
    those whose bytes are read, if they begin in the bytes `within` (None: anywhere). `sums`: key -> checksum, of a file
    that does not have them, whose `head` is of its header alone. Yields (key, problem), with key "" for the file
    itself. Memory holds no more than a header and twice `AT_ONCE` bytes.
    """
    try:
        with path.open("rb") as file, ThreadPoolExecutor(1, "checksum") as beside:
            raw, size = safetensors_header.read_raw(file), os.fstat(file.fileno()).st_size
            own = _sums(file, size, len(keys)) if sums is None else b""
            if checksum(raw + own) != head:
                raise ValueError(f"its header{' and checksums' * (sums is None)}: not those that were saved")
            entries = dict(safetensors_header.parse(raw, size))
            if entries.keys() != {*keys, *([SUMS] if sums is None else ())}:
                raise ValueError("it holds other tensors than it should")
            if sums is None:
                del entries[SUMS]
                sums = dict(zip(entries, own.hex(" ", SUM_BYTES).split(), strict=True))
            for key in sorted(wanted, key=lambda key: entries[key].start):
                entry = entries[key]
                if within is not None and entry.start not in within:
                    continue
                file.seek(entry.start)
                hasher = _hasher(key, entry.dtype, entry.shape)
                deque(_hashed(_pieces(file, entry.stop - entry.start), hasher, beside), maxlen=0)
                if hasher.hexdigest() != sums[key]:
                    yield key, "its bytes are not those that were saved"
    except OSError as error:
        yield "", f"it cannot be read: {error.strerror}"
    except ValueError as error:
        yield "", str(error)


def _sums(file: Any, size: int, count: int) -> bytes:
    file.seek(max(size - count * SUM_BYTES, 0))
    return bytes(file.read())


def checksum(content: bytes) -> str:
    return xxh3_128(content).hexdigest()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, tensor in tensors.items():
        entries[key] = {
            "dtype": _type(tensor), "shape": list(tensor.shape), "data_offsets": [at, at := at + tensor.nbytes]
        }  # fmt: skip
    count = len(tensors) * SUM_BYTES
    entries[SUMS] = {"dtype": "U8", "shape": [len(tensors), SUM_BYTES], "data_offsets": [at, at + count]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def _contents(tensors: Mapping[str, Tensor], sums: bytearray, beside: Executor) -> Iterator[bytes | memoryview]:
    """The bytes of each tensor, a piece at a time, then their checksums, which `sums` is filled with."""
    for key, tensor in tensors.items():
        hasher = _hasher(key, _type(tensor), tensor.shape)
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        pieces = (content[start : start + AT_ONCE] for start in range(0, len(content), AT_ONCE))
        yield from _hashed(pieces, hasher, beside)
        sums += hasher.digest()
    yield bytes(sums)


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
