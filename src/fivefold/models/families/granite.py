"""Granite 3: Llama with multipliers on embeddings, residuals, scores and logits."""

from fivefold.models.families import Family

FAMILY = Family(
    name="granite",
    model_classes=("GraniteForCausalLM",),
    tiny={
        "model_type": "granite",
        "embedding_multiplier": 2.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 1.7,
    },
    notes="four multipliers",
)
