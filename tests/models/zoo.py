"""Folders as other programs have left them, from a few lines each: config.json in the words of its year, weights."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GPT = {
    "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2
}  # fmt: skip

# Name -> a whole config.json but for `SIZES`, which all share that do not say otherwise.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama of 2023": {
        "model_type": "llama", "torch_dtype": "float16", "pretraining_tp": 1, "rope_scaling": None,
        "hidden_act": "silu", "transformers_version": "4.31.0", "use_cache": True, "_name_or_path": "/data/llama",
    },
    "llama without key/value heads": {"model_type": "llama", "num_key_value_heads": None},
    "llama, linear by the old key": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama, dynamic": {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama 3.1": {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3, "eos_token_id": [2, 3]},
    "llama 3.2, tied": {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": True, "head_dim": 8},
    "llama of 2026": {"model_type": "llama", "dtype": "bfloat16", "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "llama, both types of weights": {"model_type": "llama", "dtype": "bfloat16", "torch_dtype": "float16"},
    "llama, parameters beside scaling": {
        "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "qwen2, window switched off": {
        "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 7, "max_window_layers": 4
    },
    "qwen2, window in the upper layers": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2
    },
    "qwen2.5, yarn": {"model_type": "qwen2", "rope_theta": 1e6, "rope_scaling": {**YARN, "type": "yarn"}},
    "qwen3": {"model_type": "qwen3", "head_dim": 10, "rope_theta": 1e6, "rope_scaling": None, "attention_bias": False},
    "qwen3, theta beside parameters": {
        "model_type": "qwen3", "rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}
    },
    "qwen3, theta beside parameters without one": {
        "model_type": "qwen3", "rope_theta": 1e6, "rope_parameters": {"rope_type": "linear", "factor": 3.0}
    },
    "qwen3 with experts": {
        "model_type": "qwen3_moe", **EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [1]
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7, "rope_theta": 1e4},
    "mistral, no window": {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
    "mistral with layer types": {
        "model_type": "mistral", "layer_types": TYPES, "sliding_window": 7, "head_dim": 8
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "gemma": {"model_type": "gemma", "head_dim": 8, "hidden_act": "gelu", "hidden_activation": None},
    "gemma 2": {
        "model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 11, "sliding_window": 7,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5, "cache_implementation": "hybrid",
    },
    "gemma 3, old words": {
        "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 11, "sliding_window": 7, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma 3, by layer type": {
        "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 11, "sliding_window": 7,
        "layer_types": TYPES, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    },
    "olmo": {"model_type": "olmo", "clip_qkv": 0.3},
    "olmo 2": {"model_type": "olmo2", "rope_theta": 5e5},
    "olmo 3, yarn": {"model_type": "olmo3", "rope_theta": 5e5, "rope_scaling": YARN, "sliding_window": 7},
    "olmo 3, by layer type": {
        "model_type": "olmo3", "sliding_window": 7, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {**YARN, "rope_theta": 5e5},
        },
    },
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.25, "num_key_value_heads": 4},
    "phi 3": {"model_type": "phi3", "rope_scaling": None, "sliding_window": 7, "pad_token_id": 0},
    "phi 3.5": {
        "model_type": "phi3", "original_max_position_embeddings": 64, "pad_token_id": 0,
        "rope_scaling": {"type": "longrope", **LONG},
    },
    "phi 3.5 with experts": {
        "model_type": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
        "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.01,
    },
    "gpt-2": {"model_type": "gpt2", **GPT, "n_ctx": 128, "activation_function": "gelu_new"},
    "gpt-neox": {
        "model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000, "hidden_act": "gelu",
        "use_parallel_residual": True, "num_key_value_heads": None,
    },
    "stablelm": {"model_type": "stablelm", "partial_rotary_factor": 0.25, "use_qkv_bias": True, "rope_theta": 10000},
    "starcoder 2": {"model_type": "starcoder2", "sliding_window": 7, "norm_epsilon": 1e-5, "rope_theta": 1e5},
    "granite": {"model_type": "granite", "logits_scaling": 1.7, "attention_multiplier": 0.3},
    "cohere 2": {
        "model_type": "cohere2", "logit_scale": 0.3, "sliding_window": 7, "sliding_window_pattern": 2, "pad_token_id": 0
    },
    "smollm 3": {
        "model_type": "smollm3", "no_rope_layers": [1, 0, 1, 0], "no_rope_layer_interval": 2, "pad_token_id": 0
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 7,
        "layer_types": TYPES, "rope_theta": 150000,
        "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
        "rope_scaling": {**YARN, "type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm 4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "head_dim": 8, "pad_token_id": 0},
    "nemotron": {"model_type": "nemotron", "partial_rotary_factor": 0.5, "hidden_act": "relu2", "norm_eps": 1e-5},
}  # fmt: skip


def config_json(folder: Path, values: dict[str, Any]) -> Path:
    """A folder with this config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {} if values["model_type"] == "gpt2" else SIZES
    (folder / "config.json").write_text(json.dumps({**sizes, **values}))
    return folder


def model_folder(folder: Path, values: dict[str, Any], dtype: torch.dtype = torch.float32, **how: Any) -> Path:
    """The same with weights, which `transformers` writes (`how`), loud enough that every setting is heard."""
    config_json(folder, values)
    written = (folder / "config.json").read_text()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.to(dtype).save_pretrained(folder, **how)
    (folder / "config.json").write_text(written)
    return folder
