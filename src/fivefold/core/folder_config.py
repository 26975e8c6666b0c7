"""Read the config.json of someone else's model folder as a bounded JSON object. No torch."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import Any

from fivefold.core import strict_json
from fivefold.core.errors import UserError

LAYERS = ("num_hidden_layers", "n_layer", "num_layers")  # names of the number of layers in a config.json
MOST_LAYERS = 10_000  # building the modules of more takes minutes; the deepest models have a few hundred
MOST_HEAD_DIM = 2**16  # sizes a table of rotary angles; the widest heads have a few hundred
MOST_NUMBER = 2**53
_MORE = "fivefold docs explain/models"
# Keys of heads other than the language model's.
_NO_DROPOUT = ("classifier_", "summary_")
_NOT_BUILT = "layer_?drop|drop_?path"  # the other keys of `noise` are those of dropout and jitter
_THRESHOLDS = [("phimoe", "router_jitter_noise")]  # also selects experts: 0 would change the model


def read_folder_config(path: Path) -> dict[str, Any]:
    """Read config.json from the folder `path`, or the file `path`. Raises `UserError` if it is no model's config."""
    check_not_gguf(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        values = strict_json.read_config(file)
    except FileNotFoundError:
        raise UserError(
            f"{path} holds no config.json",
            fix="name a Hugging Face model folder; of a run, fivefold export writes one",
            more=_MORE,
        ) from None
    except (OSError, ValueError) as error:
        check_not_gguf(file)
        raise UserError(f"{file} cannot be read: {error}", fix="copy it from its origin again", more=_MORE) from None
    if not isinstance(values, dict):
        raise UserError(f"{file} holds no JSON object", fix="copy it from its origin again", more=_MORE)
    check_counts(values, str(file))
    return values


def is_gguf(path: Path) -> bool:
    """True for a llama.cpp file of any name, by its first bytes: `GGUF` and a binary number."""
    head = b""
    if path.is_file():
        with suppress(OSError), path.open("rb") as file:
            head = file.read(8)
    return head.startswith(b"GGUF") and b"\0" in head


def check_not_gguf(path: Path, *, is_alone: bool = False) -> None:
    """Raise `UserError` for a GGUF file, and for a folder that has one but no config.json. `is_alone`: for any folder
    that has one, as it has no other weights."""
    has_others = (path / "config.json").is_file() and not is_alone
    inside = [] if has_others else sorted(file.name for file in path.glob("*.gguf"))
    if inside or path.suffix == ".gguf" or is_gguf(path):
        name = f" ({inside[0]})" if inside else ""
        raise UserError(
            f"{path} holds quantised weights as GGUF{name}, the file of llama.cpp, which is not read here",
            fix="write a Hugging Face folder of it by transformers, once",
            more="fivefold docs start/first_fine_tune",
        )


def check_counts(values: Mapping[str, Any], name: str) -> None:
    """Raise `UserError` for numbers out of any model's range, before anything is built from them."""
    for key, number in _numbers(values):
        if isinstance(number, float):  # transformers writes infinities
            if isnan(number):
                raise UserError(f"{name}: {key} is NaN, which is not a number", more=_MORE)
            continue
        most = MOST_LAYERS if "layer" in key and not key.endswith(("_id", "_idx")) else MOST_NUMBER
        most = MOST_HEAD_DIM if key.endswith("head_dim") else most
        if number > most:
            raise UserError(f"{name}: {key} is {number}, and at most {most} can be built", more=_MORE)
        least = 1 if key in LAYERS else 0 if re.search("(layers?|size|heads?|experts|dim)$", key) else -MOST_NUMBER
        if number < least:
            raise UserError(f"{name}: {key} is {number}, and the least is {least}", more=_MORE)


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number with its key, sections included."""
    open_sections = [values]
    while open_sections:
        for key, value in open_sections.pop().items():
            if isinstance(value, dict):
                open_sections.append(value)
            elif isinstance(value, int | float):
                yield str(key), value


def check_no_code(values: Mapping[str, Any], name: str) -> None:
    """Raise `UserError` for a config.json that asks to run code from its folder."""
    if "auto_map" in values:
        raise UserError(
            f"{name} brings its own model code (auto_map in config.json), and no code from a model folder is executed",
            fix="use a model whose class is part of transformers, or remove auto_map if its model_type is one",
            more=_MORE,
        )


def check_no_noise(values: Mapping[str, Any], name: str) -> None:
    """Raise `UserError` if the config.json of a single model asks in training for layers that are dropped."""
    text = values["text_config"] if isinstance(values.get("text_config"), dict) else values
    has_parts = any(isinstance(value, dict) and "model_type" in value for value in text.values())
    if not has_parts:
        refuse_noise(text, name)


def refuse_noise(values: Mapping[str, Any], name: str) -> None:
    """Raise `UserError` for layers that are dropped as a whole: they differ by layout."""
    keys = {key: value for key, value in noise(values) if re.search(_NOT_BUILT, key)}
    if keys:
        raise UserError(
            f"{name} has {', '.join(f'{key} {value}' for key, value in keys.items())}, which is not built: a layout "
            "would draw other numbers than one process",
            fix=f"set {', '.join(f'model.overrides.{key}: 0' for key in keys)}",
            more="fivefold docs explain/dropout",
        )


def noise(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the config keys, at every depth, that ask for random numbers, with their values."""
    sections = [("", values)]
    while sections:
        inside, section = sections.pop()
        for key, value in section.items():
            if (section.get("model_type"), key) in _THRESHOLDS:
                continue
            if isinstance(value, Mapping):
                sections.append((f"{inside}{key}.", value))
            elif re.search("drop|jitter", str(key)) and not str(key).startswith(_NO_DROPOUT) and _is_positive(value):
                yield f"{inside}{key}", value


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
