"""Families with windows, chunks, soft-capping or sinks: packed documents under our attention against the unmodified
model of `transformers` with its own attention, each document its own sequence; and its `generate` against itself."""

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
)

from tests.models.tiny import SIZES, filled

LENGTHS = [23, 1, 5, 17, 11, 12]  # longer than the window, as long, and shorter; one row of them all
WINDOW = 5
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
GEMMA = {**SIZES, **ALTERNATING, "head_dim": 12, "query_pre_attn_scalar": 12}
CONFIGS = {
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=0.6),
    "gemma3": Gemma3TextConfig(**GEMMA),
    "gpt-oss": GptOssConfig(
        **SIZES, **ALTERNATING, head_dim=12, num_local_experts=3, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    # the window is in the mask alone: attention is not passed one
    "phimoe": PhimoeConfig(**SIZES, sliding_window=WINDOW, num_local_experts=3, router_jitter_noise=0.0),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES, **ALTERNATING, use_sliding_window=True, num_experts=3, num_experts_per_tok=2,
        moe_intermediate_size=17, shared_expert_intermediate_size=19,
    ),
    "llama4": Llama4TextConfig(
        **SIZES, attention_chunk_size=WINDOW, head_dim=12, intermediate_size_mlp=61, num_local_experts=3,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
    ),
}  # fmt: skip
TOLERANCE = 1e-10  # relative to the largest value: fp64 through three layers of large weights
ROTARY_TOLERANCE = 1e-5  # Llama 4 rotates in complex numbers of fp32
NORM_TOLERANCE = 1e-6  # the norm weights of Gemma have fp32 gradients, which are summed in another order


@pytest.fixture(autouse=True)
def softmax_in_fp64(monkeypatch):
    """Eager attention asks for its softmax in fp32, which would hide small errors."""
    monkeypatch.setattr(nn.functional, "softmax", lambda scores, dim, dtype=None: scores.softmax(dim))


def model(family, attention):
    """The family's model in fp64 with large random weights, so that scores are far from flat; sinks random."""
    built = filled(CONFIGS[family], attention=attention, dtype=torch.float64)
    built.set_experts_implementation("eager")  # the grouped one has no fp64
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "sinks")):
                parameter.normal_(std=0.7, generator=generator)
    return built


def documents():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(SIZES["vocab_size"], (1, length), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_documents_match_the_unmodified_model(family):
    theirs, ours = model(family, "eager"), model(family, "fivefold")
    docs = documents()
    expected = torch.cat([theirs(input_ids=ids, use_cache=False).logits for ids in docs], 1)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    found = ours(input_ids=torch.cat(docs, 1), position_ids=positions, cu_seqlens=cu_seqlens, use_cache=False).logits
    exact = ROTARY_TOLERANCE if family == "llama4" else TOLERANCE
    assert (found - expected).abs().max() <= exact * expected.abs().max()
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        tolerance = NORM_TOLERANCE if family.startswith("gemma") and "norm" in name else exact
        assert (mine.grad - other.grad).abs().max() <= tolerance * other.grad.abs().max(), name


@pytest.mark.parametrize("family", CONFIGS)
def test_generation_beyond_the_window_matches_the_unmodified_model(family):
    theirs, ours = model(family, "eager"), model(family, "fivefold")
    prompt = torch.cat(documents(), 1)[:, :14].view(2, 7)
    options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    outputs = [each.generate(prompt, use_cache=True, eos_token_id=None, **options) for each in (theirs, ours)]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    expected, found = (torch.stack(output.logits) for output in outputs)
    exact = ROTARY_TOLERANCE if family == "llama4" else TOLERANCE
    assert (found - expected).abs().max() <= exact * expected.abs().max()
