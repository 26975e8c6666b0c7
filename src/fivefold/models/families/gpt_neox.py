"""GPT-NeoX and Pythia: query, key and value in one projection, head by head."""

from fivefold.models.families import Family

FAMILY = Family(
    name="gpt_neox",
    model_classes=("GPTNeoXForCausalLM",),
    tiny={"model_type": "gpt_neox", "hidden_act": "gelu", "bos_token_id": None, "eos_token_id": None, "head_dim": None},
    notes="a fused projection, head by head; biases everywhere",
)
