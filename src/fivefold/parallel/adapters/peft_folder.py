"""An adapter as the `peft` package writes and reads it: `adapter_config.json` and `adapter_model.safetensors`.

For E experts `peft` stores two matrices: A [E r, I], expert after expert, and B [O, r E], whose columns are sorted by r
first, then by expert. Here they are A [E, r, I] and B [E, O, r].
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fivefold.core import strict_json
from fivefold.core.errors import UserError
from fivefold.core.hub import looks_like_id
from fivefold.core.text import listed
from fivefold.models.build import ADAPTER
from fivefold.models.facts import ModelFacts
from fivefold.models.random_stream import Region
from fivefold.models.sources import TensorSource, check_numbers, folder_digests, header
from fivefold.parallel.adapters.facts import A, B, Target, targets_of
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.adapters.sources import Layered, experts, linears

PEFT_CONFIG, WEIGHTS = ADAPTER, "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Config keys -> the supported values; others ask for features that are not built.
_PLAIN: dict[str, Any] = {
    "use_dora": (False, None), "bias": ("none",), "modules_to_save": (None, []), "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None), "trainable_token_indices": (None,), "layer_replication": (None,),
    "alora_invocation_tokens": (None,), "use_qalora": (False, None), "arrow_config": (None,), "kasa_config": (None,),
    "use_bdlora": (False, None), "lora_bias": (False, None),
}  # fmt: skip
# Initialisations that leave the model's own weights unchanged. With all others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA)
# `peft` changes them at each load.
_BESIDE_THE_MODEL = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def names_in_peft(targets: Sequence[Target]) -> dict[str, str]:
    """Matrix of an adapter -> its name in the file of `peft`. For experts `peft` wraps a module once per parameter, the
    last one outermost: `experts.base_layer.lora_A` next to `gate_up_proj`, `experts.lora_A` next to `down_proj`."""
    left, found = Counter(target.module for target in targets), dict[str, str]()
    for target in targets:
        left[target.module] -= 1
        module = _PREFIX + target.module + ".base_layer" * left[target.module]
        found |= {name: f"{module}.{leaf}.weight" for name, leaf in zip(target.weights, (A, B), strict=True)}
    return found


def to_peft(name: str, values: Tensor) -> Tensor:
    """A matrix of an adapter in the layout of the file."""
    if values.ndim == 2:
        return values
    return values.flatten(0, 1) if f".{A}." in name else values.permute(1, 2, 0).flatten(1).contiguous()


def config_of(
    lora: Lora, targets: Sequence[str], parameters: Sequence[str], *, base: str, is_transposed: bool
) -> dict[str, Any]:
    """The config of an adapter in `peft`. `parameters`: of experts. `is_transposed`: weights of linears are [I, O]."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank,
        "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "bias": "none", "use_rslora": lora.rslora,
        "use_dora": False, "fan_in_fan_out": is_transposed, "inference_mode": True, "init_lora_weights": True,
        "target_modules": sorted(targets), **({"target_parameters": sorted(parameters)} if parameters else {}),
    }  # fmt: skip


def base_name(name: str, *, is_local: bool) -> str:
    """The name of a base model in an adapter's config. `is_local`: it is a folder; a relative one that looks like an id
    of the hub would be fetched from there wherever that folder is not."""
    return f"./{name}" if is_local and looks_like_id(name) else name


def config_beside(lora: Lora, targets: Sequence[Target], model: Any, base: str) -> dict[str, Any]:
    """The config of an adapter of `targets` in `model`, which is without it."""
    transposed = linears(model)
    own = [target.module for target in targets if not target.of_experts]
    parameters = [target.weight for target in targets if target.of_experts]
    there = [f"{name}.{leaf}" for name, module in experts(model).items() for leaf, _ in module.named_parameters()]
    return config_of(
        lora, target_names(own, [*transposed]), target_names(parameters, there), base=base,
        is_transposed=any(transposed[name] for name in own),
    )  # fmt: skip


def target_names(targets: Sequence[str], there: Sequence[str]) -> list[str]:
    """`targets` by the last parts of their names, unless another module `there` in the model shares one of them."""
    leaves = {weight.rpartition(".")[2] for weight in targets}
    others = {weight.rpartition(".")[2] for weight in set(there) - set(targets)}
    return sorted(leaves if not leaves & others else targets)


def lora_of(path: str | Path) -> Lora:
    """The settings of the adapter in a folder. Raises `UserError` for a folder without an adapter."""
    config = _read_config(Path(path))
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        raise UserError(
            f"{path}: target_modules is {targets!r}, which names no list of linears",
            fix="pass adapter=ff.Lora(rank=..., alpha=..., targets=[...]), and load the adapter's values by source=",
        )
    lora = Lora(
        config.get("r", 8), config.get("lora_alpha", 8), tuple(targets), bool(config.get("use_rslora", False)),
        target_parameters=tuple(config.get("target_parameters") or ()), dropout=config.get("lora_dropout") or 0.0,
    )  # fmt: skip
    _check_config(path, config, lora)
    return lora


def with_peft_folder(folder: str | Path, lora: Lora, facts: ModelFacts, base: TensorSource) -> TensorSource:
    """The weights of a model and the adapter in a folder beside them. Raises `UserError`."""
    return Layered(PeftFolder(folder, lora, targets_of(facts, lora)), base)


def adapter_digests(path: str | Path) -> dict[str, Any]:
    """The config of the adapter in a folder, and digests of its tensors. Raises `UserError`."""
    folder = Path(path)
    is_whole = (folder / WEIGHTS).is_file()  # otherwise its reader says so, after what its config says
    return {PEFT_CONFIG: _read_config(folder), **({"weights": folder_digests(folder, WEIGHTS)} if is_whole else {})}


class PeftFolder(TensorSource):
    def __init__(self, path: str | Path, lora: Lora, targets: Sequence[Target]) -> None:
        """Raises `UserError` for a folder without an adapter, or with another one than `lora` on `targets`."""
        self._file, config = Path(path) / WEIGHTS, _read_config(Path(path))
        _check_config(path, config, lora)
        found = header(self._file)
        self.shapes = {name: shape for target in targets for name, shape in target.shapes(lora.rank).items()}
        self._named = names_in_peft(targets)
        empty = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        wanted = {self._named[name]: tuple(to_peft(name, tensor).shape) for name, tensor in empty.items()}
        for what, names in (("lacks", wanted.keys() - found.keys()), ("has", found.keys() - wanted.keys())):
            if names:
                raise UserError(
                    f"{path} {what} {listed(sorted(key.removeprefix(_PREFIX) for key in names), 3)}",
                    fix="set adapter.targets to the linears that it is beside, and adapter.target_parameters to those "
                    "of experts",
                )
        if wrong := [name for name, shape in wanted.items() if tuple(found[name].shape) != shape]:
            raise UserError(f"{path}: {wrong[0]} is {tuple(found[wrong[0]].shape)}, and here {wanted[wrong[0]]}")
        if kept := [name for name in wanted if not found[name].dtype.startswith(("F", "BF"))]:
            raise UserError(
                f"{path}: {kept[0]} holds {found[kept[0]].dtype}, and an adapter is of floating-point numbers",
                fix="let peft write it again, without quantising it",
            )

    def read(self, name: str, region: Region) -> Tensor:
        try:
            with safe_open(self._file, framework="pt", device="cpu") as file:
                values = _from_peft(name, file.get_slice(self._named[name]), self.shapes[name], region)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self._file} cannot be read: {error}", fix="download the file again") from error
        return check_numbers(values, self._named[name], self._file)


def _from_peft(name: str, file: Any, shape: tuple[int, ...], region: Region) -> Tensor:
    """Read a region of a matrix in the layout of `to_peft`."""
    if len(shape) == 2:
        return torch.as_tensor(file[tuple(region)])
    experts, *of_matrix = region
    if f".{A}." in name:
        rows, (first, last, _) = shape[1], experts.indices(shape[0])
        values = torch.as_tensor(file[first * rows : last * rows, of_matrix[1]])
        return values.view(last - first, rows, -1)[:, of_matrix[0]]
    values = torch.as_tensor(file[of_matrix[0], :]).view(-1, shape[2], shape[0])
    return values[:, of_matrix[1], experts].permute(2, 0, 1)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return dict(strict_json.read(folder / PEFT_CONFIG))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{folder} holds no adapter: {error}", fix=f"name a folder with {PEFT_CONFIG} and {WEIGHTS}"
        ) from error


def _check_config(path: str | Path, config: dict[str, Any], lora: Lora) -> None:
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path} is an adapter of type {config.get('peft_type')}, and lora is built")
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            raise UserError(
                f"{path}: {key} is {config[key]!r}, which is not built",
                fix="start from a plain LoRA adapter, or from a model with this one in its weights (merge_and_unload)",
                more="fivefold docs howto/adapters",
            )
    if (begun := config.get("init_lora_weights")) not in _BESIDE_THE_MODEL:
        raise UserError(
            f"{path}: init_lora_weights is {begun!r}, so it belongs beside weights that peft changes as it loads them",
            fix="let peft write it as plain LoRA: save_pretrained(..., path_initial_model_for_weight_conversion=...)",
            more="fivefold docs howto/adapters",
        )
    found = config.get("r"), config.get("lora_alpha"), bool(config.get("use_rslora", False))
    if found != (lora.rank, lora.alpha, lora.rslora):
        rank, alpha, rslora = found
        raise UserError(
            f"{path} has rank {rank}, alpha {alpha}{', rslora' if rslora else ''}, and adapter of the run another",
            fix=f"set adapter.rank: {rank}, adapter.alpha: {alpha}, adapter.rslora: {str(rslora).lower()}",
        )
