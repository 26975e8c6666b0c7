"""Cohere 2 (Command A, R7B): Cohere with sliding windows, and no positions in the other layers."""

from fivefold.models.families import Family

FAMILY = Family(
    name="cohere2",
    model_classes=("Cohere2ForCausalLM",),
    tiny={
        "model_type": "cohere2",
        "logit_scale": 0.3,
        "sliding_window": 7,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding")],
    },
    notes="attention and MLP side by side; windows; layers without positions",
)
