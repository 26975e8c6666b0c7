"""gpt-oss: attention sinks, windows in every other layer, experts with biases whose matrices are transposed."""

from fivefold.models.families import Family

FAMILY = Family(
    name="gpt_oss",
    model_classes=("GptOssForCausalLM",),
    tiny={
        "model_type": "gpt_oss",
        "num_local_experts": 12,
        "num_experts_per_tok": 3,
        "intermediate_size": 23,
        "sliding_window": 7,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding")],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "swiglu_limit": 0.5,
    },
    notes="attention sinks; experts with biases and a clamp that bites",
)
