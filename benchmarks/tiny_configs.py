"""A tiny config of any class of `transformers`, made from the class's own defaults, and what can be switched in it.

Widths, heads, experts and vocabularies become small numbers that differ from each other, so that no two dimensions are
mistaken for one another. Of the layers those are kept that differ in kind, and every list with one entry per layer is
cut to them, at every depth of the config. Dropout and jitter are off, windows are shorter than the rows.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 107  # the last few ids stand for special tokens, which no document holds
LAST_TOKEN = 100
MOST_LAYERS, FEWEST_LAYERS = 4, 3
WINDOW = 5
CHUNK = 7
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
# What a switch does not change: forms of the output, and settings of generation.
NOT_SWITCHES = re.compile(
    r"return_dict|output_\w+|use_cache|is_encoder_decoder|is_decoder|add_cross_attention|tie_encoder_decoder|summary_\w+"
    r"|classifier_\w+|remove_invalid_values|torchscript|do_sample|(vision|audio|image|speech)\w*\..*|vq_config\..*"
)
RANDOM = re.compile(r"drop|jitter")

Values = dict[str, Any]


def causal_classes() -> dict[str, str]:
    """{class of a causal language model: its model type}, in the order of names. Of several types the class's own."""
    found: dict[str, list[str]] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        found.setdefault(name, []).append(model_type)
    return {name: _own_type(types) for name, types in sorted(found.items(), key=lambda item: item[0].lower())}


def _own_type(types: list[str]) -> str:
    def fits(model_type: str) -> bool:
        config = CONFIG_MAPPING[model_type]
        return MODEL_FOR_CAUSAL_LM_MAPPING[config].config_class is config

    return next((each for each in types if fits(each)), types[0])


def tiny_values(model_type: str, fits: Callable[[PreTrainedConfig], bool]) -> tuple[Values, str]:
    """Values for `make_config`, and "" or why there are none: those of the first of a few tries that `fits` accepts."""
    reason = ""
    for change in CHANGES:
        try:
            values = _tiny(_defaults(model_type, **change), {**SIZES, **change})
            if fits(make_config(model_type, values)):
                return values, ""
            reason = reason or "it does not run with a tiny config"
        except Exception as error:  # the validators of transformers raise all kinds
            reason = reason or f"{type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}"
    return {}, reason


def default_config(model_type: str) -> PreTrainedConfig:
    """The class's own config, with few layers."""
    values = _with_few_layers(_defaults(model_type))
    return make_config(
        model_type, {k: 0.0 if RANDOM.search(k) and isinstance(v, float) else v for k, v in values.items()}
    )


def make_config(model_type: str, values: Values) -> PreTrainedConfig:
    """The config of these values."""
    return CONFIG_MAPPING[model_type](**deepcopy(values))


def _defaults(model_type: str, **change: Any) -> Values:
    """The class's own values. Where it leaves something to its user, as a user would say it."""
    cls = CONFIG_MAPPING[model_type]
    try:
        values = cls().to_dict()
    except Exception:
        values = cls(hidden_size_per_layer_input=0).to_dict()
    for key in NEEDED.keys() & values.keys() & ({"is_decoder"} | change.keys()):
        values[key] = values[key] or NEEDED[key]
    for key, value in OF_THE_CLASS.get(model_type, {}).items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    return _without_names(values)


def _without_names(values: Values) -> Values:
    dropped = {"transformers_version", "architectures", "model_type", "id2label", "label2id", "_name_or_path", "dtype"}
    return {key: value for key, value in values.items() if key not in dropped}


# What some classes leave to their user, and need.
NEEDED: Mapping[str, Any] = {
    "is_decoder": True, "head_dim": 8, "num_key_value_heads": 2, "num_experts_per_tok": 2, "n_routed_experts": 6,
    "n_shared_experts": 1, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 17, "n_group": 1,
    "topk_group": 1, "default_language": "en_XX",
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64,
    "indexer_compress_ratio": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What one class alone needs to be said.
OF_THE_CLASS: Mapping[str, Values] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 1.0}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "lfm2_moe": {"layer_types": ["full_attention"] * 32},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gemma4_unified_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "mamba2": {"num_heads": 8, "hidden_size": 32, "expand": 2},
}
# Tried in this order: sizes that are changed, and keys that get what is in NEEDED.
CHANGES: tuple[Values, ...] = (
    {},
    {"num_key_value_heads": 4},
    NEEDED,
    {**NEEDED, "num_key_value_heads": 4},
    {"hidden_size": 64, "num_attention_heads": 8},
)


# Sizes ----------------------------------------------------------------------------------------------------------------

SIZES: Mapping[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 3,
}  # fmt: skip
# Pattern of a key -> the size that it gets, if it has a larger one. The first that matches.
RULES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*|.*_vocab|.*codebook_size|decoder_vocab_size", VOCABULARY),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|model_max_length"
     r"|context_length|original_max_position_embeddings)", 64),
    (r".*(sliding_window|window_size|local_attention|attention_window|window_len)", WINDOW),
    (r"(.*_)?chunk_size", 64),
    (r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts)", 6),
    (r"(num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k|moe_topk)", 2),
    (r"zero_expert_num", 2),
    (r"n_group|num_expert_group", 3),
    (r"topk_group", 2),
    (r"(moe_num|n|num)_shared_experts", 1),
    (r"(moe_intermediate_size|expert_ffn_hidden_size)", 17),
    (r"(moe_)?shared_(expert_)?intermediate_size|shared_experts_intermediate_size", 19),
    (r".*intermediate_size\w*|.*ffn_dim|n_inner|d_ff|ffn_hidden_size|dim_ff|dff|mlp_dim|feed_forward_size|d_inner", 53),
    (r"q_lora_rank", 13), (r"kv_lora_rank", 12), (r"qk_nope_head_dim", 6), (r"qk_rope_head_dim|rotary_dim", 4),
    (r"qk_head_dim", 10), (r"v_head_dim", 7), (r"o_lora_rank", 8),
    (r"index_n_heads", 4), (r"index_head_dim", 8),
    (r"index_topk", 3), (r"index_block_size", 4), (r"index_topk_blocks|index_local_blocks", 1),
    (r"keep_window_size", 3),
    (r"(first_k_dense_replace|num_dense_layers|num_kv_shared_layers|max_window_layers)", 1),
    (r"decoder_sparse_step|moe_layer_interval|interleave_moe_layer_step", 2),
    (r"(\w*_)?hidden_size|d_model|n_embd|embed_dim|\w*embedding_(size|dim)|word_embed_proj_dim", 32),
    (r"(\w*_)?(num_)?(query_groups|kv_heads|key_value_heads)|kv_n_heads", 2),
    (r"(\w*_)?(attention_heads|num_heads|n_heads?|num_key_heads|num_value_heads|mamba_num_heads)", 4),
    (r"mamba_(d_head|head_dim|headdim)", 16), (r"mamba_d_ssm", 64),
    (r"(\w*_)?(head_dim|head_size|kv_channels|d_head|d_kv|dim_head|headdim)|key_length", 8),
    (r"conv_kernel\w*", 3),
)  # fmt: skip
HEADS = {
    r"hidden_size|d_model|n_embd|word_embed_proj_dim|embed_dim|embedding_size": "hidden_size",
    r"num_attention_heads|n_heads?|num_heads": "num_attention_heads",
    r"num_key_value_heads|num_kv_heads|kv_n_heads": "num_key_value_heads",
    r"head_dim|kv_channels": "head_dim",
}


def _tiny(values: Values, sizes: Mapping[str, Any]) -> Values:
    """These values, made small at every depth."""
    cut = _with_few_layers(values)
    return {key: _small(key, value, values, sizes) for key, value in cut.items()}


def _small(key: str, value: Any, beside: Values, sizes: Mapping[str, Any]) -> Any:
    if isinstance(value, dict) and "rope" in str(key):
        return {name: _small_rope(each) for name, each in value.items()}
    if isinstance(value, dict):
        return _tiny(_without_names(value), sizes)
    if key.endswith("token_id") or key.endswith("token_index"):
        return _special(key, value, sizes)
    if isinstance(value, float) and RANDOM.search(key):
        return 0.0
    if (
        isinstance(value, list)
        and value
        and all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    ):
        return [_size(key, each, beside, sizes) for each in value]
    return _size(key, value, beside, sizes)


def _size(key: str, value: Any, beside: Values, sizes: Mapping[str, Any]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 1 or key in LAYER_COUNTS:
        return value
    for pattern, name in HEADS.items():
        if re.fullmatch(pattern, key):
            return _heads(name, value, beside, sizes)
    small = next((size for pattern, size in RULES if re.fullmatch(pattern, key)), None)
    if small is not None:
        return min(small, value)
    return min(value, 16) if re.search(r"(dim|size|width|rank)$", key) and value > 64 else value


def _heads(name: str, value: int, beside: Values, sizes: Mapping[str, Any]) -> int:
    """Key and value heads: as many as query heads where the class has as many."""
    if name == "num_key_value_heads" and value == beside.get("num_attention_heads"):
        return int(sizes["num_attention_heads"])
    if name == "head_dim":  # of latent attention: the rotary part
        return 4 if beside.get("qk_rope_head_dim") and beside.get("qk_nope_head_dim") else int(sizes[name])
    return min(int(sizes[name]), value)


def _small_rope(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _small_rope(each) for key, each in value.items()}
    return value[:4] if isinstance(value, list) else value


def _special(key: str, value: Any, sizes: Mapping[str, Any]) -> Any:
    """Ids of special tokens: none that a document holds, but padding, whose embedding has no gradient."""
    if isinstance(value, list):
        return [VOCABULARY - 2]
    if key == "pad_token_id":
        return value if value is None else sizes["pad_token_id"]
    return value if value is None or value < LAST_TOKEN else VOCABULARY - 1 - sum(map(ord, key)) % 5


# Layers ---------------------------------------------------------------------------------------------------------------


def _with_few_layers(values: Values) -> Values:
    """A layer of each kind, as the lists with an entry per layer tell them apart."""
    count_key = next((key for key in LAYER_COUNTS if isinstance(values.get(key), int)), None)
    if count_key is None:
        return dict(values)
    count = values[count_key]
    per_layer = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == count > 4}
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([value[layer] for value in per_layer.values()]), layer)
    chosen = list(kinds.values())[:MOST_LAYERS]
    rest = (layer for layer in range(count) if layer not in chosen)
    while len(chosen) < min(FEWEST_LAYERS, count):
        chosen.append(next(rest))
    chosen.sort()
    cut = {key: [value[layer] for layer in chosen] if key in per_layer else value for key, value in values.items()}
    if isinstance(cut.get("per_layer_config"), dict):
        own = {int(layer): each for layer, each in cut["per_layer_config"].items()}
        cut["per_layer_config"] = {at: own[layer] for at, layer in enumerate(chosen) if layer in own}
    for key in LAYER_COUNTS:
        if isinstance(cut.get(key), int):
            cut[key] = min(cut[key], len(chosen))
    for key, value in cut.items():  # lists of layers
        if key not in per_layer and re.search(r"layers$|layer_ids$|_idxs$|_indices$", key) and isinstance(value, list):
            known = [layer for layer in value if isinstance(layer, int) and layer in chosen]
            cut[key] = [chosen.index(layer) for layer in known] or value[:0]
    return cut


# Switches -------------------------------------------------------------------------------------------------------------


def switches(values: Values, model_type: str = "") -> Iterator[tuple[str, Values]]:
    """(what is switched, values): every boolean the other way once, windows and chunks on, dropout and jitter on, and
    the last layer of each kind that the class knows and has none of by default."""
    for kind in _other_kinds(values, model_type):
        yield f"layer_types: {kind}", {**values, "layer_types": [*values["layer_types"][:-1], kind]}
    for path, value in _leaves(values):
        if NOT_SWITCHES.fullmatch(path) or NOT_SWITCHES.fullmatch(path.rpartition(".")[2]):
            continue
        leaf = path.rpartition(".")[2]
        if isinstance(value, bool):
            changed = _with(values, path, not value)
            yield f"{path}: {str(not value).lower()}", _derived(changed) if "sliding" in leaf else changed
        elif RANDOM.search(leaf) and (isinstance(value, float) or value in (None, 0)):
            yield f"{path}: 0.1", _with(values, path, 0.1)
        elif re.search(r"sliding_window$|attention_window$|window_size$", leaf) and value is None:
            yield f"{path}: {WINDOW}", _with(values, path, WINDOW)
        elif re.search(r"attention_chunk_size$", leaf) and isinstance(value, int | None):
            yield f"{path}: {CHUNK}", _with(values, path, CHUNK)
        elif leaf == "floor_scale":
            yield f"{path}: 2", _with(values, path, 2)
        elif re.search(r"softcap(ping)?$", leaf) and value is None:
            yield f"{path}: 2.0", _with(values, path, 2.0)


def _other_kinds(values: Values, model_type: str) -> list[str]:
    """Kinds of layers that the code of the class speaks of, beside those that the config has."""
    kinds = values.get("layer_types")
    if not model_type or not isinstance(kinds, list):
        return []
    config = CONFIG_MAPPING[model_type]
    modules = [sys.modules[cls.__module__] for cls in (config, MODEL_FOR_CAUSAL_LM_MAPPING[config])]
    source = "".join(map(inspect.getsource, modules))
    return [kind for kind in ALLOWED_ATTN_LAYER_TYPES if kind not in kinds and re.search(rf"[\"']{kind}[\"']", source)]


def _derived(values: Values) -> Values:
    """The kinds of layers are what the class makes of its switches, not what they were before."""
    window = {"sliding_window": values.get("sliding_window") or WINDOW} if "sliding_window" in values else {}
    return {**values, **window, **({"layer_types": None} if "layer_types" in values else {})}


def _leaves(values: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and "rope" not in str(key):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _with(values: Values, path: str, value: Any) -> Values:
    changed = deepcopy(values)
    *above, leaf = path.split(".")
    place = changed
    for key in above:
        place = place[key]
    place[leaf] = value
    return changed
