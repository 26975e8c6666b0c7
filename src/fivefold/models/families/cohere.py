"""Cohere (Command R): attention and MLP side by side, scaled logits, layer norms without bias."""

from fivefold.models.families import Family

FAMILY = Family(
    name="cohere",
    model_classes=("CohereForCausalLM",),
    tiny={"model_type": "cohere", "logit_scale": 0.3},
    notes="attention and MLP side by side; scaled logits",
)
