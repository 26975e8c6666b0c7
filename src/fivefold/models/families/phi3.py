"""Phi-3 and Phi-4: query, key and value in one projection, gate and up in another."""

from fivefold.models.families import Family

FAMILY = Family(
    name="phi3",
    model_classes=("Phi3ForCausalLM",),
    tiny={"model_type": "phi3", "bos_token_id": None, "eos_token_id": None},
    notes="fused projections, each dealt by its parts",
)
