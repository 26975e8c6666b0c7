"""Small models of every family that is proved, by name: keys of a config.json beside the sizes that all share.

Each hides nothing of its family: windows bite, caps cap, experts do not come in powers of two. A family whose class
`fivefold.models.partition` names and whose model is here is held to every measure of the tests.
"""

from typing import Any

SLIDING = [f"{kind}_attention" for kind in ("sliding", "full", "sliding")]

TINY: dict[str, dict[str, Any]] = {
    # Cohere (Command R): attention and MLP side by side, scaled logits, layer norms without bias.
    "cohere": {"model_type": "cohere", "logit_scale": 0.3},
    # Cohere 2 (Command A, R7B): Cohere with sliding windows, and no positions in the other layers.
    "cohere2": {"model_type": "cohere2", "logit_scale": 0.3, "sliding_window": 7, "layer_types": SLIDING},
    # DeepSeek-V3 and R1: latent attention, sigmoid scores in groups, a correction bias, shared experts, a dense layer.
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "moe_intermediate_size": 17,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 13,
        "kv_lora_rank": 11,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "head_dim": 4,
    },
    # Gemma 2: four norms a block, every other layer slides, scores and logits are capped.
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "query_pre_attn_scalar": 11,
    },
    # Gemma 3 text: layers of two kinds, each with its rotary positions; a norm over each head.
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 7, "layer_types": SLIDING},
    # GLM-4: rotary positions on a part of each head, gate and up in one projection, four norms a block.
    "glm4": {"model_type": "glm4", "attention_bias": True},
    # GPT-2: learnt positions, weights stored the other way round, query, key and value in one projection.
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 64,
        "n_inner": 53,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    # GPT-NeoX and Pythia: query, key and value in one projection, head by head.
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": None,
    },
    # gpt-oss: attention sinks, windows in every other layer, experts with biases whose matrices are transposed.
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 12,
        "num_experts_per_tok": 3,
        "intermediate_size": 23,
        "sliding_window": 7,
        "layer_types": SLIDING,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "swiglu_limit": 0.5,
    },
    # Granite 3: Llama with multipliers on embeddings, residuals, scores and logits.
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 2.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 1.7,
    },
    # Llama 2, 3, 3.1, 3.2, 3.3 and the many models saved under the same class (SmolLM, TinyLlama, Yi...).
    "llama": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    # Mistral: Llama with a sliding window.
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    # Mixtral: Mistral with experts in place of every MLP.
    "mixtral": {"model_type": "mixtral", "num_local_experts": 12, "num_experts_per_tok": 2, "intermediate_size": 29},
    # Nemotron: norms of 1 + weight, squared ReLU, no gate.
    "nemotron": {"model_type": "nemotron", "mlp_bias": True, "attention_bias": True},
    # OLMo 2: norms after the projections, and one over all query and all key features.
    "olmo2": {"model_type": "olmo2"},
    # OLMo 3: OLMo 2 with sliding windows.
    "olmo3": {"model_type": "olmo3", "sliding_window": 7, "layer_types": SLIDING},
    # OLMoE: a norm over all features of queries and keys, and experts whose weights are not normalised.
    "olmoe": {"model_type": "olmoe", "num_experts": 11, "num_experts_per_tok": 3, "intermediate_size": 19},
    # Phi-3 and Phi-4: query, key and value in one projection, gate and up in another.
    "phi3": {"model_type": "phi3", "bos_token_id": None, "eos_token_id": None},
    # Qwen2 and Qwen2.5: Llama with biases on query, key and value.
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    # Qwen3 dense: Llama with a norm over each query and key head.
    "qwen3": {"model_type": "qwen3", "attention_bias": False},
    # Qwen3 with experts (30B-A3B, 235B-A22B): a norm over each head, and layers that keep their MLP.
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 13,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 17,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    # SmolLM3: every fourth layer without rotary positions.
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "bos_token_id": None, "eos_token_id": None},
    # StarCoder 2: layer norms and biases, no gate.
    "starcoder2": {
        "model_type": "starcoder2",
        "sliding_window": 7,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}
