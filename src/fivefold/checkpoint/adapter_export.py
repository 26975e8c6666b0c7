"""The adapter of a checkpoint, as a folder of `peft`, or in the weights of the model that it is beside."""

import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fivefold.checkpoint.base import base_source
from fivefold.checkpoint.card import CARD, model_card
from fivefold.checkpoint.load import Checkpoint
from fivefold.checkpoint.model_folder import json_text
from fivefold.config import RunConfig, parse_config
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.files import cannot_write, is_users, of_system
from fivefold.core.lora import Lora
from fivefold.models import hf_internals
from fivefold.models.adapter import InNf4, Merged
from fivefold.models.adapter_facts import Target, targets_of
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.discover import facts_of
from fivefold.models.peft_folder import CONFIG, WEIGHTS, config_of, names_in_peft, target_names, to_peft

_FILES = frozenset({CONFIG, WEIGHTS, CARD})


def of(checkpoint: Checkpoint) -> "CheckpointAdapter | None":
    """None where a checkpoint holds a whole model."""
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
    """Of a checkpoint of a run with an adapter."""

    checkpoint: Checkpoint
    config: RunConfig
    lora: Lora

    @property
    def parameters(self) -> int:
        """Numbers of the adapter."""
        source = self.checkpoint.source()
        return sum(prod(source.shape(name)) for name in source.ordered)

    @cached_property
    def _model(self) -> Any:
        return build_meta(load_model_config(self.checkpoint.model_folder))

    @cached_property
    def _linears(self) -> dict[str, bool]:
        """Of the model, by name: whether the weight is [I, O]."""
        dims = {name: hf_internals.linear_dims(module) for name, module in self._model.named_modules()}
        return {name: each == (1, 0) for name, each in dims.items() if each is not None}

    @cached_property
    def _experts(self) -> dict[str, Any]:
        """The model's modules of experts, by name."""
        return {name: module for name, module in self._model.named_modules() if hf_internals.is_experts(module)}

    @cached_property
    def _targets(self) -> tuple[Target, ...]:
        return targets_of(facts_of(self._model), self.lora)

    def merged(self) -> _Whole:
        """The model with the adapter in its weights, fp32. Raises `UserError` where its own are no longer there."""
        transposed = [name for name, is_transposed in self._linears.items() if is_transposed]
        transposed += [name for name, module in self._experts.items() if module.is_transposed]
        base = base_source(self.config, self._model)
        if self.lora.quantize == "nf4":  # what the adapter was trained beside
            base = InNf4(base, [each.weight for each in self._targets])
        return _Whole(Merged(base, self.checkpoint.source(), self.lora, transposed))

    def write(self, out: Path, run: str | Path, dtype: str | None, *, force: bool) -> tuple[int, torch.dtype]:
        """Write a folder of `peft`; its bytes, and the type of its weights. Raises `UserError`, `RunFailed`."""
        from fivefold.checkpoint.export import cast, export_dtype

        source = self.checkpoint.source()
        kind = export_dtype(dtype, trained=source.dtype(source.ordered[0]))
        there = {each.name for each in out.iterdir()} if out.is_dir() else set()
        if out.exists() and (not out.is_dir() or there) and not (force and CONFIG in there and there <= _FILES):
            raise UserError(f"{out} exists and is not empty", fix="name a new folder; --force replaces an adapter")
        named = names_in_peft(self._targets)
        tensors = {named[name]: to_peft(name, cast(name, source.whole(name), kind)) for name in source.ordered}
        linears = [each.module for each in self._targets if not each.of_experts]
        parameters = [each.weight for each in self._targets if each.of_experts]
        beside = [f"{name}.{leaf}" for name, module in self._experts.items() for leaf, _ in module.named_parameters()]
        about = config_of(
            self.lora, target_names(linears, [*self._linears]), target_names(parameters, beside),
            base=self.config.model.name_or_path, is_transposed=any(self._linears[each] for each in linears),
        )  # fmt: skip
        temporary = out.with_name(f".tmp-{out.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
            (temporary / CONFIG).write_bytes(json_text(about))
            (temporary / CARD).write_text(model_card(self.checkpoint, run, dtype=str(kind).removeprefix("torch.")))
            shutil.rmtree(out, ignore_errors=True)
            os.rename(temporary, out)
        except (OSError, SafetensorError) as error:
            said = of_system(error)
            if said and is_users(said):
                raise cannot_write(out, said, instead="name another folder") from error
            raise RunFailed(f"{out} could not be written: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return sum(each.nbytes for each in tensors.values()), kind
