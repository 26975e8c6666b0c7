"""Export of a checkpoint's adapter, as a folder of `peft`, or merged into the weights of its base model."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint.base import base_source, check_base
from fivefold.checkpoint.card import CARD, model_card
from fivefold.checkpoint.load import Checkpoint
from fivefold.checkpoint.model_folder import OF_MODEL, beside, hub_id, json_text, publish, save_tensors, write
from fivefold.checkpoint.whole_tensors import WholeTensors, cast, export_dtype
from fivefold.config import RunConfig, parse_config
from fivefold.core.errors import UserError
from fivefold.data.tokenizer import tokenizer_files
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.discover import facts_of
from fivefold.models.origin import copied
from fivefold.parallel.adapters.facts import targets_of
from fivefold.parallel.adapters.merge_check import MergeCheck, Stored, check_merged
from fivefold.parallel.adapters.peft_folder import CONFIG, WEIGHTS, base_name, config_beside, names_in_peft, to_peft
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.adapters.sources import InNf4, Merged, transposed_modules

_FILES = frozenset({CONFIG, WEIGHTS, CARD})


def of(checkpoint: Checkpoint) -> "CheckpointAdapter | None":
    """The adapter of a checkpoint; None if it contains a whole model."""
    file = checkpoint.path / "run.yaml"
    config = parse_config(file.read_text(encoding="utf-8")) if file.is_file() else None
    if config is None or config.adapter.lora is None:
        return None
    return CheckpointAdapter(checkpoint, config, config.adapter.lora)


@dataclass(frozen=True)
class _Whole:
    """The tensors of a merged model, in its order, each once."""

    source: Merged

    @property
    def ordered(self) -> tuple[str, ...]:
        return tuple(self.source.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def whole(self, name: str) -> Tensor:
        return self.source.whole(name)


@dataclass(frozen=True)
class CheckpointAdapter:
    """The adapter in a checkpoint of a run."""

    checkpoint: Checkpoint
    config: RunConfig
    lora: Lora

    @property
    def parameters(self) -> int:
        """Number of the adapter's parameters."""
        source = self.checkpoint.source()
        return sum(prod(source.shape(name)) for name in source.ordered)

    @cached_property
    def _model(self) -> Any:
        return build_meta(load_model_config(self.checkpoint.model_folder))

    def merged(self, stored: Stored, room: int | None) -> tuple["WholeTensors", MergeCheck]:
        """The model with merged weights, fp32, and the comparison of its logits; see `check_merged`. Raises `UserError`
        if the model's own weights are gone, `RunFailed` if the logits differ."""
        transposed = transposed_modules(self._model)
        base, adapter = base_source(self.config, self._model), self.checkpoint.source()
        check_base(self.config, self.checkpoint.agreement, str(self.checkpoint.path))
        if self.lora.quantize == "nf4":  # the base that the adapter was trained on
            base = InNf4(base, [target.weight for target in targets_of(facts_of(self._model), self.lora)])
        merged = Merged(base, adapter, self.lora, transposed)
        check = check_merged(self._model.config, base, adapter, merged, self.lora, stored, room)
        return _Whole(merged), check

    def write(
        self, out: Path, run: str | Path, dtype: str | None, *, arguments: str, force: bool
    ) -> tuple[int, torch.dtype]:
        """Write a folder of `peft`, with the tokenizer and its chat template; returns its bytes, and the type of its
        weights. The card loads it by these `arguments` of `from_pretrained`. Raises `UserError`, `RunFailed`."""
        source = self.checkpoint.source()
        kind = export_dtype(dtype, trained=source.dtype(source.ordered[0]))
        card = model_card(
            self.checkpoint, run, arguments=arguments, dtype=str(kind).removeprefix("torch."), adapted=self.parameters,
        )  # fmt: skip
        folder = self.checkpoint.model_folder
        files = {**self.checkpoint.model_files(), CARD: card.encode()}
        files = {name: files[name] for name in files.keys() - OF_MODEL}
        base = self.config.model.name_or_path
        base = base_name(base, is_local=hub_id(folder, base) is None)
        return write_peft(source, out, self.lora, self._model, base=base, dtype=kind, files=files, force=force), kind


def write_peft(
    source: WholeTensors, out: Path, lora: Lora, model: Any, *, base: str, dtype: torch.dtype,
    files: Mapping[str, bytes] | None = None, force: bool = False, into: bool = False,
) -> int:  # fmt: skip
    """Write the adapter `lora` of `model` (on the meta device, without it) as the folder `out` of `peft`, through a
    temporary folder; returns the bytes of its tensors. `base`: the name of the model. `files`: what lies beside it.
    `force` replaces an existing adapter, `into` keeps other files. Raises `RunFailed`, or `UserError` if the folder is
    at fault."""
    there = set(out.iterdir()) if out.is_dir() else set()
    ours = [*(out / name for name in _FILES), *tokenizer_files(out), *copied(out)]
    into = into and out.is_dir()
    is_adapter = out / CONFIG in there and there <= {*ours, *(path.parent for path in ours)}
    if not into and out.exists() and (not out.is_dir() or there) and not (force and is_adapter):
        raise UserError(f"{out} exists and is not empty", fix="name a new folder; --force replaces an adapter")
    targets = targets_of(facts_of(model), lora)
    named = names_in_peft(targets)
    tensors = {named[name]: to_peft(name, cast(name, source.whole(name), dtype)) for name in source.ordered}
    with beside(out) as temporary:
        save_tensors(tensors, temporary / WEIGHTS)
        (temporary / CONFIG).write_bytes(json_text(config_beside(lora, targets, model, base)))
        write(files or {}, temporary)
        if into:
            for path in sorted(temporary.iterdir()):
                os.replace(path, out / path.name)
        else:
            publish(temporary, out)
    return sum(tensor.nbytes for tensor in tensors.values())
