"""Small models of each family, with nothing round about their sizes, on meta and filled."""

import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config

from fivefold.models.build import build_meta
from fivefold.models.recipe import buffer_values
from fivefold.models.sources import RandomInit

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 7,
    "initializer_range": 0.11,
}


def llama(**changes):
    """Rope scaling and biases on, so that neither is hidden by its default."""
    return LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE, **changes})


def qwen3(**changes):
    """A head size that is not hidden_size / heads, and tied embeddings."""
    return Qwen3Config(**{**SIZES, "head_dim": 12, "tie_word_embeddings": True, **changes})


FAMILIES = {"llama": llama, "qwen3": qwen3}


def filled(config, *, seed=1, attention="fivefold", dtype=torch.float32, biases=False):
    """The model of `config` on the CPU, drawn from `seed`; `biases` makes those random too, which start at zero."""
    model = build_meta(config, attention=attention)
    source, buffers = RandomInit(model, seed), buffer_values(model)
    model.to_empty(device="cpu").tie_weights()  # to_empty gives tied names a tensor each
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(buffers[name] if name in buffers else source.whole(name))
        if biases:
            generator = torch.Generator().manual_seed(0)
            for name, tensor in model.named_parameters():
                if name.endswith("bias"):
                    nn.init.normal_(tensor, std=0.1, generator=generator)
    return model.to(dtype)
