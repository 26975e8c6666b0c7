"""The model of a proof: the one asked about, or a cut version if it is too large, in a Hugging Face folder.

A cut model keeps the class, every kind of layer, the numbers of heads and every switch of the config. Its weights are
random and nonzero, also the biases; norm weights are around one.
"""

import copy
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.units import GIB
from fivefold.models import hf_internals
from fivefold.models.build import build_meta, load_model_config, weights_folder
from fivefold.models.experts import router_buffers
from fivefold.models.fewer_layers import GLOBAL, OVERRIDES, fewer_layers, remade, text_of

BYTES_PER_PARAMETER = 325  # of a proof: three reference runs with their tensors, and a run of the layout
HEAD_DIM, VOCABULARY, WINDOW = 8, 101, 11  # of a thin model
WIDE = (
    "intermediate_size", "n_inner", "shared_intermediate_size", "dense_intermediate_size", "intermediate_size_mlp",
)  # fmt: skip
EXPERTS = 12  # at least, if the model has them: two-digit numbers reveal experts sorted as text, 10 before 2


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face folder with the model of a proof. `cuts`: what it lacks of the model asked about, for people."""

    folder: Path
    name: str
    vocabulary: int
    cuts: tuple[str, ...]


def make_folder(
    config: RunConfig,
    folder: Path,
    *,
    thin: bool,
    memory: int,
    vocabulary: int,
    seed: int,
    layers: int = 2,
    block: int = 1,
) -> ModelFolder:
    """Make the model to prove, with a layer of each kind (`thin`: and narrow).

    The folder is that of the run's own pretrained weights if nothing is cut; else `folder`, written by `transformers`.
    `memory`: bytes available to a proof. Cuts leave at least `vocabulary` tokens and `layers` layers, if the model has
    them, and widths that are multiples of `block`.
    Raises `UserError` for a model that cannot be read, or is too large even with a layer of each kind.
    """
    asked = load_model_config(config.model.name_or_path, config.model.overrides)
    chosen, cuts = _chosen(asked, thin=thin, memory=memory, vocabulary=vocabulary, layers=layers, block=block)
    if not cuts and config.model.init == "pretrained":
        name = type(build_meta(asked)).__name__
        return ModelFolder(weights_folder(config.model.name_or_path), name, asked.get_text_config().vocab_size, ())
    model = hf_internals.unmodified_model(chosen, torch.float32)
    fill(model, seed)
    model.save_pretrained(folder)
    return ModelFolder(folder, type(model).__name__, chosen.get_text_config().vocab_size, cuts)


def _chosen(
    config: Any, *, thin: bool, memory: int, vocabulary: int, layers: int, block: int
) -> tuple[Any, tuple[str, ...]]:
    """The config to prove, and what it lacks of `config`: nothing, layers, or (`thin`) widths too. Raises `UserError`
    if even that exceeds `memory`."""
    if not thin and _bytes(config) <= memory:
        return config, ()
    fewer = fewer_layers(config, layers)
    small = narrow(fewer, vocabulary, block) if thin else None
    if small is None and _bytes(fewer) <= memory:
        small = fewer
    if small is not None:
        return small, _differences(config, small)
    raise UserError(
        f"one layer of each kind of this model needs {_bytes(fewer) / GIB:.1f} GiB to be proved, and "
        f"{memory / GIB:.1f} GiB are free",
        fix="cut its widths as well: --thin",
        more="fivefold docs howto/verify",
    )


def _bytes(config: Any) -> int:
    parameters: int = sum(parameter.numel() for parameter in build_meta(config).parameters())
    return BYTES_PER_PARAMETER * parameters


def narrow(config: Any, vocabulary: int, block: int = 1) -> Any | None:
    """A copy with narrow heads and layers and a small vocabulary; None if the class does not accept them. Widths are
    multiples of `block`."""
    try:
        small, asked = copy.deepcopy(config), copy.deepcopy(config)
        for text_config in (small.get_text_config(), asked.get_text_config()):
            setattr(text_config, GLOBAL, True)
        _narrow(small.get_text_config(), asked.get_text_config(), vocabulary, block)
        values = small.to_dict()
        text = text_of(values)
        text.pop(GLOBAL)
        for override in (text.get(OVERRIDES) or {}).values():
            override |= {"head_dim": 2 * HEAD_DIM} if override.get("head_dim", 0) > 2 * HEAD_DIM else {}
        small = remade(config, values)
        build_meta(small)
    except Exception:  # a class may raise anything for sizes that it was not made for
        return None
    return small


def _narrow(small: Any, config: Any, vocabulary: int, block: int) -> None:
    """Change `small`, a copy of the language model's `config`."""
    heads = config.num_attention_heads
    head = HEAD_DIM * block // gcd(HEAD_DIM * heads, block)
    _set(small, "hidden_size", heads * head)
    _set(small, "head_dim", head)
    for name in WIDE:
        _set(small, name, -(-_prime_above(heads * head * 3 // 2) // block) * block)
    _set(small, "ffn_dim", 2 * _prime_above(heads * HEAD_DIM * 3 // 4))  # gate and up in one (Moshi)
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        _set(small, name, _prime_above(2 * HEAD_DIM))
    for name in ("n_routed_experts", "num_local_experts", "num_experts"):
        groups = getattr(config, "n_group", None) or 1
        _set(small, name, -(-max(EXPERTS, 2 * (getattr(config, "num_experts_per_tok", None) or 1)) // groups) * groups)
    for name, size in (
        ("q_lora_rank", 13), ("kv_lora_rank", 11), ("qk_nope_head_dim", 6), ("v_head_dim", 7),
        ("qk_rope_head_dim", HEAD_DIM),
    ):  # fmt: skip
        _set(small, name, size)
    _set(small, "sliding_window", WINDOW)
    _set(small, "attention_window", WINDOW)
    small.vocab_size = min(config.vocab_size, max(VOCABULARY, vocabulary))
    _set(small, "vocab_size_per_layer_input", small.vocab_size)
    _set(small, "hidden_size_per_layer_input", HEAD_DIM)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, key, None) is not None:
            setattr(small, key, min(_first(getattr(config, key)), small.vocab_size - 1))
    _shorten_factors(small, config)


def _set(config: Any, name: str, value: int) -> None:
    """Lower an integer of the config to `value`; a missing or smaller one stays."""
    old = getattr(config, name, None)
    if isinstance(old, int) and not isinstance(old, bool) and old > value:
        setattr(config, name, value)


def _shorten_factors(small: Any, config: Any) -> None:
    """Shorten the rotary factors to the narrow heads: there is one per pair of features."""
    rope = getattr(small, "rope_parameters", None) or {}
    for key in ("short_factor", "long_factor"):
        if isinstance(rope.get(key), list):
            wide = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            rope[key] = rope[key][: max(1, len(rope[key]) * HEAD_DIM // wide)]


def _differences(config: Any, small: Any) -> tuple[str, ...]:
    """The sizes in which a cut config differs, for people: `layers 2 of 32`."""
    words = {"num_hidden_layers": "layers", "hidden_size": "width", "intermediate_size": "MLP width", "head_dim":
             "head width", "sliding_window": "window", "vocab_size": "vocabulary"}  # fmt: skip
    found, texts = [], [whole.get_text_config() for whole in (small, config)]
    for name, word in words.items():
        now, was = (getattr(text_config, name, None) for text_config in texts)
        if now != was:
            found.append(f"{word} {now} of {was}")
    return tuple(found) or ("nothing",)


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _prime_above(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def fill(model: Any, seed: int) -> None:
    """Draw every parameter and router buffer at random; none is zero or as an initialiser would leave it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if _is_norm(name, parameter) else 0.08 * noise)
        for name in router_buffers(model):
            model.get_buffer(name).copy_(0.08 * torch.randn(model.get_buffer(name).shape, generator=generator))


def _is_norm(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 1 and name.endswith("weight")
