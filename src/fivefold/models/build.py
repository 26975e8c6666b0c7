"""From a model's name to its class on the meta device: no weights, no replaced modules, no code from a folder."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from fivefold.core.errors import UserError, first_line
from fivefold.core.folder_config import (
    check_counts,
    check_no_code,
    check_not_gguf,
    noise,
    refuse_noise,
)
from fivefold.core.hub import MODEL, is_hub_id, snapshot
from fivefold.core.shapes import no_model, read_model_config, shape_folder
from fivefold.core.text import listed
from fivefold.models import attention as own_attention
from fivefold.models import hf_internals
from fivefold.models.experts import EXPERTS, register_experts
from fivefold.models.forwards import check_documents, has_rope_limits
from fivefold.models.sources import locate, own_heads

ADAPTER = "adapter_config.json"
MOST_PARAMETERS = 10**14
MOST_MODULES = 500_000  # DeepSeek-V3, experts merged, has some 2,500

# Rotary keys of old and new config.json files -> their names in the `rope_parameters` of `transformers`.
_ROPE = {"rope_theta": "rope_theta", "rotary_emb_base": "rope_theta", "partial_rotary_factor": "partial_rotary_factor",
         "rotary_pct": "partial_rotary_factor"}  # fmt: skip
_ROPES = ("rope_scaling", "rope_parameters")
_NOW = {"torch_dtype": "dtype"}
_ALWAYS = {*_NOW, *_NOW.values()}


def load_model_config(
    name_or_path: str | Path, overrides: Mapping[str, Any] | None = None, *, of_text: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """The config of a local Hugging Face folder, a `config.json`, a built-in shape name, or a hub id.

    The result is that of `AutoConfig.from_pretrained`, with `overrides` replacing the keys of the same name; values
    that the class derives follow from them. Rotary settings are replaced in its `rope_parameters`, which holds each of
    them once.
    `of_text`: replacements for the language model alone; a model for images and text keeps its keys in `text_config`.
    Raises `UserError` for a name that cannot be read, an unknown model type or override, and folders that need own
    code.
    """
    values = read_model_config(name_or_path)
    check_no_code(values, str(name_or_path))
    model_type = values.get("model_type", "")
    cls = hf_internals.config_class(model_type) if isinstance(model_type, str) else None
    if cls is None:
        raise UserError(f"{name_or_path}: transformers has no model type {model_type!r}")
    known = hf_internals.config_keys(cls) | set(values) | _ALWAYS
    known |= {*_ROPE, *_ROPES} if "rope_parameters" in known else set()
    if of_text:
        overrides = _merged({"text_config": of_text} if "text_config" in known else of_text, overrides or {})
    check_counts(overrides or {}, "model.overrides")
    _check_keys(overrides or {}, known)
    try:
        config = _with_overrides(values, overrides or {})
    except UserError:
        raise
    except Exception as error:  # the validators of transformers raise several kinds
        raise UserError(f"{name_or_path}: the model's config is not valid: {error}") from error
    if not isinstance(config.dtype, torch.dtype | None):
        raise UserError(f"{name_or_path}: the model's config is not valid: dtype is {config.dtype!r}")
    config.name_or_path = str(name_or_path)
    return config


def build_meta(
    hf_config: PreTrainedConfig,
    *,
    attention: str = own_attention.NAME,
    model_class: type[PreTrainedModel] | None = None,
    weights: Path | None = None,
) -> PreTrainedModel:
    """The causal language model of `hf_config` on the meta device, in fp32, with our attention selected.

    `model.config.dtype` stays that of `hf_config`, the type of the original weights: an export goes back to it.
    `model_class`: the class, if not the one that `transformers` knows for the config. `weights`: their source folder.
    Tied weights are tied, except those that differ there, which `transformers` leaves apart; buffers are on meta too
    (`fivefold.models.recipe.buffer_values` computes their values).
    Raises `UserError` if the config has no causal language model, or asks for random numbers other than dropout.
    """
    own_attention.register()
    register_experts()
    try:
        with _bounded():
            model = hf_internals.causal_lm_on_meta(hf_config, attention, model_class)
    except UserError:
        raise
    except Exception as error:  # the model's own constructor raises several kinds
        raise _cannot_build(hf_config, error) from error
    _check_sizes(model)
    model.config.dtype = _dtype(hf_config, model, weights)
    hf_internals.select_experts(model, EXPERTS)
    _refuse_noise(model)
    if weights and own_heads(weights, model):
        apart = build_meta(hf_internals.untied_config(hf_config), attention=attention, model_class=model_class)
        apart.config.dtype = model.config.dtype
        return apart
    return model


def _dtype(hf_config: PreTrainedConfig, model: PreTrainedModel, weights: Path | None) -> torch.dtype | None:
    """The type of the original weights, as `from_pretrained(dtype="auto")` finds it: in the config of the class, which
    may be the text part of `hf_config`; else in the files of `weights`. None if nothing says it."""
    own = hf_config if isinstance(model.config, type(hf_config)) else hf_config.get_text_config()
    stated: torch.dtype | None = own.dtype
    if stated is not None or weights is None:
        return stated
    with suppress(Exception):  # the reader of damaged files reports them
        return hf_internals.dtype_of_file(min(locate(weights).values()))
    return None


def meta_of_folder(folder: Path) -> PreTrainedModel:
    """The model of a local folder with weights, on the meta device. Raises `UserError`, as `build_meta` does."""
    return build_meta(load_model_config(folder), weights=folder)


def _cannot_build(hf_config: PreTrainedConfig, error: Exception) -> UserError:
    kind = hf_internals.causal_class_name(hf_config) or hf_config.model_type
    if isinstance(error, ValueError) and "Unrecognized configuration class" in str(error):
        return UserError(f"no causal language model for model type {kind!r}: {first_line(error)}")
    return UserError(
        f"no {kind} can be built from its config: {type(error).__name__}: {first_line(error)}",
        fix="look at the sizes in its config.json, and at model.overrides",
    )


def _check_sizes(model: PreTrainedModel) -> None:
    """Raise `UserError` for a model with an empty parameter, or with more parameters than any machine holds."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    empty = next((name for name, size in sizes.items() if size == 0), None)
    if empty or not sizes or sum(sizes.values()) > MOST_PARAMETERS:
        what = f"{empty} is empty" if empty else f"it has {sum(sizes.values()):,} parameters"
        raise UserError(
            f"no {type(model).__name__} can be built from its config: {what}",
            fix="look at the sizes in its config.json, and at model.overrides",
        )


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise `UserError` beyond `MOST_MODULES` modules: a config of a few bytes can ask for 10^7."""
    made = count(1)

    def check(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if next(made) > MOST_MODULES:
            raise UserError(
                f"the config asks for more than {MOST_MODULES} modules", fix="look at the numbers in its config.json"
            )

    handle = register_module_module_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()


def use_our_attention(model: PreTrainedModel) -> None:
    """Select our attention in a model that was built elsewhere. Raises `UserError` for random numbers but dropout.

    If rotary frequencies depend on lengths, the model refuses packed documents that would change each other.
    """
    own_attention.register()
    register_experts()
    _refuse_noise(model)
    hf_internals.base_first(model)
    hf_internals.select_attention(model, own_attention.NAME)
    hf_internals.select_experts(model, EXPERTS)
    if has_rope_limits(model.config):
        model.base_model.register_forward_pre_hook(check_documents, with_kwargs=True)


def _refuse_noise(model: PreTrainedModel) -> None:
    refuse_noise(model.config.get_text_config().to_dict(), type(model).__name__)


def without_dropout(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """`hf_config` itself with dropout and jitter set to 0, for a model that is not trained."""
    text = hf_config.get_text_config()
    for key, value in noise(text.to_dict()):
        *above, last = key.split(".")
        inside: Any = text
        for name in above:
            inside = inside[name] if isinstance(inside, dict) else getattr(inside, name)
        if isinstance(inside, dict):
            inside[last] = type(value)(0)
        else:
            setattr(inside, last, type(value)(0))  # configs check the types of fields
    return hf_config


def config_values(config: PreTrainedConfig | GenerationConfig) -> dict[str, Any]:
    """The keys of a config that a model depends on, as plain data."""
    values = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in ("transformers_version", "_name_or_path")}


def weights_folder(
    name_or_path: str | Path, *, reads_adapter: bool = False, files: Sequence[str] = ("*.safetensors", "*.json")
) -> Path:
    """The local folder of a model's weights: itself, or the `files` of a hub id (safetensors and JSON only).

    `reads_adapter`: the caller reads an adapter stored next to the weights, which `transformers` treats as part of the
    model. Raises `UserError` for such an adapter otherwise, and for a name that is no folder of weights.
    """
    folder = _weights_folder(name_or_path, files)
    if not reads_adapter and (folder / ADAPTER).is_file() and (folder / "config.json").is_file():
        raise UserError(
            f"{folder} holds an adapter ({ADAPTER}) beside the model's weights: transformers (with peft) loads both",
            fix="merge it (PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(...)); or move its files "
            "to a folder of their own, which adapter.path may name",
            more="fivefold docs howto/adapters",
        )
    return folder


def _weights_folder(name_or_path: str | Path, files: Sequence[str]) -> Path:
    path = Path(name_or_path)
    check_not_gguf(path)
    if path.is_dir():
        return path
    if path.exists() or shape_folder(str(name_or_path)):
        raise UserError(
            f"{name_or_path} is a shape without weights", fix="set model.init: random, or name a folder or a hub id"
        )
    if not is_hub_id(str(name_or_path)):
        raise no_model(str(name_or_path))
    return snapshot(str(name_or_path), files, key=MODEL)


def _check_keys(overrides: Mapping[str, Any], known: set[str]) -> None:
    for key in overrides:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            raise UserError(
                f"model.overrides.{key} is not a key of this model's config",
                fix=f"did you mean model.overrides.{close[0]}?" if close else None,
            )


def _with_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> PreTrainedConfig:
    config = hf_internals.config_of_values(values)
    if overrides:
        config = hf_internals.config_of_values(_replaced(values, config, overrides))
        _check_taken(config, overrides)
    return config


def _replaced(values: Mapping[str, Any], config: PreTrainedConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json, or of a section of it, with overrides applied."""
    names = {**config.attribute_map, **_NOW}
    own = {names.get(key, key): value for key, value in overrides.items() if key not in (*_ROPE, *_ROPES)}
    kept = {key: value for key, value in values.items() if names.get(key, key) not in own or key in own}
    layers = getattr(config, "num_hidden_layers", None)
    for key in [key for key, value in kept.items() if "layer" in key and isinstance(value, list)]:
        if key not in own and "num_hidden_layers" in own and len(kept[key]) == layers:  # one entry a layer
            kept[key] = kept[key][: own["num_hidden_layers"]]
            if len(kept[key]) < own["num_hidden_layers"]:
                kept.pop(key)  # the class derives it
    for key, value in own.items():
        section = getattr(config, key, None)
        if isinstance(section, PreTrainedConfig) and isinstance(value, Mapping):
            kept[key] = _replaced(kept.get(key) or {}, section, value)
        else:
            kept |= _merged(kept, {key: value})
    rope = _rope_asked(overrides)
    if rope:
        kept = {key: value for key, value in kept.items() if key not in (*_ROPES, "rope_theta")}
        kept |= {key: overrides[key] for key in _ROPE if key in overrides and key in vars(config)}
        kept["rope_parameters"] = _rope_replaced(config, rope)
    return kept


def _merged(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `others` replacing them, at every depth."""
    merged = dict(values)
    for key, value in others.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _rope_replaced(config: PreTrainedConfig, asked: Mapping[str, Any]) -> dict[str, Any]:
    old = config.rope_parameters or {}
    by_type = [key for key, value in old.items() if isinstance(value, Mapping)]
    types = by_type or config.nested_rope_parameter_keys(asked)
    unknown = set(asked) - set(types) if types else {key for key in asked if isinstance(asked[key], Mapping)}
    if unknown:
        has = f"by layer type: {listed(types, 4)}" if types else "for all layers alike"
        raise UserError(
            f"model.overrides sets {listed(sorted(unknown), 4)} of rotary positions, which this model has {has}",
            fix=f"set model.overrides.rope_parameters.{types[0]}.rope_theta, and the like" if types else None,
        )
    if not types:
        return _one_rope(old, asked)
    return {**(old if by_type else {}), **{key: _one_rope(old.get(key) or {}, asked[key]) for key in asked}}


def _rope_asked(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings in overrides, under their names in `rope_parameters`; a null is plain rotation."""
    asked: dict[str, Any] = {}
    for key in _ROPES:
        if key in overrides:
            asked |= {"rope_type": "default"} if overrides[key] is None else overrides[key]
    asked |= {_ROPE[key]: value for key, value in overrides.items() if key in _ROPE}
    return {"rope_type" if key == "type" else key: value for key, value in asked.items()}


def _one_rope(old: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings with overrides applied; another rope type keeps only the settings that all types share."""
    kept = {key: value for key, value in old.items() if key != "type"}
    if asked.get("rope_type", kept.get("rope_type")) != kept.get("rope_type"):
        kept = {key: value for key, value in kept.items() if key in _ROPE.values()}
    return {**kept, **asked}


def _check_taken(config: Any, overrides: Mapping[str, Any], inside: str = "") -> None:
    """Raise `UserError` for an override that the config class dropped or changed: another model would be trained."""
    asked = dict(overrides)
    if isinstance(config, PreTrainedConfig) and (rope := _rope_asked(overrides)):
        asked = {key: value for key, value in overrides.items() if key not in (*_ROPE, *_ROPES)}
        asked["rope_parameters"] = rope
    for key, value in asked.items():
        taken = config.get(key) if isinstance(config, Mapping) else getattr(config, _NOW.get(key, key), None)
        if isinstance(value, Mapping) and isinstance(taken, Mapping | PreTrainedConfig):
            _check_taken(taken, value, f"{inside}{key}.")
        elif taken != value and str(taken) != f"torch.{value}":
            raise UserError(
                f"model.overrides.{inside}{key}: {value!r} has no effect on the model's config (it is {taken!r})"
            )
