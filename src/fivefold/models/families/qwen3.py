"""Qwen3 dense: Llama's shape with a norm over each query and key head, which its own plan marks as local."""

from fivefold.models.families import Family

FAMILY = Family(
    name="qwen3",
    model_classes=("Qwen3ForCausalLM",),
    query=("q_proj",),
    key_value=("k_proj", "v_proj"),
    residual_norms=("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm"),
)
