"""OLMoE: a norm over all features of queries and keys, and experts whose weights are not normalised."""

from fivefold.models.families import Family

FAMILY = Family(
    name="olmoe",
    model_classes=("OlmoeForCausalLM",),
    tiny={"model_type": "olmoe", "num_experts": 11, "num_experts_per_tok": 3, "intermediate_size": 19},
    notes="a norm over all heads at once; 11 experts, 3 per token",
)
