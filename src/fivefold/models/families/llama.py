"""Llama 2, 3, 3.1, 3.2, 3.3 and the many models saved under the same class (SmolLM, TinyLlama, Yi...)."""

from fivefold.models.families import Family

FAMILY = Family(
    name="llama",
    model_classes=("LlamaForCausalLM",),
    tiny={
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    notes="rotary positions scaled for long context",
)
