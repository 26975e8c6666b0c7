"""Llama 2, 3, 3.1, 3.2, 3.3 and the many models saved under the same class (SmolLM, TinyLlama, Yi...)."""

from fivefold.models.families import Family

FAMILY = Family(
    name="llama",
    model_classes=("LlamaForCausalLM",),
    query=("q_proj",),
    key_value=("k_proj", "v_proj"),
    residual_norms=("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm"),
)
