"""Export of a checkpoint as a Hugging Face folder, in one process without a process group, tensor by tensor.

Memory holds no more than one output file. Tied weights are stored once, under the embedding's name.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from fivefold.checkpoint import model_folder
from fivefold.checkpoint.agreement import base_source, check_base
from fivefold.checkpoint.card import CARD, model_card
from fivefold.checkpoint.find import best_step, find_checkpoint
from fivefold.checkpoint.load import Checkpoint
from fivefold.checkpoint.push import Pushed, check_push, push_folder
from fivefold.config import RunConfig, parse_config
from fivefold.core.errors import UserError
from fivefold.core.files import writing
from fivefold.core.hub import Repository
from fivefold.data.tokenizer import tokenizer_files
from fivefold.models import hf_internals
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.discover import facts_of
from fivefold.models.merged import Pieces, split
from fivefold.models.origin import copied
from fivefold.models.recipe import stored_buffers
from fivefold.parallel.adapters.facts import targets_of
from fivefold.parallel.adapters.merge_check import MergeCheck, Stored, check_merged
from fivefold.parallel.adapters.peft_folder import (
    PEFT_CONFIG,
    WEIGHTS,
    base_name,
    config_beside,
    names_in_peft,
    to_peft,
)
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.adapters.sources import InNf4, Merged, transposed_modules

FILE_BYTES = 2 * 10**9
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Exported:
    """A finished export: the folder, its step, and the size and type of its weights."""

    path: Path
    step: int
    parameters: int
    bytes: int
    dtype: torch.dtype
    is_adapter: bool = False  # a folder of `peft`
    push: Pushed | None = None
    check: MergeCheck | None = None  # only for a merged adapter
    lacks: Mapping[str, int] = field(default_factory=dict)  # counts of layers that the config no longer declares


def export(
    run: str | Path,
    out: Path,
    *,
    step: int | None = None,
    best: bool = False,
    dtype: str | None = None,
    force: bool = False,
    merge: bool = False,
    push: Repository | None = None,
    room: int | None = None,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Write the checkpoint of `step` (None: the newest, or with `best` that of the best validation) of `run`, a run
    folder or the address of its copy, as the Hugging Face folder `out`, with a model card. An adapter becomes a folder
    of `peft`, or, with `merge`, a model folder with merged weights, whose logits are compared first if `room` bytes of
    memory allow (None: always).

    `dtype`: see `export_dtype`. Files grow to `file_bytes` (a larger tensor still stays in one). `force` replaces an
    existing model folder. `push`: the repository of the hub to which the folder is then uploaded; it is created only
    once the folder is complete. Raises `UserError` for a missing run or step, if `out` is in the way, and if the hub
    refuses.
    """
    if best and step is not None:
        raise UserError(f"the best step and step {step} are both asked for", fix="leave one out")
    checkpoint = find_checkpoint(run, best_step(run) if best else step)
    with writing(out, instead="name another folder"):  # its name may be too long to look at
        out = out.resolve() if out.is_symlink() else out  # the folder is replaced, not the link
    if push is None:
        return _export(checkpoint, run, out, f'"{out.name}"', dtype, force, merge, room, file_bytes)
    check_push(push)  # before a large model is written
    done = _export(checkpoint, run, out, push.arguments, dtype, force, merge, room, file_bytes)
    files = [path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()]  # `out` was replaced whole
    return replace(done, push=push_folder(push, out, files, f"step {done.step} of {Path(str(run)).name}"))


def _export(
    checkpoint: Checkpoint, run: str | Path, out: Path, arguments: str, dtype: str | None, force: bool, merge: bool,
    room: int | None, file_bytes: int,
) -> Exported:  # fmt: skip
    """Write `checkpoint`; its card loads it by these `arguments` of `from_pretrained`. See `export`."""
    source: model_folder.WholeTensors = checkpoint.source()
    beside = adapter_of(checkpoint)
    if beside is None and merge:
        raise UserError(f"{run} has no adapter to merge: the whole model was trained", fix="leave --merge out")
    base = beside and Path(beside.config.model.name_or_path).resolve()
    if checkpoint.path.parent.resolve() in out.resolve().parents or out.resolve() == base:
        raise UserError(f"{out} holds weights that {run} needs", fix="name another folder")
    if beside is not None and not merge:
        size, kind = beside.write(out, run, dtype, arguments=arguments, force=force)
        return Exported(out, checkpoint.manifest.step, beside.parameters, size, kind, is_adapter=True)
    came_in = model_folder.origin(checkpoint.model_folder).get("dtype")
    target = model_folder.export_dtype(
        dtype, came_in=came_in, trained=checkpoint.source().dtype(checkpoint.source().ordered[0])
    )
    check, known = None, known_of(checkpoint.model_folder, target)
    if beside is not None:
        _check_free(out, force)
        source, check = beside.merged(known.stored, room)
    files = checkpoint.model_files()
    card = model_card(checkpoint, run, arguments=arguments, dtype=_name(target))
    size = write_folder(source, out, {**files, CARD: card.encode()}, known, force=force, file_bytes=file_bytes)
    parameters = sum(prod(source.shape(name)) for name in source.ordered if name not in known.buffers)
    return Exported(out, checkpoint.manifest.step, parameters, size, target, check=check, lacks=known.lacks)


def write_folder(
    source: model_folder.WholeTensors, out: Path, files: Mapping[str, bytes], known: "Known", *,
    force: bool = False, into: bool = False, file_bytes: int = FILE_BYTES,
) -> int:  # fmt: skip
    """Write `files` (config, tokenizer) and the tensors of `source` as the Hugging Face folder `out`, through a
    temporary folder. Returns the bytes of the tensors.

    `force` replaces an existing model folder. `into`: `out` may exist with other files; those of the same names are
    replaced, and so are weights of an earlier model. Raises `RunFailed`, or `UserError` if the folder is at fault.
    """
    into = into and out.is_dir()
    if not into:
        _check_free(out, force)
    with model_folder.beside(out) as temporary:
        _write_model_files(files, temporary, known)
        size = _write_weights(source, temporary, file_bytes, known)
        if into:
            for old in [file for file in out.iterdir() if _WEIGHTS.fullmatch(file.name)]:
                old.unlink()
        _publish(temporary, out, into=into)
    return size


def _check_free(out: Path, force: bool) -> None:
    """Raise `UserError` if `out` would be replaced without `force`, or is no model folder."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    is_model = (out / model_folder.CONFIG).is_file()
    if not is_model:
        raise UserError(f"{out} exists and is not a model folder", fix="name a new folder")
    if not force:
        raise UserError(f"{out} exists and is not empty", fix="name a new folder; --force (force=True) replaces it")


def _publish(temporary: Path, out: Path, *, into: bool) -> None:
    """Move a finished folder to `out`; `into`: its files, beside those that are there."""
    if not into:
        return model_folder.publish(temporary, out)
    for path in sorted(temporary.iterdir()):
        os.replace(path, out / path.name)


def _write_model_files(files: Mapping[str, bytes], folder: Path, known: "Known") -> None:
    """Write config, generation config, tokenizer, processors and card; the config states the type of the weights, and
    none of the layers that the folder lacks."""
    model_folder.write({name: files[name] for name in files.keys() - {model_folder.ORIGIN}}, folder)
    config = model_folder.read_json(folder / model_folder.CONFIG)
    dtype = {"dtype": _name(known.dtype)}
    stated = _stated(config, dict.fromkeys(known.lacks, 0) | dtype) | dtype
    (folder / model_folder.CONFIG).write_bytes(model_folder.json_text(stated))


def _stated(section: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """A section of a config, with the values of `others` where it or a section in it has their keys."""
    return {
        key: others[key] if key in others else _stated(value, others) if isinstance(value, dict) else value
        for key, value in section.items()
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Known:
    """Properties of the files of a model class, with weights in `dtype`: names that differ from the model's own,
    tensors that are split, stored buffers, the type of each tensor, and what the config counts of layers that the
    class lacks."""

    dtype: torch.dtype
    names: Mapping[str, str] = field(default_factory=dict)
    pieces: Pieces = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    types: Mapping[str, torch.dtype] = field(default_factory=dict)
    lacks: Mapping[str, int] = field(default_factory=dict)

    def stored(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """The values of a tensor in the type in which it leaves. Raises `UserError` if one is too large for it."""
        return model_folder.cast(name, values, self.type_of(name))

    def type_of(self, name: str) -> torch.dtype:
        return self.types.get(name, self.dtype)


def known_of(config: Any, dtype: torch.dtype) -> Known:
    """The properties of the model class of `config`, which may be a model folder, for weights in `dtype`."""
    try:
        model = build_meta(load_model_config(config) if isinstance(config, Path) else config)
        types, lacks = hf_internals.stored_dtypes(model, dtype), hf_internals.unbuilt_layers(model)
        return Known(dtype, *hf_internals.saved_as(model), stored_buffers(model), types, lacks)
    except UserError:  # a class that is registered only in the training process
        return Known(dtype)


def lacking(lacks: Mapping[str, int]) -> list[str]:
    """A line for each count of layers that an export lacks, and its config no longer declares."""
    return [
        f"{key} is 0 in its config.json, and was {count}: layers that predict further tokens are not trained, and "
        "not in the weights"
        for key, count in lacks.items()
    ]


def _write_weights(source: model_folder.WholeTensors, folder: Path, file_bytes: int, known: Known) -> int:
    """Write the tensors into as few files as `file_bytes` allows, with an index if there are several."""
    files = list(_files(source, known, file_bytes))
    where: dict[str, str] = {}
    computed = {name: values for name, values in known.buffers.items() if name not in source.ordered}
    total = 0
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        tensors = {name: known.stored(name, source.whole(name)) for name in names}
        if number == 1:
            tensors |= {name: known.stored(name, values) for name, values in computed.items()}
        for name in [name for name in tensors if name in known.pieces]:
            tensors |= split(known.pieces[name], tensors.pop(name))
        tensors = {known.names.get(name, name): tensor for name, tensor in tensors.items()}
        model_folder.save_tensors(tensors, folder / file)
        where |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def _files(source: model_folder.WholeTensors, known: Known, file_bytes: int) -> Iterator[list[str]]:
    """Names in the model's order, split so that each file stays within `file_bytes`."""
    names: list[str] = []
    size = 0
    for name in source.ordered:
        more = prod(source.shape(name)) * known.type_of(name).itemsize
        if names and size + more > file_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    yield names


# ---- adapters: a folder of `peft`, or merged into the weights of their base ------------------------------------------

_FILES = frozenset({PEFT_CONFIG, WEIGHTS, CARD})


def adapter_of(checkpoint: Checkpoint) -> "CheckpointAdapter | None":
    """The adapter of a checkpoint; None if it contains a whole model."""
    file = checkpoint.path / "run.yaml"
    config = parse_config(file.read_text(encoding="utf-8")) if file.is_file() else None
    if config is None or config.adapter.lora is None:
        return None
    return CheckpointAdapter(checkpoint, config, config.adapter.lora)


@dataclass(frozen=True)
class CheckpointAdapter:
    """The adapter in a checkpoint of a run."""

    checkpoint: Checkpoint
    config: RunConfig
    lora: Lora

    @property
    def parameters(self) -> int:
        source = self.checkpoint.source()
        return sum(prod(source.shape(name)) for name in source.ordered)

    @cached_property
    def _model(self) -> Any:
        return build_meta(load_model_config(self.checkpoint.model_folder))

    def merged(self, stored: Stored, room: int | None) -> tuple[model_folder.WholeTensors, MergeCheck]:
        """The model with merged weights, fp32, and the comparison of its logits; see `check_merged`. Raises `UserError`
        if the model's own weights are gone, `RunFailed` if the logits differ."""
        transposed = transposed_modules(self._model)
        base, adapter = base_source(self.config, self._model), self.checkpoint.source()
        check_base(self.config, self.checkpoint.agreement, str(self.checkpoint.path))
        if self.lora.quantize == "nf4":  # the base that the adapter was trained on
            base = InNf4(base, [target.weight for target in targets_of(facts_of(self._model), self.lora)])
        merged = Merged(base, adapter, self.lora, transposed)
        check = check_merged(self._model.config, base, adapter, merged, self.lora, stored, room)
        return merged, check

    def write(
        self, out: Path, run: str | Path, dtype: str | None, *, arguments: str, force: bool
    ) -> tuple[int, torch.dtype]:
        """Write a folder of `peft`, with the tokenizer and its chat template; returns its bytes, and the type of its
        weights. The card loads it by these `arguments` of `from_pretrained`. Raises `UserError`, `RunFailed`."""
        source = self.checkpoint.source()
        kind = model_folder.export_dtype(dtype, trained=source.dtype(source.ordered[0]))
        card = model_card(
            self.checkpoint, run, arguments=arguments, dtype=str(kind).removeprefix("torch."), adapted=self.parameters,
        )  # fmt: skip
        folder = self.checkpoint.model_folder
        files = {**self.checkpoint.model_files(), CARD: card.encode()}
        files = {name: files[name] for name in files.keys() - model_folder.OF_MODEL}
        base = self.config.model.name_or_path
        base = base_name(base, is_local=model_folder.hub_id(folder, base) is None)
        return write_peft(source, out, self.lora, self._model, base=base, dtype=kind, files=files, force=force), kind


def write_peft(
    source: model_folder.WholeTensors, out: Path, lora: Lora, model: Any, *, base: str, dtype: torch.dtype,
    files: Mapping[str, bytes] | None = None, force: bool = False, into: bool = False,
) -> int:  # fmt: skip
    """Write the adapter `lora` of `model` (on the meta device, without it) as the folder `out` of `peft`, through a
    temporary folder; returns the bytes of its tensors. `base`: the name of the model. `files`: what lies beside it.
    `force` replaces an existing adapter, `into` keeps other files. Raises `RunFailed`, or `UserError` if the folder is
    at fault."""
    there = set(out.iterdir()) if out.is_dir() else set()
    ours = [*(out / name for name in _FILES), *tokenizer_files(out), *copied(out)]
    into = into and out.is_dir()
    is_adapter = out / PEFT_CONFIG in there and there <= {*ours, *(path.parent for path in ours)}
    if not into and out.exists() and (not out.is_dir() or there) and not (force and is_adapter):
        raise UserError(f"{out} exists and is not empty", fix="name a new folder; --force replaces an adapter")
    targets = targets_of(facts_of(model), lora)
    named = names_in_peft(targets)
    tensors = {
        named[name]: to_peft(name, model_folder.cast(name, source.whole(name), dtype)) for name in source.ordered
    }
    with model_folder.beside(out) as temporary:
        model_folder.save_tensors(tensors, temporary / WEIGHTS)
        (temporary / PEFT_CONFIG).write_bytes(model_folder.json_text(config_beside(lora, targets, model, base)))
        model_folder.write(files or {}, temporary)
        _publish(temporary, out, into=into)
    return sum(tensor.nbytes for tensor in tensors.values())
