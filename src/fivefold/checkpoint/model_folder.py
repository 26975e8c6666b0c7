"""`model/` of a checkpoint: everything of a Hugging Face folder except the weights. Export and generate read it.

It contains config.json as resolved for the run, generation_config.json with every end token, and copies of the files of
tokenizer, processors and licence: a checkpoint does not need the folder that its run started from.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fivefold.core import strict_json
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.files import cannot_write, is_users, of_system
from fivefold.core.hub import is_hub_id
from fivefold.core.interrupts import sigterm_raises
from fivefold.data.tokenizer import tokenizer_files
from fivefold.models.origin import Origin

MODEL_FOLDER = "model"
CONFIG, GENERATION = "config.json", "generation_config.json"
ORIGIN = "origin.json"  # only in checkpoints: the dtype, the hub id and the licence of the starting model
OF_MODEL = frozenset({CONFIG, GENERATION, ORIGIN})  # of no use next to an adapter


def model_files(
    config: Any,
    *,
    model_class: str,
    dtype: str,
    tokenizer: Path | None,
    generation: Any = None,
    came_in: str | None = None,
    origin: Origin | None = None,
) -> dict[str, bytes]:
    """The files of the folder by their paths in it, for a model of class `model_class` whose `transformers` config is
    `config`.

    `dtype` is that of the weights (`float32`); `tokenizer` a tokenizer folder; `generation` the model's generation
    config; `came_in` is the dtype of the starting model, and `origin` its folder.
    """
    values = json.loads(config.to_json_string())
    values |= {"architectures": [model_class], "dtype": dtype}
    lent = json.loads(generation.to_json_string()) if generation is not None else {}
    own = {key: values.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    origin = origin or Origin()
    about = {"dtype": came_in, "hub": origin.hub, "licence": origin.licence}
    files = {CONFIG: json_text(values), GENERATION: json_text(own | lent), ORIGIN: json_text(about)}
    copied = tokenizer_files(tokenizer) if tokenizer is not None else []
    of_tokenizer = {str(path.relative_to(tokenizer or path)): path.read_bytes() for path in copied}
    return {**origin.files, **of_tokenizer, **files}


@contextmanager
def beside(out: Path) -> Iterator[Path]:
    """A new folder next to `out`, to be filled and moved to `out`; removed if it still exists at the end. Raises
    `RunFailed` for errors while it is written, or `UserError` if the folder is at fault."""
    temporary = out.with_name(f".tmp-{out.name}")
    with suppress(OSError), _held(temporary):  # of an export that was killed
        shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        with sigterm_raises(), _held(temporary):  # otherwise as many bytes as the model has would stay there
            yield temporary
    except (OSError, SafetensorError) as error:  # safetensors raises its own error for a full disk
        said = of_system(error)
        if said and is_users(said):
            raise cannot_write(out, said, instead="name another folder") from error
        raise RunFailed(f"{out} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold `folder` against other processes, where its disk has locks. Raises `UserError` if another one has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a disk without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process writes {folder}", fix="wait for it, or name another folder") from None
        yield
    finally:
        os.close(descriptor)


def publish(temporary: Path, out: Path) -> None:
    """Replace the old folder, if there is one, by the finished one."""
    old = out.with_name(f".old-{out.name}")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.rename(out, old)
    os.rename(temporary, out)
    shutil.rmtree(old, ignore_errors=True)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a new safetensors file with default permissions: the library would write a temporary file that only its
    owner can read, and rename it."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


def write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def origin(folder: Path) -> dict[str, Any]:
    """Facts about the model that the run of a checkpoint started from: its `dtype` in torch's name, its `hub` id, its
    `licence`, each None if there is none. Checkpoints of earlier versions lack some."""
    return read_json(folder / ORIGIN) if (folder / ORIGIN).is_file() else {}


def hub_id(folder: Path, name: str) -> str | None:
    """The id on the hub of the model `name` that the run of a checkpoint started from, None for a local folder: as it
    was then, or, for checkpoints of versions that did not keep it, as it is here."""
    hub: str | None = origin(folder).get("hub", name if is_hub_id(name) else None)
    return hub


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `UserError` if it contains none."""
    try:
        return dict(strict_json.read_config(path))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def json_text(tree: Mapping[str, Any]) -> bytes:
    """A JSON file in the style of `transformers`."""
    return (json.dumps(tree, indent=2, sort_keys=True) + "\n").encode()


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class WholeTensors(Protocol):
    """Tensors by name, each whole on the CPU; requested once, in the order of `ordered`."""

    @property
    def ordered(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def whole(self, name: str) -> torch.Tensor: ...


def export_dtype(
    asked: str | None, *, came_in: str | torch.dtype | None = None, trained: torch.dtype = torch.float32
) -> torch.dtype:
    """The type of exported weights: `asked` (bf16, fp16, fp32, fp64); else the original type, from the config of the
    starting model; else the type trained in, fp32 except in tests. Raises `UserError` for an unknown one."""
    if asked is not None and asked not in DTYPES:
        raise UserError(f"dtype {asked!r} is not known", fix=f"choose one of {', '.join(DTYPES)}")
    if asked is not None:
        return DTYPES[asked]
    found = getattr(torch, came_in, None) if isinstance(came_in, str) else came_in
    return found if isinstance(found, torch.dtype) and found in DTYPES.values() else trained


def cast(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` in `dtype`; integers stay unchanged. Raises `UserError` if a weight is too large for it (fp16)."""
    if not values.is_floating_point():
        return values
    stored = values.to(dtype)
    if dtype is torch.float16 and bool((stored.isinf() & values.isfinite()).any()):
        raise UserError(f"{name} has values beyond fp16, which ends at 65,504", fix="choose bf16 or fp32")
    return stored
