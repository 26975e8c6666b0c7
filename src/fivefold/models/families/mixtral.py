"""Mixtral: Mistral with experts in place of every MLP."""

from fivefold.models.families import Family

FAMILY = Family(
    name="mixtral",
    model_classes=("MixtralForCausalLM",),
    tiny={"model_type": "mixtral", "num_local_experts": 12, "num_experts_per_tok": 2, "intermediate_size": 29},
    notes="12 experts, 2 per token",
)
