"""A model's config with fewer layers, used to trace, try or prove in place of a deep model."""

import copy
import re
from collections.abc import Iterator
from typing import Any

from fivefold.core.errors import UserError

OVERRIDES = "per_layer_config"  # layer number -> its values in place of the config's
GLOBAL = "allow_global_per_layer_attribute_access"  # such values may be read from the config as well
Holder = tuple[dict[str, Any], str]  # a list is the value of this key in this dict


def fewer_layers(config: Any, least: int = 2) -> Any:
    """A copy of a config with one layer of each kind, and at least `least` layers if it has them.

    Every list with an entry per layer is cut with the layers, at every depth, and every list of layer numbers is
    renumbered. Raises `UserError` if the class does not accept the result.
    """
    values = config.to_dict()
    text, named = text_of(values), config.get_text_config().attribute_map
    count = text.get(named.get("num_hidden_layers", "num_hidden_layers"))
    if not isinstance(count, int):
        return copy.deepcopy(config)
    kept = _kept(text, count, least)
    for holder, key in _per_layer(text, count):
        holder[key] = [holder[key][layer] for layer in kept]
    for holder, key in _numbered(text, count):
        holder[key] = [kept.index(layer) for layer in holder[key] if layer in kept]
    if text.get(OVERRIDES):
        text[OVERRIDES] = {kept.index(int(n)): override for n, override in text[OVERRIDES].items() if int(n) in kept}
    text[named.get("num_hidden_layers", "num_hidden_layers")] = len(kept)
    _keep_experts(text)
    return remade(config, values)


def text_of(values: dict[str, Any]) -> dict[str, Any]:
    """The values of the language model, also in a config with several models."""
    text = values.get("text_config")
    return text if isinstance(text, dict) else values


def remade(config: Any, values: dict[str, Any]) -> Any:
    """A config of the same class from changed values of its `to_dict`. Raises `UserError`."""
    try:
        return type(config)(**{key: value for key, value in values.items() if key != "model_type"})
    except Exception as error:  # the validators of transformers raise several kinds
        raise UserError(f"a {config.model_type} model cannot be cut for a proof: {error}") from error


def layers_kept(config: Any, least: int = 2) -> tuple[list[int], list[str]]:
    """The layers that `fewer_layers` keeps, and the config's settings of every layer, as a text."""
    values = text_of(config.to_dict())
    count = config.get_text_config().num_hidden_layers
    return _kept(values, count, least), _said(values, count)


def _said(text: dict[str, Any], count: int) -> list[str]:
    numbered = [set(holder[key]) for holder, key in _numbered(text, count)]
    overrides = {int(number): override for number, override in (text.get(OVERRIDES) or {}).items()}
    listed = [holder[key] for holder, key in _per_layer(text, count)]
    return [
        repr(([values[layer] for values in listed], [layer in values for values in numbered], overrides.get(layer)))
        for layer in range(count)
    ]


def _kept(text: dict[str, Any], count: int, least: int) -> list[int]:
    """The first layer of each kind, plus the first other layers up to `least` in total."""
    first: dict[str, int] = {}
    for layer, said in enumerate(_said(text, count)):
        first.setdefault(said, layer)
    more = [layer for layer in range(count) if layer not in first.values()]
    return sorted([*first.values(), *more[: max(0, least - len(first))]])


def _lists(values: dict[str, Any]) -> Iterator[Holder]:
    """Every list of a config, at every depth, except rotary factors and token ids."""
    for key, value in values.items():
        if isinstance(value, dict) and not str(key).startswith("rope_"):
            yield from _lists(value)
        elif isinstance(value, list | tuple) and not key.endswith("token_id"):
            yield values, key


def _per_layer(values: dict[str, Any], count: int) -> list[Holder]:
    numbered = _numbered(values, count)
    return [place for place in _lists(values) if len(place[0][place[1]]) == count and place not in numbered]


def _numbered(values: dict[str, Any], count: int) -> list[Holder]:
    """The lists of layer numbers of one kind among `count` layers, such as `mlp_only_layers`."""
    return [
        (holder, key)
        for holder, key in _lists(values)
        if re.search("layers|idx|indices", key)
        and all(type(index) is int and 0 <= index < count for index in holder[key])
        and list(holder[key]) == sorted(set(holder[key]))
    ]


def _keep_experts(text: dict[str, Any]) -> None:
    """Adapt the model-specific keys for layers without experts: the first of the layers that are left."""
    if text.get("first_k_dense_replace"):
        text["first_k_dense_replace"] = 1
    if (text.get("decoder_sparse_step") or 1) > 1:
        text["decoder_sparse_step"] = 2
    if (text.get("moe_layer_start_index") or 0) > 1:
        text["moe_layer_start_index"] = 1
