"""From a model's name to its class on the meta device: no weights, no module replaced, no code from a folder run."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel

from fivefold.core.errors import UserError, first_line
from fivefold.core.folder_config import check_counts, read_folder_config
from fivefold.core.hub import MODEL, config_file, is_hub_id, snapshot
from fivefold.core.shapes import no_model, shape_folder
from fivefold.models import attention as own_attention
from fivefold.models import experts as own_experts
from fivefold.models import hf_internals
from fivefold.models.forwards import check_documents, has_rope_limits

MOST_PARAMETERS = 10**14
MOST_MODULES = 500_000  # DeepSeek-V3, experts merged, has some 2,500

# Keys of older config.json files, which `transformers` folds into `rope_parameters`.
_OLD_ROPE = ("rope_theta", "rope_scaling")
# Keys of other heads than that of a language model.
_NO_DROPOUT = ("classifier_", "summary_")
_ALWAYS = {"dtype", "torch_dtype", *_OLD_ROPE}


def load_model_config(
    name_or_path: str | Path, overrides: Mapping[str, Any] | None = None, *, of_text: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """The config of a local Hugging Face folder, a `config.json`, a built-in shape name, or a hub id.

    `overrides` replace keys of that `config.json`; values that it leaves to the class are derived afterwards.
    `of_text`: what they replace of the language model, whose keys a model for images and text keeps in `text_config`.
    Raises `UserError` for a name that cannot be read, an unknown model type or override, and for folders that want
    their own code run.
    """
    values = _read(name_or_path)
    if "auto_map" in values:
        raise UserError(
            f"{name_or_path} brings its own model code (auto_map in config.json), and no code from a model folder is "
            "executed",
            fix="use a model whose class is part of transformers, or remove auto_map if its model_type is one",
        )
    model_type = values.get("model_type", "")
    cls = hf_internals.config_class(model_type) if isinstance(model_type, str) else None
    if cls is None:
        raise UserError(f"{name_or_path}: transformers has no model type {model_type!r}")
    known = hf_internals.config_keys(cls) | set(values) | _ALWAYS
    if of_text:
        overrides = _merge({"text_config": of_text} if "text_config" in known else of_text, overrides or {})
    check_counts(overrides or {}, "model.overrides")
    _check_keys(overrides or {}, known)
    try:
        config = hf_internals.make_config(model_type, _merge(values, overrides or {}))
    except Exception as error:  # the validators of transformers raise several kinds
        raise UserError(f"{name_or_path}: the model's config is not valid: {error}") from error
    _check_taken(config, overrides or {})
    return config


def build_meta(
    hf_config: PreTrainedConfig,
    *,
    attention: str = own_attention.NAME,
    model_class: type[PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """The causal language model of `hf_config` on the meta device, in fp32, with our attention selected.

    `model.config.dtype` stays that of `hf_config`, the type of the weights that came in: an export goes back to it.
    `model_class`: where it is not the one that `transformers` knows for the config.
    Tied weights are tied; buffers are on meta too (`fivefold.models.recipe.buffer_values` knows their values).
    Raises `UserError` if the config has no causal language model, or asks for attention dropout.
    """
    own_attention.register()
    own_experts.register()
    try:
        with _bounded():
            model = hf_internals.causal_lm_on_meta(hf_config, attention, model_class)
    except UserError:
        raise
    except Exception as error:  # the model's own constructor raises several kinds
        raise _cannot_build(hf_config, attention, error) from error
    _check_sizes(model)
    model.config.use_cache = False
    model.config.dtype = hf_config.dtype
    hf_internals.select_experts(model, own_experts.NAME)
    _refuse_dropout(model)
    return model


def _cannot_build(hf_config: PreTrainedConfig, attention: str, error: Exception) -> UserError:
    kind = hf_internals.causal_class_name(hf_config) or hf_config.model_type
    if isinstance(error, KeyError) and error.args == (attention,):
        return UserError(
            f"{kind} attends by code of its own, not by the attention functions of transformers",
            fix="use a model that calls the attention functions of transformers",
        )
    if isinstance(error, ValueError) and "Unrecognized configuration class" in str(error):
        return UserError(f"no causal language model for model type {kind!r}: {first_line(error)}")
    return UserError(
        f"no {kind} can be built from its config: {type(error).__name__}: {first_line(error)}",
        fix="look at the sizes in its config.json, and at model.overrides",
    )


def _check_sizes(model: PreTrainedModel) -> None:
    """Raise `UserError` for a model with an empty parameter, or with more than any machine holds."""
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
    """Raises `UserError` where more than `MOST_MODULES` modules are made: a config of a few bytes can ask for 10^7."""
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
    """Select our attention in a model that was built elsewhere. Raises `UserError` if it asks for attention dropout.

    Where rotary frequencies depend on lengths, the model refuses packed documents that would change each other.
    """
    own_attention.register()
    own_experts.register()
    _refuse_dropout(model)
    hf_internals.base_first(model)
    hf_internals.select_attention(model, own_attention.NAME)
    hf_internals.select_experts(model, own_experts.NAME)
    if has_rope_limits(model.config):
        model.base_model.register_forward_pre_hook(check_documents, with_kwargs=True)


def _refuse_dropout(model: PreTrainedModel) -> None:
    """Raise `UserError` for dropout and jitter: every rank draws its own numbers, so results would differ by layout."""
    keys = dict(_noise(model.config.get_text_config().to_dict()))
    if keys or any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules()):
        found = ", ".join(f"{key} {value}" for key, value in keys.items())
        raise UserError(
            f"dropout is not supported: {type(model).__name__} has {found or 'a module that drops'}",
            fix=f"set {', '.join(f'model.overrides.{key}: 0' for key in keys)}" if keys else None,
        )


def without_dropout(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """`hf_config` itself, its dropout and jitter set to 0: of a model that is not trained, which draws none."""
    text = hf_config.get_text_config()
    for key, value in _noise(text.to_dict()):
        *above, last = key.split(".")
        inside: Any = text
        for name in above:
            inside = inside[name] if isinstance(inside, dict) else getattr(inside, name)
        if isinstance(inside, dict):
            inside[last] = type(value)(0)
        else:
            setattr(inside, last, type(value)(0))  # configs hold fields to their types
    return hf_config


def _noise(values: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a config, at every depth, that ask for random numbers, and what they ask for."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _noise(value, f"{inside}{key}.")
        elif re.search("drop|jitter", str(key)) and not str(key).startswith(_NO_DROPOUT) and _is_positive(value):
            yield f"{inside}{key}", value


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def weights_folder(name_or_path: str | Path) -> Path:
    """The local folder of a model's weights: itself, or the files of a hub id, safetensors and JSON only."""
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.exists() or shape_folder(str(name_or_path)):
        raise UserError(
            f"{name_or_path} is a shape without weights", fix="set model.init: random, or name a folder or a hub id"
        )
    _check_hub_id(str(name_or_path))
    return snapshot(str(name_or_path), ["*.safetensors", "*.json"], key=MODEL)


def _read(name_or_path: str | Path) -> dict[str, Any]:
    source = shape_folder(str(name_or_path)) or name_or_path
    path = Path(source)
    if path.exists():
        read_folder_config(path)
    else:
        _check_hub_id(str(name_or_path))
        source = config_file(str(name_or_path))
    try:
        values = hf_internals.read_config_dict(source)
        check_counts(values, str(name_or_path))
        return values
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"the config.json of model {str(name_or_path)!r} cannot be read: {first_line(error)}"
        ) from error


def _check_hub_id(name: str) -> None:
    if not is_hub_id(name):
        raise no_model(name)


def _check_keys(overrides: Mapping[str, Any], known: set[str]) -> None:
    for key in overrides:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            raise UserError(
                f"model.overrides.{key} is not a key of this model's config",
                fix=f"did you mean model.overrides.{close[0]}?" if close else None,
            )


def _merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = _one_rope(values)
    for key, value in _one_rope(overrides).items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    types, count = merged.get("layer_types"), overrides.get("num_hidden_layers")
    if count is not None and types and "layer_types" not in overrides:
        merged["layer_types"] = types[:count] if count <= len(types) else None
    return merged


def _one_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of older files as the `rope_parameters` of newer ones."""
    if not any(values.get(key) is not None for key in _OLD_ROPE):
        return dict(values)
    rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    if values.get("rope_theta") is not None:
        rope["rope_theta"] = values["rope_theta"]
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    return {key: value for key, value in values.items() if key not in _OLD_ROPE} | {"rope_parameters": rope}


def _check_taken(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> None:
    """An override that the config class dropped or changed would train another model than the one asked for."""
    for key, value in overrides.items():
        if key in _ALWAYS or isinstance(value, dict):
            continue
        taken = getattr(config, key, None)
        if taken != value:
            raise UserError(f"model.overrides.{key}: {value!r} has no effect on {config.model_type} (it is {taken!r})")
