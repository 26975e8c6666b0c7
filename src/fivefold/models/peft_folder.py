"""An adapter as the `peft` package writes and reads it: `adapter_config.json` and `adapter_model.safetensors`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fivefold.core import safetensors_header, strict_json
from fivefold.core.errors import UserError
from fivefold.core.lora import Lora
from fivefold.core.text import listed
from fivefold.models.adapter_facts import Target
from fivefold.models.random_stream import Region
from fivefold.models.sources import TensorSource

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Keys of the config whose other values mean something that is not built.
_PLAIN: dict[str, Any] = {
    "use_dora": (False, None), "bias": ("none",), "modules_to_save": (None, []), "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None), "trainable_token_indices": (None,), "layer_replication": (None,),
    "alora_invocation_tokens": (None,), "use_qalora": (False, None), "arrow_config": (None,), "kasa_config": (None,),
    "use_bdlora": (False, None), "lora_bias": (False, None), "target_parameters": (None, []),
}  # fmt: skip
# Ways to begin that leave the model's own weights as they are; `peft` changes them, whenever it loads, with all others
# (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA).
_BESIDE_THE_MODEL = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def in_peft(name: str) -> str:
    """What `peft` calls a parameter of an adapter in its file."""
    return _PREFIX + name


def config_of(lora: Lora, targets: Sequence[str], *, base: str, is_transposed: bool) -> dict[str, Any]:
    """The config of an adapter of the linears `targets` of the model `base`. `is_transposed`: weights are [I, O]."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank,
        "lora_alpha": lora.alpha, "lora_dropout": 0.0, "bias": "none", "use_rslora": lora.rslora, "use_dora": False,
        "fan_in_fan_out": is_transposed, "inference_mode": True, "init_lora_weights": True,
        "target_modules": sorted(targets),
    }  # fmt: skip


def target_names(targets: Sequence[str], linears: Sequence[str]) -> list[str]:
    """`targets` by the last parts of their names, where no other of the model's `linears` has one of them."""
    leaves = {each.rpartition(".")[2] for each in targets}
    others = {each.rpartition(".")[2] for each in set(linears) - set(targets)}
    return sorted(leaves if not leaves & others else targets)


class PeftFolder(TensorSource):
    """The matrices of an adapter, by their names in the model."""

    def __init__(self, path: str | Path, lora: Lora, targets: Sequence[Target]) -> None:
        """Raises `UserError` for a folder that holds no adapter, or another one than `lora` beside `targets`."""
        self._file, config = Path(path) / WEIGHTS, _read_config(Path(path))
        _check_config(path, config, lora)
        try:
            with self._file.open("rb") as file:
                found = safetensors_header.read(file)
        except (ValueError, OSError) as error:
            raise UserError(f"{self._file} cannot be read: {error}", fix="name the folder of a PEFT adapter") from error
        self.shapes = {name.removeprefix(_PREFIX): tuple(entry.shape) for name, entry in found.items()}
        wanted = {
            name: shape
            for each in targets
            for name, shape in zip(each.weights, ((lora.rank, each.inputs), (each.outputs, lora.rank)), strict=True)
        }
        for what, names in (("lacks", wanted.keys() - self.shapes.keys()), ("has", self.shapes.keys() - wanted.keys())):
            if names:
                raise UserError(
                    f"{path} {what} {listed(sorted(names), 3)}",
                    fix="set adapter.targets to the linears that it is beside",
                )
        if wrong := [name for name, shape in wanted.items() if self.shapes[name] != shape]:
            raise UserError(f"{path}: {wrong[0]} is {self.shapes[wrong[0]]}, and here {wanted[wrong[0]]}")

    def read(self, name: str, region: Region) -> Tensor:
        """See `TensorSource`."""
        try:
            with safe_open(self._file, framework="pt", device="cpu") as file:
                return torch.as_tensor(file.get_slice(in_peft(name))[tuple(region)])
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self._file} cannot be read: {error}", fix="download the file again") from error


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return dict(strict_json.read(folder / CONFIG))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{folder} holds no adapter: {error}", fix=f"name a folder with {CONFIG} and {WEIGHTS}"
        ) from error


def _check_config(path: str | Path, config: dict[str, Any], lora: Lora) -> None:
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path} is an adapter of type {config.get('peft_type')}, and lora is built")
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            raise UserError(
                f"{path}: {key} is {config[key]!r}, which is not built",
                fix="start from a plain LoRA adapter, or from a model with this one in its weights (merge_and_unload)",
                more="docs/adapters.md",
            )
    if (begun := config.get("init_lora_weights")) not in _BESIDE_THE_MODEL:
        raise UserError(
            f"{path}: init_lora_weights is {begun!r}, so it belongs beside weights that peft changes as it loads them",
            fix="let peft write it as plain LoRA: save_pretrained(..., path_initial_model_for_weight_conversion=...)",
            more="docs/adapters.md",
        )
    found = config.get("r"), config.get("lora_alpha"), bool(config.get("use_rslora", False))
    if found != (lora.rank, lora.alpha, lora.rslora):
        rank, alpha, rslora = found
        raise UserError(
            f"{path} has rank {rank}, alpha {alpha}{', rslora' if rslora else ''}, and adapter of the run another",
            fix=f"set adapter.rank: {rank}, adapter.alpha: {alpha}, adapter.rslora: {str(rslora).lower()}",
        )
