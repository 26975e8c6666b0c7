"""The manifest of a checkpoint: how each tensor is cut, and its files. JSON in, JSON out; no torch.

    step-000250/
      manifest.json
      weight-00000.safetensors      the slices of the weights that rank 0 wrote
      optimizer-00000.safetensors   and of its optimizer state
      run.yaml                      the resolved run file
      model/                        a Hugging Face folder without its weights: config, tokenizer, processors

Tensors are keyed by kind (`weight`, and the optimizer's states per parameter: `exp_avg` and `exp_avg_sq`, or
`momentum_buffer`), then by the Hugging Face parameter name. Each is cut into slices that tile it exactly. The manifest
lists no slice: it has the rule by which they lie on ranks (`checkpoint/cut.py`). The file and the key of a slice follow
from its kind, name, rank and range. A rank whose slices are not those of the rule is listed with them.

Every byte is under a checksum: the manifest begins with its own; a safetensors file ends with those of its slices, each
bound to name, type and range, and the manifest has one of these and the header together (`checkpoint/shard.py`); every
other file has one of its contents. Readers ignore unknown keys, so that later versions may add some.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from xxhash import xxh3_128_hexdigest

from fivefold.checkpoint.cut import OPTIMIZER, WEIGHT, Box, TensorCut, family_of, file_of, key_of
from fivefold.checkpoint.records import Columns, FileRecord, Records, Size, Written, check_record, records_of, tree_of
from fivefold.core import strict_json
from fivefold.core.errors import UserError
from fivefold.core.text import listed

MANIFEST = "manifest.json"
FORMAT = "fivefold-checkpoint"
VERSION = 2

_SIGNED = re.compile(r'\{"checksum":"([0-9a-f]{32})",')
_OF_RANK = re.compile(rf"({WEIGHT}|{OPTIMIZER})-(\d{{5,9}})\.safetensors")
_CONTEXT = ("step", "layout", "versions", "agreement", "state")  # keys before the contents


class CorruptCheckpoint(UserError):
    """A checkpoint folder that differs from its manifest, or has no readable manifest."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint and their context.

    `layout`: the layout that wrote it, for people. `agreement`: the values that must be unchanged to continue
    (`checkpoint.agreement`). `state`: the caller's own. `files`: path inside the folder -> record. `scalars`: parameter
    name -> the optimizer's scalars for it (`step`). `checksum`: that of the text it was read from. `sums`: file -> key
    -> checksum of a slice, in version 1, whose files do not have them.
    """

    step: int
    layout: str
    versions: Mapping[str, str]
    agreement: Mapping[str, Any]
    state: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    scalars: Mapping[str, Mapping[str, float]]
    tensors: Records
    checksum: str = ""
    sums: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of `manifest.json`. Raises `ValueError` for values that JSON lacks, such as NaN."""
        others = {name: asdict(record) for name, record in self.files.items() if not _OF_RANK.fullmatch(name)}
        return signed({
            "format": FORMAT, "version": VERSION, **{key: getattr(self, key) for key in _CONTEXT},
            "files": others, "ranks": {family: Columns.tree(records) for family, records in self._of_ranks.items()},
            "scalars": self.scalars, **tree_of(self.tensors),
        })  # fmt: skip

    def held(self, file: str) -> dict[str, tuple[str, str]]:
        """The slices in a file: key -> (kind, parameter name)."""
        named = _OF_RANK.fullmatch(file)
        family, rank = (named[1], int(named[2])) if named else ("", 0)
        return {
            key_of(kind, name, own): (kind, name)
            for kind, records in self.tensors.items()
            if family_of(kind) == family
            for name, record in records.items()
            for own in record.of_rank(rank)
        }

    def listing(self, file: str) -> str:
        """The tensors lost with a file, for an error; empty if it contains none."""
        lost = [f"{kind} of {name}" for kind, name in self.held(file).values()]
        return f"; it should hold {listed(lost, 3)}" if lost else ""

    def check(self) -> None:
        """Check that every tensor is tiled by slices in files that are listed. Raises `ValueError`."""
        for name in self.files:
            if (
                any(part.startswith(".") or part == "" for part in name.split("/"))
                or "\\" in name
                or Path(name).is_absolute()
            ):
                raise ValueError(f"{name!r} is not the path of a file in the checkpoint's folder")
        alike = set[object]()
        every = ((kind, *one) for kind, records in self.tensors.items() for one in records.items())
        for kind, name, record in every:
            same = record.shape, record.dtype, record.cut, record.rank, family_of(kind)
            if record.instead or same not in alike:  # most tensors are cut as another one
                check_record(kind, name, record, self._of_ranks.get(family_of(kind), {}).keys())
                alike.add(same)
        if WEIGHT not in self.tensors:
            raise ValueError("no weights")

    @cached_property
    def _of_ranks(self) -> Mapping[str, Mapping[int, FileRecord]]:
        """The files of ranks: how their names begin -> rank -> record."""
        found: dict[str, dict[int, FileRecord]] = {}
        for name, record in self.files.items():
            if named := _OF_RANK.fullmatch(name):
                found.setdefault(named[1], {})[int(named[2])] = record
        return dict(sorted(found.items()))

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
            manifest = _manifest(_upgraded(tree) if tree["version"] == 1 else tree)
            manifest.check()
        except ValidationError as error:
            wrong = error.errors()[0]
            at = ".".join(map(str, wrong["loc"]))
            raise CorruptCheckpoint(f"{where} is not the manifest of a checkpoint: {at}: {wrong['msg']}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpoint(f"{where} is not the manifest of a checkpoint: {error!r}") from error
        return manifest


@dataclass(frozen=True)
class _Tree:
    """The manifest as JSON has it."""

    step: Size
    layout: str
    versions: Mapping[str, str]
    agreement: Mapping[str, Any]
    state: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    ranks: Mapping[str, Columns]
    scalars: Mapping[str, Mapping[str, float]]
    cuts: tuple[TensorCut, ...]
    tensors: Mapping[str, Mapping[str, Written]]
    checksum: str
    sums: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


_TREE = TypeAdapter(_Tree)


def _manifest(tree: Mapping[str, Any]) -> Manifest:
    """Rebuild a manifest from its JSON values. Raises `ValueError` for another tree."""
    found = _TREE.validate_python(tree)
    if unknown := found.ranks.keys() - {WEIGHT, OPTIMIZER}:
        raise ValueError(f"files of ranks named {sorted(unknown)[0]!r}")
    of_ranks = {
        file_of(family, rank): record for family, columns in found.ranks.items() for rank, record in columns.records()
    }
    return Manifest(
        **{key: getattr(found, key) for key in (*_CONTEXT, "scalars", "checksum", "sums")},
        files={**of_ranks, **found.files},
        tensors=records_of(found.cuts, found.tensors),
    )


def signed(tree: Mapping[str, Any]) -> str:
    """Dump a tree as JSON, with the checksum of the rest as first key. Raises `ValueError` for NaN and infinities."""
    text = f"{_dumped(tree)[1:]}\n"
    return f'{{"checksum":"{xxh3_128_hexdigest(text.encode())}",{text}'


def _dumped(value: Any, deep: int = 3) -> str:
    """Dump a value as JSON, with each tensor, file and cut on a line of its own."""
    if deep and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        lines = [f"{json.dumps(key, ensure_ascii=False)}:{_dumped(inner, deep - 1)}" for key, inner in value.items()]
        return "{" + ",\n".join(lines) + "}"
    if deep and isinstance(value, list) and all(isinstance(inner, dict) for inner in value):
        return "[" + ",\n".join(_dumped(inner, 0) for inner in value) + "]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder with all its files at full size. Raises `CorruptCheckpoint`, and `UserError`
    for a link whose target is missing: on a disk that is not mounted it may be whole."""
    manifest = read_description(folder)
    for name in manifest.files:
        if wrong := problem(folder, manifest, name):
            raise CorruptCheckpoint(wrong)
    return manifest


def read_description(folder: Path) -> Manifest:
    """`read_manifest` without a look at the other files."""
    if folder.is_symlink() and not folder.exists():
        raise UserError(
            f"{folder} is a link to {os.readlink(folder)}, which is not there", fix="mount it, or remove the link"
        )
    path = folder / MANIFEST
    try:
        return Manifest.from_json(path.read_bytes().decode(), where=str(path))
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{path} is not the manifest of a checkpoint: {error}") from error
    except OSError as error:
        raise CorruptCheckpoint(f"{folder} is not a whole checkpoint: {error.strerror}: {path.name}") from error


def problem(folder: Path, manifest: Manifest, name: str) -> str:
    """The problem of a file at first sight; empty if it is there, at full size."""
    file, size = folder / name, manifest.files[name].bytes
    is_there, is_direct = file.is_file(), "/" not in name and not file.is_symlink()
    if not is_there or not (is_direct or file.resolve().is_relative_to(folder.resolve())):
        what = "is no file of this checkpoint" if os.path.lexists(file) else "is missing"
        return f"{file} {what}{manifest.listing(name)}"
    found = file.stat().st_size
    return "" if found == size else f"{file} has {found} bytes, and the manifest says {size}{manifest.listing(name)}"


def _check_version(version: Any, where: str) -> None:
    if version not in (1, VERSION):
        raise UserError(
            f"{where} has format version {version}, and this fivefold reads versions up to {VERSION}",
            fix="use the fivefold that wrote it (see versions in the manifest)",
        )


# ---- version 1, which lists every slice of every tensor with its file, key and checksum ------------------------------

_OLD_FILE = re.compile(r"[a-z]+-(\d{5,})\.safetensors")


def _upgraded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON values of a manifest of version 1 as those of today: tensors without a cut, whose slices are listed rank
    by rank. Raises `ValueError` for a slice whose file or key does not follow from what it is."""
    sums: dict[str, dict[str, str]] = {}
    tensors = {
        kind: {name: _old_record(kind, name, one, sums) for name, one in records.items()}
        for kind, records in tree["tensors"].items()
    }
    return {**tree, "tensors": tensors, "sums": sums, "ranks": {}, "cuts": []}


def _old_record(kind: str, name: str, record: Mapping[str, Any], sums: dict[str, dict[str, str]]) -> dict[str, Any]:
    """One tensor. `sums` is filled with the checksums of its slices."""
    instead: dict[int, list[Box]] = {}
    for one in record["slices"]:
        file, own = one["file"], tuple((at, at + size) for at, size in zip(one["offset"], one["shape"], strict=True))
        rank = int(named[1]) if (named := _OLD_FILE.fullmatch(file)) else -1
        if file != file_of(kind, rank) or one["key"] != key_of(kind, name, own):
            raise ValueError(f"{kind} of {name}: {one['key']!r} in {file!r} is no slice of it")
        instead.setdefault(rank, []).append(own)
        sums.setdefault(file, {})[one["key"]] = one["checksum"]
    return {"shape": record["shape"], "dtype": record["dtype"], "instead": [*instead.items()]}
