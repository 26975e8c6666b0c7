"""SmolLM3: every fourth layer without rotary positions."""

from fivefold.models.families import Family

FAMILY = Family(
    name="smollm3",
    model_classes=("SmolLM3ForCausalLM",),
    tiny={"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "bos_token_id": None, "eos_token_id": None},
    notes="layers without rotary positions",
)
