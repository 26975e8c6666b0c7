"""Roles derived from what feeds what: by hand for a few models, and what is refused."""

from collections import Counter

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma3nTextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    MptConfig,
    NanoChatConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2MoeConfig,
    Starcoder2Config,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from fivefold.core.errors import UserError
from fivefold.models.build import build_meta, without_dropout
from fivefold.models.discover import anatomy_of, facts_of, trace
from fivefold.models.forwards import check_rows
from fivefold.models.partition import FeatureGroup, Partition, by_features, derive, pairs_of
from fivefold.models.record import RESIDUAL, BlockTrace, MixesTokens, ModuleCall, Untraceable
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from tests.families import TINY
from tests.models import tiny
from tests.parity import Case, hf_config


def partition_of(model) -> Partition:
    anatomy = anatomy_of(model)
    return derive(model, anatomy, trace(model, anatomy))


def test_an_embedding_inside_of_a_layer_belongs_to_that_layer(monkeypatch):
    """Its stage is that of the layer, not the last one, and tp knows nothing of what it does there."""
    build, forward = LlamaMLP.__init__, LlamaMLP.forward

    def with_kind(self, config):
        build(self, config)
        self.kind = nn.Embedding(2, config.hidden_size)

    monkeypatch.setattr(LlamaMLP, "__init__", with_kind)
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) + self.kind(x[..., 0].long() * 0))
    facts = facts_of(build_meta(tiny.llama()))
    assert (facts.before, facts.after) == (("model.embed_tokens",), ("model.norm",))
    plan = lower(facts, Layout.parse("pp3"), 0)
    assert [plan.placement.pp_ranks[f"model.layers.{layer}.mlp.kind.weight"] for layer in range(3)] == [
        (0,),
        (1,),
        (2,),
    ]
    assert "without a role: model.layers.*.mlp.kind.weight" in facts.partition.refusal


def test_llama():
    model = build_meta(tiny.llama())
    found = partition_of(model)
    assert found.refusal is None and found.sequence_parallel_refusal is None and found.is_proved
    assert list(found.roles) == [name for name, _ in model.named_parameters()]
    assert Counter(role.kind for role in found.roles.values()) == {
        "vocab_embedding": 1, "vocab_head": 1, "column": 3 * 10, "row": 3 * 2, "row_bias": 3 * 2, "norm": 3 * 2 + 1,
    }  # fmt: skip
    assert found.heads == ((6, 2),)
    layer = "model.layers.2"
    assert found.roles[f"{layer}.self_attn.q_proj.bias"].groups == tuple(
        FeatureGroup(8 * head, 8 * head + 8, "query", head) for head in range(6)
    )
    assert found.roles[f"{layer}.self_attn.v_proj.weight"].groups == (
        FeatureGroup(0, 8, "kv", 0),
        FeatureGroup(8, 16, "kv", 1),
    )
    assert found.roles[f"{layer}.mlp.up_proj.weight"].groups == (FeatureGroup(0, 88, "even"),)
    assert found.roles[f"{layer}.mlp.up_proj.weight"].dim == 0 and found.roles[f"{layer}.mlp.down_proj.weight"].dim == 1
    assert "colwise" in found.roles[f"{layer}.self_attn.q_proj.weight"].reason
    owners = [tp_block.owner for tp_block in found.tp_blocks]
    assert owners == [f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn", "mlp")]


def test_norms_over_heads_are_local_and_tied_heads_have_one_role():
    found = partition_of(build_meta(tiny.qwen3()))
    assert "lm_head.weight" not in found.roles
    assert {found.roles[f"model.layers.0.self_attn.{name}_norm.weight"].kind for name in "qk"} == {"local"}
    assert found.roles["model.layers.0.input_layernorm.weight"].kind == "norm"


def test_norms_over_all_heads_need_all_features():
    found = partition_of(build_meta(Olmo2Config(**tiny.SIZES)))
    assert {found.roles[f"model.layers.0.self_attn.{name}_norm.weight"].kind for name in "qk"} == {"across"}
    assert found.roles["model.layers.0.post_attention_layernorm.weight"].kind == "norm"
    assert set(found.across) == {f"model.layers.{i}.self_attn.{name}_norm" for i in range(3) for name in "qk"}


def test_fused_projections_are_dealt_by_their_parts():
    found = partition_of(build_meta(Phi3Config(**tiny.SIZES)))
    fused = found.roles["model.layers.1.self_attn.qkv_proj.weight"].groups
    assert [(part.start, part.owner, part.index) for part in fused] == [
        *((8 * head, "query", head) for head in range(6)), (48, "kv", 0), (56, "kv", 1), (64, "kv", 0), (72, "kv", 1),
    ]  # fmt: skip
    gate_up = found.roles["model.layers.1.mlp.gate_up_proj.weight"]
    assert gate_up.groups == (FeatureGroup(0, 88, "even", 0), FeatureGroup(88, 176, "even", 1))


def test_a_projection_head_by_head():
    found = partition_of(build_meta(hf_config(Case("single", "gpt_neox"))))
    fused = found.roles["gpt_neox.layers.0.attention.query_key_value.weight"].groups
    assert [(part.stop - part.start, part.owner, part.index) for part in fused] == [
        (8, "query", 0), (16, "kv", 0), (8, "query", 1), (16, "kv", 1), (8, "query", 2), (16, "kv", 2),
        (8, "query", 3), (16, "kv", 3),
    ]  # fmt: skip


def test_latents_serve_all_heads():
    """Latent attention: four projections before attention, of which two are whole and two are dealt by heads."""
    found = partition_of(build_meta(hf_config(Case("single", "deepseek_v3", overrides=(("attention_bias", True),)))))
    attention = "model.layers.1.self_attn"
    roles = {name.removeprefix(f"{attention}."): role for name, role in found.roles.items() if attention in name}
    assert {name: role.kind for name, role in roles.items()} == {
        "q_a_proj.weight": "latent", "q_a_proj.bias": "latent", "q_a_layernorm.weight": "latent",
        "q_b_proj.weight": "column", "kv_a_proj_with_mqa.weight": "latent", "kv_a_proj_with_mqa.bias": "latent",
        "kv_a_layernorm.weight": "latent", "kv_b_proj.weight": "column", "o_proj.weight": "row",
        "o_proj.bias": "row_bias",
    }  # fmt: skip
    assert all(role.dim is None and role.groups is None for role in roles.values() if role.kind == "latent")
    assert roles["q_b_proj.weight"].groups == tuple(FeatureGroup(10 * h, 10 * h + 10, "query", h) for h in range(4))
    assert roles["kv_b_proj.weight"].groups == tuple(FeatureGroup(13 * h, 13 * h + 13, "kv", h) for h in range(4))
    assert roles["o_proj.weight"].groups == tuple(FeatureGroup(7 * h, 7 * h + 7, "query", h) for h in range(4))
    tp_block = next(tp_block for tp_block in found.tp_blocks if tp_block.owner == attention)
    assert tp_block.columns == (f"{attention}.q_b_proj", f"{attention}.kv_b_proj")
    assert [entry.modules for entry in tp_block.entries] == [(attention,)]
    assert found.heads == ((4, 4),) and found.refusal is None


def test_a_projection_behind_a_latent_is_no_row_though_it_is_as_wide_as_the_residual():
    """Query heads of 8 of a hidden size of 32: only what its features go to tells it from a row."""
    sizes = (("qk_nope_head_dim", 4), ("qk_rope_head_dim", 4))
    found = partition_of(build_meta(hf_config(Case("single", "deepseek_v3", overrides=sizes))))
    assert found.roles["model.layers.0.self_attn.q_b_proj.weight"].kind == "column"
    assert found.tp_blocks[0].row == "model.layers.0.self_attn.o_proj"


def test_without_a_latent_for_queries_their_projection_is_a_column():
    found = partition_of(build_meta(hf_config(Case("single", "deepseek_v3", overrides=(("q_lora_rank", None),)))))
    kinds = {name.rpartition("self_attn.")[2]: role.kind for name, role in found.roles.items() if "layers.2.se" in name}
    assert kinds == {
        "q_proj.weight": "column", "kv_a_proj_with_mqa.weight": "latent", "kv_a_layernorm.weight": "latent",
        "kv_b_proj.weight": "column", "o_proj.weight": "row",
    }  # fmt: skip


def test_latents_beside_other_projections_in_a_layer_are_entered_themselves(monkeypatch):
    """Where a layer holds its projections itself, what reads the residual is given the gathered tokens."""
    found = partition_of(inlined(monkeypatch))
    assert found.refusal is None
    attention = found.tp_blocks[0]
    assert attention.owner == "model.layers.0" and [entry.modules for entry in attention.entries] == [
        ("model.layers.0.q_a_proj", "model.layers.0.kv_a_proj_with_mqa"),
    ]


def inlined(monkeypatch):
    """DeepSeek-V3 with the modules of attention as its layers' own."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    plain_init, plain_forward = deepseek.DeepseekV3DecoderLayer.__init__, deepseek.DeepseekV3DecoderLayer.forward

    def init(self, config, layer_idx):
        plain_init(self, config, layer_idx)
        own = self.self_attn
        self.numbers = {name: value for name, value in vars(own).items() if not name.startswith("_")}
        del self.self_attn
        for name, module in own.named_children():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        for name, value in self.numbers.items():
            setattr(self, name, value)
        vars(self)["self_attn"] = lambda **given: deepseek.DeepseekV3Attention.forward(self, **given)
        vars(self)["expand_kv"] = lambda *given: deepseek.DeepseekV3Attention.expand_kv(self, *given)
        return plain_forward(self, *args, **kwargs)

    monkeypatch.setattr(deepseek.DeepseekV3DecoderLayer, "__init__", init)
    monkeypatch.setattr(deepseek.DeepseekV3DecoderLayer, "forward", forward)
    return build_meta(hf_config(Case("single", "deepseek_v3")))


def test_weights_stored_the_other_way_round_and_learnt_positions():
    found = partition_of(build_meta(hf_config(Case("single", "gpt2"))))
    assert found.roles["transformer.h.0.attn.c_attn.weight"].dim == 1
    assert found.roles["transformer.h.0.attn.c_proj.weight"].dim == 0
    assert found.roles["transformer.wpe.weight"].kind == "norm" and found.refusal is None
    assert "transformer.wpe of GPT2LMHeadModel adds to the embeddings" in found.sequence_parallel_refusal


@pytest.mark.parametrize("family", TINY)
def test_every_family_is_proved_and_every_parameter_has_a_role(family):
    model = build_meta(hf_config(Case("single", family)))
    found = partition_of(model)
    assert found.refusal is None and found.is_proved
    assert all(role.reason and role.kind != "replicated" for role in found.roles.values())


# ---- what is refused -------------------------------------------------------------------------------------------------


def changed(monkeypatch, forward, model_class="LlamaMLP"):
    """Llama with another forward of its MLP."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(getattr(modeling_llama, model_class), "forward", forward)
    return build_meta(tiny.llama())


def test_features_that_meet_are_refused(monkeypatch):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).flip(-1) * self.up_proj(x))

    found = partition_of(changed(monkeypatch, forward))
    assert "do not follow from those of model.layers.0.mlp.gate_proj" in found.refusal


def test_a_projection_that_is_used_twice_is_refused(monkeypatch):
    def forward(self, x):
        return self.down_proj(self.up_proj(x)) + self.down_proj(self.gate_proj(x))

    assert partition_of(changed(monkeypatch, forward)).refusal


def test_heads_that_are_read_in_another_order_are_refused(monkeypatch):
    """A rank's columns of `o_proj` would be those of another rank's heads."""
    plain = LlamaAttention.forward

    def forward(self, *args, **kwargs):
        project = self.o_proj.forward
        with monkeypatch.context() as inside:
            inside.setattr(self.o_proj, "forward", lambda x: project(x.unflatten(-1, (6, 8)).flip(-2).flatten(-2)))
            return plain(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    refusal = partition_of(build_meta(tiny.llama())).refusal
    assert "does not read the heads of attention one after the other" in refusal


@pytest.mark.parametrize("where", ["before", "inside"])
def test_tokens_that_meet_outside_of_attention_are_refused(monkeypatch, where):
    def forward(self, x):
        if where == "before":
            x = x + x.roll(1, 1)
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden.cumsum(1) if where == "inside" else hidden)

    model = changed(monkeypatch, forward)
    with pytest.raises(MixesTokens, match=r"model\.layers\.0 lets tokens meet"):
        trace(model, anatomy_of(model))


def test_tokens_that_meet_in_a_module_of_few_parameters_are_refused(monkeypatch):
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(88, device="meta"))

        def forward(self, x):
            return x + x.roll(1, 1) * self.weight

    def forward(self, x):
        return self.down_proj(self.shift(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))

    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaMLP.__init__
    monkeypatch.setattr(
        modeling_llama.LlamaMLP,
        "__init__",
        lambda self, config: (plain(self, config), setattr(self, "shift", Shift()))[0],
    )
    model = changed(monkeypatch, forward)
    with pytest.raises(MixesTokens):
        trace(model, anatomy_of(model))


def test_attention_that_swallows_the_bounds_is_refused(monkeypatch):
    """The layer forgets them, as Nemotron's does, and so does the attention that they are handed to."""
    from transformers.models.nemotron import modeling_nemotron

    plain = modeling_nemotron.NemotronAttention.forward

    def forward(self, *args, cu_seqlens=None, **kwargs):
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(modeling_nemotron.NemotronAttention, "forward", forward)
    model = build_meta(hf_config(Case("single", "nemotron")))
    with pytest.raises(Untraceable, match="is not given the bounds"):
        trace(model, anatomy_of(model))


@pytest.mark.parametrize("heads", [(5, 5), (10, 5), (14, 7), (15, 5)])
def test_any_number_of_heads_is_traced(heads):
    query, kv = heads
    sizes = {"num_attention_heads": query, "num_key_value_heads": kv, "hidden_size": 4 * query, "head_dim": 4}
    found = partition_of(build_meta(tiny.llama(**sizes)))
    assert found.refusal is None and found.heads == (heads,)


def test_numbers_per_head_are_refused():
    model = build_meta(CohereConfig(**tiny.SIZES, use_qk_norm=True))
    assert "model.layers.*.self_attn.q_norm.weight" in partition_of(model).refusal


@pytest.mark.parametrize(
    "config",
    [
        Starcoder2Config(**tiny.SIZES, residual_dropout=0.1, embedding_dropout=0.0),
        OPTConfig(hidden_size=32, num_hidden_layers=2, ffn_dim=53, num_attention_heads=4, vocab_size=101, dropout=0.1),
        LlamaConfig(**tiny.SIZES, attention_dropout=1),
    ],
    ids=lambda config: config.model_type,
)
def test_dropout_of_every_kind_is_found(config):
    found = facts_of(build_meta(config)).dropouts
    layers = [site.kind for site in found if ".layers.1." in f"{site.module}."]
    assert (
        layers == {"starcoder2": ["call", "call"], "opt": ["call", "call"], "llama": ["attention"]}[config.model_type]
    )
    assert len({site.name for site in found}) == len(found)
    assert not facts_of(build_meta(without_dropout(config))).dropouts  # a model that is not trained draws none


def test_dropped_layers_are_refused():
    with pytest.raises(UserError, match="which is not built") as error:
        build_meta(OPTConfig(layerdrop=0.1))
    assert "model.overrides." in str(error.value.fix)


PHIMOE = {**tiny.SIZES, "num_local_experts": 3, "router_jitter_noise": 0.0}


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        (MixtralConfig(**tiny.SIZES, router_jitter_noise=0.1), ["mlp"]),
        (PhimoeConfig(**PHIMOE, input_jitter_noise=0.1), ["mlp", "mlp.router"]),
        (PhimoeConfig(**PHIMOE), []),  # its router draws one number a token, without an effect
    ],
    ids=["mixtral", "phimoe", "phimoe without"],
)  # fmt: skip
def test_jitter_of_hidden_states_is_found(config, modules):
    found = facts_of(build_meta(config)).dropouts
    assert [site.module for site in found[: len(modules)]] == [f"model.layers.0.{name}" for name in modules]
    assert len(found) == len(modules) * config.num_hidden_layers
    assert all((site.kind, site.features) == ("noise", config.hidden_size) for site in found)
    assert all(site.p == pytest.approx(0.1) for site in found)
    assert not facts_of(build_meta(without_dropout(config))).dropouts


def test_dropout_inside_a_part_of_a_config_is_set_to_0():
    config = without_dropout(MptConfig(attn_config={"attn_pdrop": 1}, emb_pdrop=0.1))
    assert (config.attn_config.attn_pdrop, config.emb_pdrop) == (0, 0)


def test_a_plan_that_says_otherwise_is_refused(monkeypatch):
    plan = {**LlamaConfig.base_model_tp_plan, "layers.*.mlp.up_proj": "rowwise"}
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", plan)
    refusal = partition_of(build_meta(tiny.llama())).refusal
    assert "model.layers.*.mlp.up_proj is rowwise, and its forward uses it as a column" in refusal


def test_a_parameter_that_does_nothing_is_refused():
    model = build_meta(tiny.llama())
    model.model.layers[0].mlp.register_parameter("unused", nn.Parameter(torch.empty(3, device="meta")))
    assert "model.layers.*.mlp.unused" in partition_of(model).refusal


def test_layers_that_do_not_hand_the_bounds_on_are_known():
    model = build_meta(hf_config(Case("single", "nemotron")))
    assert trace(model, anatomy_of(model)).forgetful == [
        (f"model.layers.{i}", f"model.layers.{i}.self_attn") for i in range(3)
    ]


def test_a_forward_that_fails_says_how(monkeypatch):
    def forward(self, x):
        raise ValueError("not today")

    model = changed(monkeypatch, forward)
    with pytest.raises(Untraceable, match="ValueError: not today"):
        trace(model, anatomy_of(model))


def test_models_that_attend_by_code_of_their_own_are_refused():
    """Packed documents would see each other, and with the masks of our attention every token its future."""
    model = build_meta(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=101, bos_token_id=None))
    with pytest.raises(Untraceable):
        trace(model, anatomy_of(model))
    with pytest.raises(UserError, match="attends by code of its own"):
        build_meta(FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=101))


@pytest.mark.parametrize(
    "config",
    [OPTConfig(dropout=0.0, num_hidden_layers=3), NanoChatConfig(num_hidden_layers=3)],
    ids=["OPT-125m", "NanoChat"],
)
def test_relu_models_are_derived_at_full_width(config):
    """Without memory for a weight."""
    assert partition_of(build_meta(config)).refusal is None


@pytest.mark.parametrize(
    ("sources", "said"),
    [(("RESIDUAL", "mixer"), "extra reads .*mixer"), ((), "extra reads nothing")],
    ids=["the residual and more", "nothing"],
)
def test_a_projection_is_no_column_unless_it_reads_the_residual_alone(sources, said):
    """One that reads something else beside it would be split, and what else it reads would not be."""
    sources = frozenset(RESIDUAL if each == "RESIDUAL" else each for each in sources)
    hidden, wide = torch.zeros(1, 3, 4), torch.zeros(1, 3, 6)
    events = [
        ModuleCall("linear", "up", (hidden,), wide, frozenset([RESIDUAL])),
        ModuleCall("linear", "down", (wide,), hidden, frozenset(["up"])),
        ModuleCall("linear", "extra", (hidden,), wide, sources),
        ModuleCall("linear", "back", (wide,), hidden, frozenset(["extra"])),
    ]
    with pytest.raises(Untraceable, match=said):
        pairs_of(BlockTrace("layer", {RESIDUAL: hidden}, events))
    pairs = pairs_of(BlockTrace("layer", {RESIDUAL: hidden}, events[:2]))
    assert [(pair.row, pair.columns) for pair in pairs] == [("down", ("up",))]


def test_features_that_a_relu_shuts_are_no_reason_to_refuse():
    """Of a few features some are zero for all of a few tokens: their neighbours are looked at."""
    values = torch.rand(1, 5, 12) + 0.1
    values[..., [0, 1, 6, 11]] *= -1
    leaf = values.requires_grad_()
    block = BlockTrace(
        "layer", {"up": leaf}, [ModuleCall("linear", "down", (leaf.relu() * 2,), None, frozenset(["up"]))]
    )
    assert by_features(block, "down", ["up"]) == {
        "down": (FeatureGroup(0, 12, "even"),),
        "up": (FeatureGroup(0, 12, "even"),),
    }


def test_a_wide_router_says_nothing_about_tokens_that_meet():
    """Its probabilities once underflowed, and what is not a number depends on everything."""
    model = build_meta(MiniMaxM2Config(num_hidden_layers=1))
    assert partition_of(model).refusal is None


LLAMA4 = {
    "hidden_size": 32, "intermediate_size": 17, "intermediate_size_mlp": 53, "num_hidden_layers": 4, "vocab_size": 101,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 3, "moe_layers": [1, 3],
    "pad_token_id": 3, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def test_what_a_model_counts_in_a_row_holds_up_to_a_length():
    """Llama 4 scales queries by their place in the row, from `floor_scale` tokens on."""
    model = build_meta(Llama4TextConfig(**LLAMA4, floor_scale=3000))
    counted = trace(model, anatomy_of(model)).counted
    assert counted.name == "model.layers.3.self_attn" and 3000 * 7 // 8 <= counted.most <= 3000
    model = build_meta(Llama4TextConfig(**LLAMA4, floor_scale=2))
    with pytest.raises(Untraceable, match="counts the tokens of a row"):
        trace(model, anatomy_of(model))
    ids = torch.zeros(1, counted.most + 1, dtype=torch.long)
    check_rows(counted.name, counted.most, 1, model.model, (), {"input_ids": ids})  # each row a document
    check_rows(counted.name, counted.most, 1, model.model, (), {"input_ids": ids[:, 1:], "cu_seqlens": torch.zeros(3)})
    for parts, cu_seqlens in ((1, torch.zeros(3)), (2, None)):
        with pytest.raises(UserError, match=f"more than {counted.most} tokens"):
            check_rows(counted.name, counted.most, parts, model.model, (), {"input_ids": ids, "cu_seqlens": cu_seqlens})


def test_what_scales_shared_experts_is_whole_and_acts_on_the_residual():
    sizes = {"hidden_size": 32, "intermediate_size": 53, "moe_intermediate_size": 17, "num_hidden_layers": 2}
    config = Qwen2MoeConfig(
        **sizes, shared_expert_intermediate_size=19, num_attention_heads=4, num_key_value_heads=2, num_experts=6,
        vocab_size=101,
    )  # fmt: skip
    found = partition_of(build_meta(config))
    assert found.refusal is None
    layer = "model.layers.1.mlp"
    assert found.roles[f"{layer}.shared_expert_gate.weight"].kind == "norm"
    assert found.roles[f"{layer}.shared_expert.up_proj.weight"].kind == "column"
    assert found.roles[f"{layer}.gate.weight"].kind == "router"


def test_several_streams_are_not_split_over_tp_or_pp():
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = Gemma3nTextConfig(
        **sizes, intermediate_size=[53] * 3, vocab_size=101, hidden_size_per_layer_input=6, num_kv_shared_layers=0,
        vocab_size_per_layer_input=101, layer_types=["sliding_attention", "full_attention", "full_attention"],
        activation_sparsity_pattern=[0.0] * 3, laurel_rank=4,
    )  # fmt: skip
    model = build_meta(config)
    traced = trace(model, anatomy_of(model))
    assert traced.carried is not None
    assert "several streams" in derive(model, anatomy_of(model), traced).refusal
