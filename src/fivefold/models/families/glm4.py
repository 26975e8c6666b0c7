"""GLM-4: rotary positions on a part of each head, gate and up in one projection, four norms a block."""

from fivefold.models.families import Family

FAMILY = Family(
    name="glm4",
    model_classes=("Glm4ForCausalLM",),
    tiny={"model_type": "glm4", "attention_bias": True},
    notes="fused gate and up; rotary positions on a part of each head",
)
