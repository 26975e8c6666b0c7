"""Qwen2 and Qwen2.5: Llama with biases on query, key and value."""

from fivefold.models.families import Family

FAMILY = Family(
    name="qwen2",
    model_classes=("Qwen2ForCausalLM",),
    tiny={
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    notes="biases; a sliding window in the upper layers, where it is on",
)
