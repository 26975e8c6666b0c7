"""Gemma 3 text: layers of two kinds, each with its rotary positions; a norm over each head."""

from fivefold.models.families import Family

FAMILY = Family(
    name="gemma3",
    model_classes=("Gemma3ForCausalLM",),
    tiny={
        "model_type": "gemma3_text",
        "sliding_window": 7,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding")],
    },
    notes="layers of two kinds, with rotary positions of their own",
)
