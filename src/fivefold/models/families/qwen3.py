"""Qwen3 dense: Llama with a norm over each query and key head."""

from fivefold.models.families import Family

FAMILY = Family(
    name="qwen3",
    model_classes=("Qwen3ForCausalLM",),
    tiny={"model_type": "qwen3", "attention_bias": False},
    notes="a norm over each head",
)
