"""What a model would compute and we would not is refused before training, in words that name where it happens."""

import pytest
import torch
from transformers import (
    DbrxConfig,
    DogeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM3VLTextConfig,
    OPTConfig,
    PhimoeConfig,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama

from fivefold.core.errors import UserError
from fivefold.models.build import build_meta
from fivefold.models.discover import anatomy_of, trace
from fivefold.models.record import Untraceable
from tests.models import tiny

ROUTED = {"num_local_experts": 3, "num_experts_per_tok": 2}
OPT = {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 53, "num_attention_heads": 4, "vocab_size": 101}


def traced(config):
    model = build_meta(config)
    return trace(model, anatomy_of(model))


def mlp_that(change, monkeypatch):
    """A Llama whose feed-forward layers do something else as well."""
    plain = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: change(self, plain(self, x)))
    return LlamaConfig(**tiny.SIZES)


def noisy(mlp, x):
    return x * torch.empty_like(x).normal_(1.0, 0.1) if mlp.training else x


def counting(mlp, x):
    return x * torch.arange(x.shape[1])[:, None]


class Prompted(LlamaForCausalLM):
    """A learnt vector is added to what its base embeds."""

    def __init__(self, config):
        super().__init__(config)
        self.prompt = torch.nn.Parameter(torch.randn(config.hidden_size))

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids) + self.prompt
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)


class Striding(LlamaForCausalLM):
    """Its tokens stand apart."""

    def forward(self, position_ids=None, **kwargs):
        if position_ids is not None:
            kwargs["position_ids"] = 2 * position_ids
        return super().forward(**kwargs)


class Copying(LlamaForCausalLM):
    """Its own tokens are likelier."""

    def forward(self, input_ids=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        if input_ids is not None:
            out.logits = out.logits + torch.nn.functional.one_hot(input_ids, self.config.vocab_size)
        return out


class Shifting(LlamaForCausalLM):
    """A token's logits are also of the hidden state before it."""

    def forward(self, input_ids=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden + hidden.roll(1, dims=1)))


class Scaling(LlamaForCausalLM):
    """Of each token alone: trained as it is."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(config.vocab_size))
        self.other_head = torch.nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden) * self.scale + self.other_head(hidden.tanh()))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Prompted, "gives model embeddings that it has made, and no tokens"),
        (Striding, "gives model other positions than it is given"),
        (Copying, "looks at the tokens again to make logits"),
        (Shifting, "lets tokens meet between the last hidden states and the logits"),
    ],
)
def test_what_a_forward_does_around_its_base_is_refused(kind, said):
    """Training would leave it out, or do it to some of the tokens at a time."""
    model = build_meta(LlamaConfig(**tiny.SIZES), model_class=kind)
    with pytest.raises(Untraceable, match=said):
        trace(model, anatomy_of(model))


def test_a_forward_that_makes_logits_of_each_hidden_state_is_not_refused():
    model = build_meta(LlamaConfig(**tiny.SIZES), model_class=Scaling)
    assert "other_head" in trace(model, anatomy_of(model)).to_logits


def failing(mlp, x):
    return {}["no such key"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (noisy, "model.layers.0.mlp computes with random numbers in training"),
        (counting, "model.layers.0.mlp counts the tokens of a row"),
        (failing, r"model.layers.0.mlp computes in a way that cannot be followed without weights \(KeyError"),
    ],
)
def test_what_a_module_does_is_refused_by_its_name(change, said, monkeypatch):
    config = mlp_that(change, monkeypatch)
    with pytest.raises(Untraceable, match=said):
        traced(config)


def sparse_minimax():
    return MiniMaxM3VLTextConfig(
        **tiny.SIZES, **ROUTED, head_dim=8, rotary_dim=4, dense_intermediate_size=48, shared_intermediate_size=17,
        index_n_heads=2, index_head_dim=8, index_block_size=2, index_topk_blocks=1,
        layer_types=["full_attention", "minimax_m3_sparse", "full_attention"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (sparse_minimax(), "MiniMaxM3VLAttention passes its attention block_indices"),
        (DogeConfig(**tiny.SIZES, hidden_dropout=0.0), "look into the attention mask"),
        (OPTConfig(**OPT, dropout=0.0, is_decoder=False), None),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_classes_that_compute_something_else_are_refused(config, said):
    if said is None:
        assert len(traced(config).blocks) == 2
        return
    with pytest.raises(Untraceable, match=said):
        traced(config)


def test_random_numbers_without_an_effect_are_let_through():
    """PhiMoE draws experts at random among those that its jitter leaves; without jitter one is left. OPT draws for each
    layer whether to drop it, at a rate of 0."""
    assert len(traced(PhimoeConfig(**tiny.SIZES, num_local_experts=3, router_jitter_noise=0.0)).blocks) == 3
    with pytest.raises(Untraceable, match="computes with random numbers in training"):
        traced(PhimoeConfig(**tiny.SIZES, num_local_experts=3))
    assert len(traced(OPTConfig(**OPT, dropout=0.0)).blocks) == 2


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (OPTConfig(**OPT, dropout=0.0, layerdrop=0.2), "layerdrop"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_dropped_layers_are_refused(config, key):
    with pytest.raises(UserError, match=f"{key} 0") as error:
        build_meta(config)
    assert f"model.overrides.{key}: 0" in error.value.fix and "ForCausalLM has" in error.value.what


def test_a_config_of_which_transformers_makes_no_model_is_said_to_be_one():
    with pytest.raises(UserError, match="no DbrxForCausalLM can be built from its config") as error:
        build_meta(DbrxConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=101))
    assert "rope_theta" in error.value.what
