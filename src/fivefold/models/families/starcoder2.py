"""StarCoder 2: layer norms and biases, no gate."""

from fivefold.models.families import Family

FAMILY = Family(
    name="starcoder2",
    model_classes=("Starcoder2ForCausalLM",),
    tiny={
        "model_type": "starcoder2",
        "sliding_window": 7,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    notes="layer norms and biases, no gate; sliding window",
)
