"""What models ask of their masks: told as numbers, or refused."""

import pytest
import torch
from transformers import Llama4TextConfig, MistralConfig, masking_utils

from fivefold.core.errors import UserError
from fivefold.models import hf_internals
from fivefold.models.attention import Mask, MaskOpened, check_mask, in_chunks, mask_asked_for

NAME = "masks-under-test"
TOKENS = 9


def asked_for(*args, mask_function, **kwargs):
    """As a trace asks: the numbers, held against the function."""
    mask = mask_asked_for(*args, **kwargs)
    check_mask(mask, mask_function)
    return mask


def requested(create, config, **kwargs):
    """What a function of `transformers` gives for nine tokens."""
    hf_internals.register_attention(NAME, lambda *_: None, asked_for)
    config._attn_implementation = NAME
    inputs = {"inputs_embeds": torch.zeros(1, TOKENS, 4), "attention_mask": None, "past_key_values": None}
    return create(config, **inputs, **kwargs)


def mistral(**values):
    return MistralConfig(**{"sliding_window": 4, **values})


def llama4(**values):
    return Llama4TextConfig(**{"attention_chunk_size": 3, **values})


def test_every_mask_of_transformers_is_told():
    assert requested(masking_utils.create_causal_mask, mistral()) == Mask()
    assert requested(masking_utils.create_sliding_window_causal_mask, mistral()) == Mask(window=4)
    assert requested(masking_utils.create_chunked_causal_mask, llama4()) == Mask(chunk=3)


@pytest.mark.parametrize(
    ("create", "config", "kwargs", "said"),
    [
        ("create_bidirectional_mask", mistral(), {}, "bidirectional"),
        ("create_bidirectional_sliding_window_mask", mistral(), {}, "bidirectional"),
        ("create_causal_mask", mistral(is_causal=False), {}, "bidirectional"),
        ("create_causal_mask", mistral(), {"or_mask_function": lambda *_: torch.tensor(True)}, "a function of its own"),
        ("create_causal_mask", mistral(), {"and_mask_function": lambda b, h, q, k: k > 2}, "a function of its own"),
        (
            "create_sliding_window_causal_mask",
            mistral(),
            {"block_sequence_ids": torch.tensor([[-1, 0, 0, 0, 1, 1, -1, -1, -1]])},
            "more than the positions",
        ),
    ],
)
def test_other_masks_are_refused_in_words(create, config, kwargs, said):
    with pytest.raises(UserError, match=said):
        requested(getattr(masking_utils, create), config, **kwargs)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda b, h, q, k: (k <= q) & (k > q - 3), "neither causal"),
        (lambda b, h, q, k: (k <= q) | (k < 2), "come later"),
        (lambda b, h, q, k: (k <= q) & (k // 4 == q // 4), "neither causal"),
        (lambda b, h, q, k: torch.tensor([True, False])[q], "more than the positions"),
    ],
)
def test_a_function_that_sees_other_keys_than_was_told_is_refused(function, said):
    check_mask(Mask(window=4), lambda b, h, q, k: (k <= q) & (k > q - 4))
    with pytest.raises(UserError, match=said):
        check_mask(Mask(window=4), function)


def test_a_window_and_a_chunk_of_one_size_cannot_be_told_apart():
    config = llama4()
    config.sliding_window = 3
    with pytest.raises(UserError, match="both 3"):
        mask_asked_for(9, 9, local_size=3, config=config)


def test_padding_and_static_caches_are_refused():
    assert mask_asked_for(q_length=4, kv_length=4, attention_mask=torch.ones(2, 4, dtype=torch.bool)) == Mask()
    assert mask_asked_for(q_length=1, kv_length=3, q_offset=6, kv_offset=4) == Mask()
    with pytest.raises(UserError, match=r"padded batch(.|\n)*leave attention_mask out: .*position_ids that restart"):
        mask_asked_for(q_length=2, kv_length=2, attention_mask=torch.tensor([[False, True]]))
    with pytest.raises(UserError, match="static cache"):
        mask_asked_for(q_length=3, kv_length=64, q_offset=torch.tensor(0))


@pytest.mark.parametrize(
    "use", [lambda m: m.shape, lambda m: m[:, :1], lambda m: m + 1, lambda m: 1.0 - m, lambda m: m * 2]
)
def test_a_model_that_computes_with_its_mask_is_told_so(use):
    with pytest.raises(MaskOpened, match="attention mask"):
        use(Mask())


def test_chunks_are_counted_from_the_start_of_each_document():
    cu_seqlens = torch.tensor([0, 7, 8, 11, 16], dtype=torch.int32)
    assert in_chunks(cu_seqlens, 3).tolist() == [0, 3, 6, 7, 8, 11, 14, 16]
    assert in_chunks(cu_seqlens, 7).tolist() == cu_seqlens.tolist()
    assert in_chunks(cu_seqlens, 3).dtype == torch.int32
