"""A checkpoint as a Hugging Face folder, in one process without a process group, tensor by tensor.

No more than one output file is held in memory. Tied weights are stored once, under the embedding's name.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from fivefold.checkpoint import model_folder
from fivefold.checkpoint.find import find_checkpoint
from fivefold.errors import RunFailed, UserError
from fivefold.models import surfaces
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.merged import Merged, split
from fivefold.models.recipe import stored_buffers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
FILE_BYTES = 2 * 10**9
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Exported:
    """A finished export: the folder, the step it holds, and how large its weights are."""

    path: Path
    step: int
    parameters: int
    bytes: int


def export(
    run: str | Path, out: Path, *, step: int | None = None, dtype: str | None = None, file_bytes: int = FILE_BYTES
) -> Exported:
    """Write the checkpoint of `step` (None: the newest) of `run`, a run folder or the address of its
    copy, as the Hugging Face folder `out`.

    `dtype`: fp32, bf16, fp16 or fp64; None keeps the type trained in. Files grow to `file_bytes` (a larger tensor
    still stays in one). Raises `UserError` for a run or a step that is not there, and when `out` is not empty.
    """
    checkpoint = find_checkpoint(run, step)
    source = checkpoint.source()
    target = known_dtype(dtype) or source.dtype(source.ordered[0])
    known = _known(checkpoint.model_folder)
    files = {path.name: path.read_bytes() for path in sorted(checkpoint.model_folder.iterdir())}
    size = write_folder(source, out, files, target, known, file_bytes=file_bytes)
    parameters = sum(prod(source.shape(name)) for name in source.ordered if name not in known.buffers)
    return Exported(out, checkpoint.manifest.step, parameters, size)


def known_dtype(dtype: str | None) -> torch.dtype | None:
    """The type of that name. Raises `UserError` for another name."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not known", fix=f"choose one of {', '.join(DTYPES)}")
    return None if dtype is None else DTYPES[dtype]


class WholeTensors(Protocol):
    """Tensors by name, each whole on the CPU; asked for once, in the order of `ordered`."""

    @property
    def ordered(self) -> tuple[str, ...]:
        """Names in the model's order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        ...

    def whole(self, name: str) -> torch.Tensor:
        """All of it."""
        ...


def write_folder(
    source: WholeTensors, out: Path, files: Mapping[str, bytes], dtype: torch.dtype, known: "Known", *,
    file_bytes: int = FILE_BYTES, into: bool = False,
) -> int:  # fmt: skip
    """Write the Hugging Face folder `out`: `files` (config, tokenizer) and the tensors of `source`; the bytes of these.

    The folder appears when all is written. `into`: it may be there with other files, whose namesakes are replaced, and
    so are weights of an earlier model. Raises `UserError` when it may not, `RunFailed` when it cannot be written.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not into)):
        raise UserError(f"{out} exists and is not empty; an export never overwrites", fix="name a new folder")
    temporary = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for name, content in files.items():
            (temporary / name).write_bytes(_with_dtype(content, dtype) if name == model_folder.CONFIG else content)
        size = _write_weights(source, temporary, dtype, file_bytes, known)
        _publish(temporary, out)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunFailed(f"{out} could not be written: {error}") from error
    return size


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """A config that names the type of the weights beside it."""
    return model_folder.json_text(json.loads(config) | {"dtype": str(dtype).removeprefix("torch.")})


def _publish(temporary: Path, out: Path) -> None:
    """Rename the folder, or what is in it where there is one already."""
    if out.exists() and any(out.iterdir()):
        for old in [each for each in out.iterdir() if _WEIGHTS.fullmatch(each.name)]:
            old.unlink()
        for path in sorted(temporary.iterdir()):
            os.replace(path, out / path.name)
        temporary.rmdir()
        return
    if out.exists():
        out.rmdir()
    os.rename(temporary, out)


@dataclass(frozen=True)
class Known:
    """What the class of a model says of its files: names that differ from the model's own, tensors that are split
    there, and buffers kept in them."""

    names: Mapping[str, str]
    pieces: Merged
    buffers: Mapping[str, torch.Tensor]


def _known(folder: Path) -> Known:
    try:
        return known_of(load_model_config(folder))
    except UserError:  # a class that is registered only where it was trained
        return Known({}, {}, {})


def known_of(config: Any) -> Known:
    """What the class of the model of `config` says."""
    try:
        model = build_meta(config)
        return Known(surfaces.saved_names(model), surfaces.saved_pieces(model), stored_buffers(model))
    except UserError:  # a class that is registered only where it was trained
        return Known({}, {}, {})


def _write_weights(source: WholeTensors, folder: Path, dtype: torch.dtype, file_bytes: int, known: Known) -> int:
    """Write the tensors into as few files as `file_bytes` allows, with an index when there are several."""
    files = list(_files(source, dtype, file_bytes))
    where: dict[str, str] = {}
    computed = {name: values for name, values in known.buffers.items() if name not in source.ordered}
    total = 0
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        tensors = {name: source.whole(name).to(dtype) for name in names}
        if number == 1:
            tensors |= {n: t.to(dtype) if t.is_floating_point() else t for n, t in computed.items()}
        for name in [each for each in tensors if each in known.pieces]:
            tensors |= split(known.pieces[name], tensors.pop(name))
        tensors = {known.names.get(name, name): tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def _files(source: WholeTensors, dtype: torch.dtype, file_bytes: int) -> Iterator[list[str]]:
    """Names in the model's order, split so that each file stays within `file_bytes`."""
    names: list[str] = []
    size = 0
    for name in source.ordered:
        more = prod(source.shape(name)) * dtype.itemsize
        if names and size + more > file_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    yield names
