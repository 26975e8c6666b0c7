"""Qwen3 with experts (30B-A3B, 235B-A22B): a norm over each head, and layers that keep their MLP."""

from fivefold.models.families import Family

FAMILY = Family(
    name="qwen3_moe",
    model_classes=("Qwen3MoeForCausalLM",),
    tiny={
        "model_type": "qwen3_moe",
        "num_experts": 13,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 17,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    notes="a norm over each head; 13 experts, 3 per token, and a layer without",
)
