"""DeepSeek-V3 and R1: latent attention, sigmoid scores in groups, a correction bias, shared experts, a dense layer."""

from fivefold.models.families import Family

FAMILY = Family(
    name="deepseek_v3",
    model_classes=("DeepseekV3ForCausalLM",),
    tiny={
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
    notes="latent attention; 12 experts in groups, 3 per token, one shared",
)
