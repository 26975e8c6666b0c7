"""The manifest of a checkpoint: the file of each tensor slice. JSON in, JSON out; no torch.

    step-000250/
      manifest.json
      weight-00000.safetensors      the slices of the weights that rank 0 wrote
      optimizer-00000.safetensors   and of its optimizer state
      run.yaml                      the resolved run file
      model/                        a Hugging Face folder without its weights: config, tokenizer, generation config

Tensors are keyed by kind (`weight`, and the optimizer's states per parameter: `exp_avg` and `exp_avg_sq`, or
`momentum_buffer`), then by the Hugging Face parameter name. Each is cut into slices that tile it exactly, without
reference to the layout that wrote them. Every byte is under a checksum: the manifest begins with its own; each slice
has one, bound to its name, type and range; a safetensors file has one of its header, every other file one of its
contents. Readers ignore unknown keys, so that later versions may add some.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from xxhash import xxh3_128_hexdigest

from fivefold.core import strict_json
from fivefold.core.errors import UserError
from fivefold.core.text import listed

NAME = "manifest.json"
FORMAT = "fivefold-checkpoint"
VERSION = 1
# torch name -> safetensors name.
DTYPES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8",
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",  # state of a user's optimizer
}  # fmt: skip
WEIGHT = "weight"
MOST_BYTES = 2**30  # limit for a manifest; one of 500,000 slices takes 150 MB

Size = Annotated[int, Field(strict=True, ge=0)]

_SIGNED = re.compile(r'\{"checksum":"([0-9a-f]{32})",')


class CorruptCheckpoint(UserError):
    """A checkpoint folder that differs from its manifest, or has no readable manifest."""


@dataclass(frozen=True)
class Slice:
    """One block of a tensor: its start and size, in elements; its file and key."""

    offset: tuple[Size, ...]
    shape: tuple[Size, ...]
    file: str
    key: str
    checksum: str


@dataclass(frozen=True)
class FileRecord:
    """A file of the checkpoint: its size, and the checksum of its header (safetensors) or of all of it."""

    bytes: Size
    checksum: str


@dataclass(frozen=True)
class TensorRecord:
    """One whole tensor, cut into slices, in the order of their offsets."""

    shape: tuple[Size, ...]
    dtype: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Files and the tensors in them: those of a checkpoint, or those that one rank wrote.

    `files`: path inside the folder -> record. `scalars`: parameter name -> the optimizer's scalars for it (`step`).
    `tensors`: kind -> parameter name -> record.
    """

    files: Mapping[str, FileRecord]
    scalars: Mapping[str, Mapping[str, float]]
    tensors: Mapping[str, Mapping[str, TensorRecord]]

    def tree(self) -> dict[str, Any]:
        """The contents as JSON values."""
        return dict(_CONTENTS.dump_python(self))

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "Contents":
        """Rebuild contents from the result of `tree`. Raises `ValueError` for another tree."""
        return _CONTENTS.validate_python(tree)


def joined(records: Iterable[tuple[str, str, TensorRecord]]) -> dict[str, dict[str, TensorRecord]]:
    """Merge (kind, parameter name, record with some slices of the tensor) into `Contents.tensors`."""
    found: dict[str, dict[str, list[TensorRecord]]] = {}
    for kind, name, record in records:
        found.setdefault(kind, {}).setdefault(name, []).append(record)
    return {kind: {name: _one(some) for name, some in by_name.items()} for kind, by_name in found.items()}


def _one(records: Sequence[TensorRecord]) -> TensorRecord:
    slices = [one for record in records for one in record.slices]
    return replace(records[0], slices=tuple(sorted(slices, key=lambda one: one.offset)))


@dataclass(frozen=True, kw_only=True)
class Manifest(Contents):
    """The contents of a checkpoint and their context.

    `layout`: the layout that wrote it, for people. `agreement`: the values that must be unchanged to continue
    (`checkpoint.agreement`). `state`: the caller's own.
    """

    step: Size
    layout: str
    versions: Mapping[str, str]
    agreement: Mapping[str, Any]
    state: Mapping[str, Any]

    def to_json(self) -> str:
        """The text of `manifest.json`. Raises `ValueError` for values that JSON lacks, such as NaN."""
        tree = dict(_MANIFEST.dump_python(self))
        contents = {field.name: tree.pop(field.name) for field in fields(Contents)}
        return signed({"format": FORMAT, "version": VERSION, **tree, **contents})

    @cached_property
    def by_file(self) -> Mapping[str, Sequence[tuple[str, str, Slice]]]:
        """The slices in each file that contains any: (kind, parameter name, slice)."""
        found: dict[str, list[tuple[str, str, Slice]]] = {}
        for kind, records in self.tensors.items():
            for name, record in records.items():
                for one in record.slices:
                    found.setdefault(one.file, []).append((kind, name, one))
        return found

    def listing(self, file: str) -> str:
        """The tensors lost with a file, for an error; empty if it contains none."""
        lost = [f"{kind} of {name}" for kind, name, _ in self.by_file.get(file, ())]
        return f"; it should hold {listed(lost, 3)}" if lost else ""

    @staticmethod
    def from_json(text: str, *, where: str) -> "Manifest":
        """Read and check `text`; `where` names it in errors. Raises `CorruptCheckpoint`, or `UserError` for a later
        version."""
        try:
            checksum = _SIGNED.match(text)
            if not checksum or checksum[1] != xxh3_128_hexdigest(text[checksum.end() :].encode()):
                raise ValueError("its checksum is not that of its text")
            tree = strict_json.loads(text)
            if tree["format"] != FORMAT:
                raise ValueError(f"format {tree['format']!r}")
            _check_version(tree["version"], where)
            manifest = _MANIFEST.validate_python(tree)
            _check(manifest)
        except ValidationError as error:
            wrong = error.errors()[0]
            at = ".".join(map(str, wrong["loc"]))
            raise CorruptCheckpoint(f"{where} is not the manifest of a checkpoint: {at}: {wrong['msg']}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpoint(f"{where} is not the manifest of a checkpoint: {error!r}") from error
        return manifest


_CONTENTS, _MANIFEST = TypeAdapter(Contents), TypeAdapter(Manifest)


def signed(tree: Mapping[str, Any]) -> str:
    """Dump a tree as JSON, with the checksum of the rest as first key. Raises `ValueError` for NaN and infinities."""
    text = json.dumps(tree, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"
    return f'{{"checksum":"{xxh3_128_hexdigest(text[1:].encode())}",{text[1:]}'


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder with all its files at full size. Raises `CorruptCheckpoint`, and `UserError`
    for a link whose target is missing: on a disk that is not mounted it may be whole."""
    if folder.is_symlink() and not folder.exists():
        raise UserError(
            f"{folder} is a link to {os.readlink(folder)}, which is not there", fix="mount it, or remove the link"
        )
    path = folder / NAME
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CorruptCheckpoint(f"{path} is larger than any manifest: {path.stat().st_size:,} bytes")
        manifest = Manifest.from_json(path.read_bytes().decode(), where=str(path))
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{path} is not the manifest of a checkpoint: {error}") from error
    except OSError as error:
        raise CorruptCheckpoint(f"{folder} is not a whole checkpoint: {error.strerror}: {path.name}") from error
    for name, record in manifest.files.items():
        file = folder / name
        if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
            raise CorruptCheckpoint(f"{file} is no file of this checkpoint{manifest.listing(name)}")
        found = file.stat().st_size
        if found != record.bytes:
            raise CorruptCheckpoint(
                f"{file} has {found} bytes, and the manifest says {record.bytes}{manifest.listing(name)}"
            )
    return manifest


def _check_version(version: Any, where: str) -> None:
    if version != VERSION:
        raise UserError(
            f"{where} has format version {version}, and this fivefold reads version {VERSION}",
            fix="use the fivefold that wrote it (see versions in the manifest)",
        )


def _check(manifest: Manifest) -> None:
    for name in manifest.files:
        if (
            any(part.startswith(".") or part == "" for part in name.split("/"))
            or "\\" in name
            or Path(name).is_absolute()
        ):
            raise ValueError(f"{name!r} is not the path of a file in the checkpoint's folder")
    for kind, records in manifest.tensors.items():
        for name, record in records.items():
            _check_record(f"{kind} of {name}", record, manifest.files)
    if WEIGHT not in manifest.tensors:
        raise ValueError("no weights")


def _check_record(name: str, record: TensorRecord, files: Mapping[str, FileRecord]) -> None:
    """Check that slices lie inside the tensor, in listed files, and tile it."""
    if record.dtype not in DTYPES:
        raise ValueError(f"{name}: dtype {record.dtype!r}")
    for one in record.slices:
        if not len(one.offset) == len(one.shape) == len(record.shape):
            raise ValueError(f"{name}: a slice of another rank")
        if any(start + size > whole for start, size, whole in zip(one.offset, one.shape, record.shape, strict=True)):
            raise ValueError(f"{name}: a slice that leaves the tensor")
        if one.file not in files:
            raise ValueError(f"{name}: {one.file!r} is not listed")
    if sum(prod(one.shape) for one in record.slices) != prod(record.shape):
        raise ValueError(f"{name}: its slices do not add up to {list(record.shape)}")
    if _overlap(record.slices):
        raise ValueError(f"{name}: slices that overlap")


def _overlap(slices: tuple[Slice, ...]) -> bool:
    """True if two slices share an element. Swept along the first dimension, so that many thin slices cost little."""
    open_slices: list[Slice] = []
    for one in sorted((one for one in slices if prod(one.shape)), key=lambda one: one.offset):
        open_slices = [other for other in open_slices if not one.offset or _end(other) > one.offset[0]]
        if any(_meet(one, other) for other in open_slices):
            return True
        open_slices.append(one)
    return False


def _end(one: Slice) -> int:
    return one.offset[0] + one.shape[0]


def _meet(one: Slice, other: Slice) -> bool:
    ranges = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    return all(start < at + length and at < start + size for start, size, at, length in ranges)
