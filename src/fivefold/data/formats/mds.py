"""Shards of MosaicML's streaming: a folder with `index.json` and `shard.00000.mds`, raw or compressed.

A shard, little-endian: uint32 samples N; uint32 [N + 1] offsets; the columns again, as JSON; the samples. A sample:
uint32 sizes of its columns without a fixed size; then the values, by column.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core.cache import file_digest, key_of
from fivefold.core.errors import UserError
from fivefold.core.units import many
from fivefold.data.batch import IGNORE
from fivefold.data.compression import MOST_BYTES, opened, read_most
from fivefold.data.records import Records, keys_read
from fivefold.data.source import Source, file_in, no_documents, not_utf8

_INDEX = "index.json"
_COPY = "copy the folder from its origin again"
# Dtypes of arrays whose dtype is the first byte of the value, and of the sizes of their dims.
_DTYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 32: "u4", 33: "i4", 64: "u8", 65: "i8"}
_INTEGERS = {*_DTYPES.values(), *(np.dtype(code).name for code in _DTYPES.values())}
_SIZES = ("u1", "u2", "u4", "u8")
_SCALARS = {"int": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8"} | {
    f"{sign}int{8 * size}": f"<{sign or 'i'}{size}" for sign in ("", "u") for size in (1, 2, 4, 8)
}  # encodings of one number
_WIDTHS = ("i8", "i4", "u2")  # of ids as bytes, which do not tell: the widest that gives ids is taken
_MOST_ID, _LOOKED_AT = 2**21, 2**20  # more than any vocabulary; bytes


@dataclass(frozen=True)
class Shards(Records):
    """A sample is a document: its token ids in `input_ids` or `tokens`, else its text. A raw shard is memory-mapped, a
    compressed one is held in memory."""

    def files(self, path: Path, source: Source, root: Path) -> Sequence[Path] | None:
        folder = path.parent if path.name == _INDEX else path
        return (folder,) if (folder / _INDEX).is_file() and _shards(folder) is not None else None

    def members(self, path: Path) -> Sequence[Path]:
        return (path / _INDEX, *(_file(path, shard, str(path))[0] for shard in _shards(path) or []))

    def digest(self, path: Path, root: Path) -> str:
        return key_of(*(file_digest(file, root) for file in self.members(path)))

    def size(self, path: Path) -> int:
        return sum(int(shard["raw_data"]["bytes"]) for shard in _shards(path) or [])

    def records(self, path: Path, source: Source) -> Generator[tuple[str, Mapping[str, object]]]:
        where, is_empty = source.at(path), True
        for listed in _shards(path) or []:
            shard = _Shard.read(path, listed, where)
            parts = self.keys_of(shard.names, source)
            keys = keys_read(shard.names, source, parts.keys if parts else (source.text_key,))
            for number, sample in enumerate(shard.samples(keys), start=1):
                is_empty = False
                yield f"{shard.where}:{number}", sample
        if is_empty:
            raise no_documents(where, "the shards hold no samples")


def _shards(folder: Path) -> list[dict[str, Any]] | None:
    """The shards that the index lists; None if it is not of this format. Raises `UserError` if it lists one twice: a
    small folder could fill the disk."""
    try:
        tree = json.loads((folder / _INDEX).read_bytes())
        shards = tree["shards"] if tree["version"] == 2 else []
        is_known = bool(shards) and all(_is_shard(shard) for shard in shards)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if is_known and len({shard["raw_data"]["basename"] for shard in shards}) < len(shards):
        raise UserError(f"{folder}: {_INDEX} names a shard twice", fix=_COPY)
    return shards if is_known else None


def _is_shard(shard: Mapping[str, Any]) -> bool:
    """True for the entry of a shard. Raises `KeyError` or `TypeError` for something else."""
    names, encodings, sizes = (shard[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    kept = [shard["raw_data"], *([shard["zip_data"]] if shard.get("zip_data") else [])]
    numbers = [shard["samples"], shard["raw_data"]["bytes"], *(size for size in sizes if size is not None)]
    return (
        shard["format"] == "mds"
        and 0 < len(names) == len(encodings) == len(sizes)
        and all(isinstance(text, str) for text in (*names, *encodings, *(one["basename"] for one in kept)))
        and all(isinstance(number, int) and number >= 0 for number in numbers)
    )


def _file(folder: Path, shard: Mapping[str, Any], where: str) -> tuple[Path, bool]:
    """The file of a shard, and whether it is raw. Raises `UserError` if neither is there."""
    names = [shard[kind]["basename"] for kind in ("raw_data", "zip_data") if shard.get(kind)]
    for name in names:
        if path := file_in(folder, name):
            return path, name == names[0]
    raise UserError(f"{where}: {names[0][:256]}, which {_INDEX} names, is not there", fix=_COPY)


@dataclass(frozen=True)
class _Shard:
    """A shard, uint8 [bytes]: `offsets` of its samples, and its columns."""

    where: str
    data: NDArray[np.uint8]
    offsets: NDArray[np.uint32]
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]

    @classmethod
    def read(cls, folder: Path, shard: Mapping[str, Any], where: str) -> "_Shard":
        path, is_raw = _file(folder, shard, where)
        where = f"{where.removesuffix(str(folder))}{path}"
        data = _bytes(path, where, is_raw=is_raw)
        samples = int(shard["samples"])
        head = 4 * (samples + 2)
        if len(data) != int(shard["raw_data"]["bytes"]) or len(data) < head:
            raise UserError(
                f"{where}: {len(data):,} bytes, not the {shard['raw_data']['bytes']:,} of {_INDEX}", fix=_COPY
            )
        numbers = data[:head].view("<u4")
        offsets = numbers[1:]
        is_in_order = head <= offsets[0] and offsets[-1] == len(data) and (offsets[1:] >= offsets[:-1]).all()
        if numbers[0] != samples or not is_in_order:
            raise UserError(f"{where}: does not hold the {many(samples, 'sample')} of {_INDEX}", fix=_COPY)
        columns = (tuple(shard[f"column_{what}"]) for what in ("names", "encodings", "sizes"))
        return cls(where, data, offsets, *columns)

    def samples(self, keys: Sequence[str]) -> Generator[Mapping[str, object]]:
        """The values of the columns `keys` of each sample; None of the others."""
        unread, dtypes = dict.fromkeys(self.names), dict[str, str]()
        columns = {name: self.encodings[self.names.index(name)] for name in keys if name in self.names}
        for number in range(len(self.offsets) - 1):
            values = self._values(number)
            at = f"{self.where}:{number + 1}"
            for name, encoding in columns.items():
                if encoding == "bytes" and name not in dtypes:
                    dtypes[name] = self._dtype(name, at)
                kind = f"ndarray:{dtypes[name]}:any" if encoding == "bytes" else encoding
                values[name] = _decoded(values[name], kind, f"{at}, {name!r}")
            yield {**unread, **{name: values[name] for name in columns}}

    def _values(self, number: int) -> dict[str, Any]:
        """The bytes of each column of a sample."""
        sample = self.data[self.offsets[number] : self.offsets[number + 1]]
        variable = sum(size is None for size in self.sizes)
        given = iter(sample[: 4 * variable].view("<u4").tolist() if len(sample) >= 4 * variable else [])
        sizes = [next(given, 0) if size is None else size for size in self.sizes]
        ends = 4 * variable + np.cumsum(sizes)
        if int(ends[-1]) != len(sample):
            raise UserError(f"{self.where}:{number + 1}: the sample is not of the sizes of its columns", fix=_COPY)
        return {
            name: sample[end - size : end] for name, size, end in zip(self.names, sizes, ends.tolist(), strict=True)
        }

    def _dtype(self, name: str, where: str) -> str:
        """The dtype of ids that are written as bytes: the widest in which the first ones are ids."""
        looked = 0
        fitting = list(_WIDTHS)
        for number in range(len(self.offsets) - 1):
            value = self._values(number)[name]
            fitting = [width for width in fitting if _are_ids(value, np.dtype(f"<{width}"))]
            looked += len(value)
            if looked > _LOOKED_AT:
                break
        if not fitting:
            raise UserError(
                f"{where}: the bytes of {name!r} are no token ids of 8, 4 or 2 bytes", fix="write them as ndarray:int32"
            )
        return fitting[0]


def _bytes(path: Path, where: str, *, is_raw: bool) -> NDArray[np.uint8]:
    if is_raw:
        return np.asarray(np.memmap(path, np.uint8, "r")) if path.stat().st_size else np.empty(0, np.uint8)
    if path.suffix not in (".zstd", ".zst", ".gz", ".bz2"):
        raise UserError(f"{where}: compressed as {path.suffix}", fix="write it with compression='zstd', or none")
    with opened(path, where) as file:
        raw = read_most(file, MOST_BYTES)
    if len(raw) > MOST_BYTES:
        raise UserError(f"{where}: expands to more than {MOST_BYTES // 2**20} MiB", fix="expand it: zstd -d")
    return np.frombuffer(raw, np.uint8)


def _are_ids(value: NDArray[np.uint8], dtype: np.dtype[Any]) -> bool:
    if len(value) % dtype.itemsize:
        return False
    ids = value.view(dtype)
    return not len(ids) or (int(ids.min()) >= IGNORE and int(ids.max()) < _MOST_ID)


def _decoded(value: NDArray[np.uint8], encoding: str, where: str) -> object:
    """A value as text, JSON or array. Raises `UserError` for another encoding, pickles among them."""
    kind, _, of = encoding.partition(":")
    if kind == "ndarray":
        return _array(value, of, where)
    if kind in _SCALARS and len(value) == np.dtype(_SCALARS[kind]).itemsize:
        return value.view(_SCALARS[kind])[0].item()
    if kind not in ("str", "json"):
        raise UserError(f"{where} is encoded as {kind}", fix="write texts as str, and token ids as ndarray")
    try:
        text = bytes(value).decode("utf-8")
        return text if kind == "str" else json.loads(text)
    except UnicodeDecodeError as error:
        raise not_utf8(where, error, f"offset {error.start} of the text") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}", fix=_COPY) from error


def _array(value: NDArray[np.uint8], of: str, where: str) -> NDArray[Any]:
    """An array of one dim: its dtype and its shape are in the encoding, `ndarray:DTYPE:SHAPE`, or in front of it."""
    dtype, _, shape = of.partition(":")
    try:
        if not dtype:
            dtype, value = _DTYPES[int(value[0])], value[1:]
        if not shape:
            dims, width = int(value[0]) >> 2, np.dtype(_SIZES[int(value[0]) % 4]).itemsize
            if dims != 1:
                raise ValueError(f"{dims} dims")
            value = value[1 + width :]
        if dtype not in _INTEGERS:  # numpy would parse any text
            raise ValueError(f"dtype {dtype[:64]!r}")
        array: NDArray[Any] = np.frombuffer(value, np.dtype(dtype).newbyteorder("<"))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{where}: not an array of token ids: {error}", fix="write it as ndarray:int32") from error
    return array


FORMAT = Shards(name="mds", noun="column", tokens_first=True)
