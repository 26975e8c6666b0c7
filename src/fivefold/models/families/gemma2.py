"""Gemma 2: four norms a block, every other layer slides, scores and logits are capped."""

from fivefold.models.families import Family

FAMILY = Family(
    name="gemma2",
    model_classes=("Gemma2ForCausalLM",),
    tiny={
        "model_type": "gemma2",
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "query_pre_attn_scalar": 11,
    },
    notes="soft caps on scores and logits; alternating windows; norms after the projections",
)
