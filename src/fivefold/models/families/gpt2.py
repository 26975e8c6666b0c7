"""GPT-2: learnt positions, weights stored the other way round, query, key and value in one projection."""

from fivefold.models.families import Family

FAMILY = Family(
    name="gpt2",
    model_classes=("GPT2LMHeadModel",),
    tiny={
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 64,
        "n_inner": 53,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    notes="learnt positions, so no sequence parallel; weights stored [in, out]",
)
