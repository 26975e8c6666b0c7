"""Megatron's indexed dataset: `NAME.bin` holds the tokens, `NAME.idx` where each document begins.

The index, little-endian: `MMIDIDX`, two zero bytes; uint64 version 1; uint8 dtype code; uint64 sequences S; uint64
document bounds D; int32 [S] lengths; int64 [S] offsets in bytes; int64 [D] bounds, the first sequence of each document
and, last, S. Multimodal data has int8 [S] modes after these.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core.cache import file_digest, key_of
from fivefold.core.errors import UserError
from fivefold.core.units import many
from fivefold.data.examples import TokenIds
from fivefold.data.source import Format, Source, no_documents

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
_COPY = "copy both files from their origin again"


@dataclass(frozen=True)
class Megatron(Format):
    """Named by its prefix, or by either of the files. Both are memory-mapped."""

    def matches(self, path: Path) -> bool:
        return path.suffix == ".bin" and _is_index(path.with_suffix(".idx"))

    def files(self, path: Path, source: Source, root: Path) -> Sequence[Path] | None:
        tokens = path.with_suffix(".bin") if path.suffix == ".idx" else Path(f"{path}.bin")
        is_prefix = not path.exists() or path.suffix == ".idx"
        if not is_prefix or not self.matches(tokens) or not tokens.is_file():
            return None
        return (tokens,)

    def members(self, path: Path) -> Sequence[Path]:
        return (path, path.with_suffix(".idx"))

    def digest(self, path: Path, root: Path) -> str:
        return key_of(*(file_digest(file, root) for file in self.members(path)))

    def documents(self, path: Path, source: Source) -> Iterator[TokenIds]:
        where = source.at(path)
        index = _Index.read(path.with_suffix(".idx"), source.at(path.with_suffix(".idx")))
        tokens = _tokens(path, index, where)
        for number, (first, stop) in enumerate(zip(index.bounds[:-1], index.bounds[1:], strict=True), start=1):
            places = zip(index.offsets[first:stop].tolist(), index.lengths[first:stop].tolist(), strict=True)
            sequences = [tokens[at // tokens.itemsize :][:length] for at, length in places]
            ids = sequences[0] if len(sequences) == 1 else np.concatenate([tokens[:0], *sequences])
            yield TokenIds(f"{where}: document {number:,}", ids)


def _is_index(path: Path) -> bool:
    if not path.is_file() or not os.access(path, os.R_OK):
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


@dataclass(frozen=True)
class _Index:
    """`lengths` int32 [S], `offsets` int64 [S] in bytes, and `bounds` int64 [D], mapped; the dtype of the tokens."""

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @classmethod
    def read(cls, path: Path, where: str) -> "_Index":
        """Raises `UserError` for an index that is damaged, of another version, or not of tokens."""
        size = path.stat().st_size
        if size < _HEADER.size:
            raise UserError(f"{where}: the index is cut short", fix=_COPY)
        with path.open("rb") as file:
            _, version, code, sequences, bounds = _HEADER.unpack(file.read(_HEADER.size))
        if version != 1:
            raise UserError(f"{where}: an index of version {version}; version 1 is read", fix="write it with Megatron")
        if code not in _DTYPES:
            raise UserError(f"{where}: dtype code {code} is of no integers", fix="name a dataset of token ids")
        whole = _HEADER.size + 12 * sequences + 8 * bounds
        if sequences and size == whole + sequences:
            raise UserError(
                f"{where}: a multimodal index: it says which sequences are images", fix="name a dataset of texts alone"
            )
        if size != whole:
            raise UserError(
                f"{where}: the index has {size:,} bytes, not the {whole:,} of {many(sequences, 'sequence')}", fix=_COPY
            )
        if not sequences:
            raise no_documents(where, "the index holds no documents")
        data = np.asarray(np.memmap(path, np.uint8, "r"))[_HEADER.size :]
        lengths, offsets = data[: 4 * sequences].view("<i4"), data[4 * sequences :][: 8 * sequences].view("<i8")
        found = data[12 * sequences :].view("<i8")
        if len(found) == 1 and not found[0]:  # written without ends of documents: a sequence is one
            found = np.arange(sequences + 1)
        if found[:1].tolist() != [0] or int(found[-1]) != sequences or (found[1:] < found[:-1]).any():
            raise UserError(f"{where}: its documents are not the {many(sequences, 'sequence')} in order", fix=_COPY)
        return cls(np.dtype(_DTYPES[code]), lengths, offsets, found)


def _tokens(path: Path, index: _Index, where: str) -> NDArray[np.integer]:
    """The tokens, mapped. Raises `UserError` if they are not those of the index."""
    size, width = path.stat().st_size, index.dtype.itemsize
    ends = index.offsets + index.lengths.astype(np.int64) * width
    if int(ends.max()) != size:
        raise UserError(
            f"{where}: {size:,} bytes, and its .idx has {int(ends.max()):,} bytes of tokens ({index.dtype.name})",
            fix=_COPY,
        )
    if (
        (index.lengths < 0).any()
        or (index.offsets < 0).any()
        or (index.offsets > size).any()
        or (index.offsets % width).any()
    ):
        raise UserError(f"{where}: its .idx names places that are not in it", fix=_COPY)
    return np.asarray(np.memmap(path, index.dtype, "r")) if size else np.empty(0, index.dtype)


FORMAT = Megatron(name="megatron", companions=(".idx",))
