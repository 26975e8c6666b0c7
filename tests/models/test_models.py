"""Our attention and our weights in the unmodified models of `transformers`."""

import pytest
import torch
from torch.nn import functional as F

from fivefold.core.errors import UserError
from fivefold.models.build import build_meta
from fivefold.models.recipe import buffer_values
from tests.models import tiny


@pytest.fixture
def softmax_in_fp64(monkeypatch):
    """Eager attention of `transformers` computes its softmax in fp32 whatever the model's type; not in these proofs."""
    monkeypatch.setattr(F, "softmax", lambda scores, dim, dtype=None: torch.softmax(scores, dim))


def test_logits_and_gradients_equal_eager_attention(make_config, softmax_in_fp64):
    ours, eager = (
        tiny.filled(make_config(), attention=name, dtype=torch.float64, biases=True) for name in ("fivefold", "eager")
    )
    ids = torch.randint(0, 101, (2, 37), generator=torch.Generator().manual_seed(0))
    logits = ours(input_ids=ids).logits
    expected = eager(input_ids=ids).logits
    assert logits.abs().max() > 0.1  # the comparison is of something
    assert (logits - expected).abs().max() <= 1e-10
    logits.square().sum().backward()
    expected.square().sum().backward()
    for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        scale = max(theirs.grad.abs().max().item(), 1e-6)
        assert (mine.grad - theirs.grad).abs().max() / scale <= 1e-10, name


def test_packed_documents_equal_documents_alone(make_config):
    """Also the leak test at the level of the model: what stands beside a document changes nothing in it."""
    model = tiny.filled(make_config(), dtype=torch.float64, biases=True)
    lengths = [11, 1, 7, 18, 19, 18]  # two rows of 37
    ids = torch.randint(0, 101, (74,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    packed = model(input_ids=ids.view(2, 37), position_ids=positions.view(2, 37), cu_seqlens=cu_seqlens).logits.view(
        74, -1
    )
    alone = torch.cat([model(input_ids=document[None]).logits[0] for document in ids.split(lengths)])
    assert (packed - alone).abs().max() <= 1e-10


def test_generation_through_transformers_with_a_cache(make_config, softmax_in_fp64):
    ours, eager = (
        tiny.filled(make_config(), attention=name, dtype=torch.float64, biases=True).eval()
        for name in ("fivefold", "eager")
    )
    ids = torch.tensor([[5, 17, 3, 99, 40]])
    settings = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "pad_token_id": 7}
    assert torch.equal(ours.generate(ids, **settings), eager.generate(ids, **settings))
    with pytest.raises(UserError, match="padded batch"):
        ours.generate(ids, attention_mask=torch.tensor([[0, 1, 1, 1, 1]]), **settings)
    with pytest.raises(UserError, match="static cache"):
        ours.generate(ids, cache_implementation="static", **settings)


@pytest.mark.parametrize("rope_type", ["default", "llama3", "linear", "yarn", "dynamic"])
def test_buffers_are_those_of_a_model_built_on_the_cpu(rope_type):
    rope = {**tiny.LLAMA3_ROPE, "rope_type": rope_type}
    if rope_type != "llama3":
        rope = {key: rope[key] for key in ("rope_type", "rope_theta", "factor")}
    config = tiny.llama(rope_parameters=rope)
    meta, real = build_meta(config), type(build_meta(config))(config)
    values = buffer_values(meta)
    assert values.keys() == dict(real.named_buffers()).keys()
    for name, buffer in real.named_buffers():
        assert values[name].dtype == buffer.dtype and torch.equal(values[name], buffer), name
    assert meta.model.rotary_emb.attention_scaling == real.model.rotary_emb.attention_scaling


def test_the_model_is_the_class_of_transformers_unchanged(make_config):
    config = make_config()
    meta, real = build_meta(config), type(build_meta(config))(config)
    modules = [(name, type(module)) for name, module in real.named_modules()]
    assert [(name, type(module)) for name, module in meta.named_modules()] == modules
    assert all(p.device.type == "meta" and p.dtype == torch.float32 for p in meta.parameters())
    assert meta.config.use_cache is config.use_cache
    assert (meta.lm_head.weight is meta.model.embed_tokens.weight) == config.tie_word_embeddings
