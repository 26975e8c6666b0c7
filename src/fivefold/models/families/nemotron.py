"""Nemotron: norms of 1 + weight, squared ReLU, no gate."""

from fivefold.models.families import Family

FAMILY = Family(
    name="nemotron",
    model_classes=("NemotronForCausalLM",),
    tiny={"model_type": "nemotron", "mlp_bias": True, "attention_bias": True},
    notes="norms of 1 + weight, no gate in the MLP",
)
