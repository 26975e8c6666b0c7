"""OLMo 2: norms after the projections, and one over all query and all key features."""

from fivefold.models.families import Family

FAMILY = Family(
    name="olmo2",
    model_classes=("Olmo2ForCausalLM",),
    tiny={"model_type": "olmo2"},
    notes="a norm over all heads at once, whose input is gathered",
)
