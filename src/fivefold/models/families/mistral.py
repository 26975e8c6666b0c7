"""Mistral: Llama with a sliding window."""

from fivefold.models.families import Family

FAMILY = Family(
    name="mistral",
    model_classes=("MistralForCausalLM",),
    tiny={"model_type": "mistral", "sliding_window": 7},
    notes="sliding window",
)
