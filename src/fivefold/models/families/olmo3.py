"""OLMo 3: OLMo 2 with sliding windows."""

from fivefold.models.families import Family

FAMILY = Family(
    name="olmo3",
    model_classes=("Olmo3ForCausalLM",),
    tiny={
        "model_type": "olmo3",
        "sliding_window": 7,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding")],
    },
    notes="as OLMo 2, with sliding windows",
)
