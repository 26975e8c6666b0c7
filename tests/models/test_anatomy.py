"""The parts and roles of the models, a toy family in one file, and what is refused where nothing is known."""

from collections import Counter

from transformers import GPT2Config, LlamaConfig, MistralConfig

from fivefold.models import families
from fivefold.models.anatomy import Anatomy
from fivefold.models.build import build_meta
from tests.models import tiny

TOY = """
from fivefold.models.families import Family

FAMILY = Family(
    name="toy",
    model_classes=("MistralForCausalLM",),
    query=("q_proj",),
    key_value=("k_proj", "v_proj"),
    residual_norms=("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm"),
)
"""


def test_parts(make_config):
    anatomy = Anatomy.of(build_meta(make_config()))
    assert (anatomy.base, anatomy.embedding, anatomy.head) == ("model", "model.embed_tokens", "lm_head")
    assert anatomy.layers == tuple(f"model.layers.{i}" for i in range(3))
    assert anatomy.final_norm == "model.norm"
    assert anatomy.regions == tuple(f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn", "mlp"))
    assert anatomy.tp_refusal is None and anatomy.sequence_parallel_refusal is None
    assert anatomy.tied == make_config().tie_word_embeddings


def test_every_parameter_has_one_role(make_config):
    model = build_meta(make_config())
    roles = Anatomy.of(model).roles
    assert list(roles) == [name for name, _ in model.named_parameters()]
    assert all(role.reason for role in roles.values())


def test_roles_of_llama():
    roles = Anatomy.of(build_meta(tiny.llama())).roles
    assert Counter(role.kind for role in roles.values()) == {
        "vocab_embedding": 1, "vocab_head": 1, "column": 3 * 10, "row": 3 * 2, "row_bias": 3 * 2, "norm": 3 * 2 + 1,
    }  # fmt: skip
    layer = "model.layers.2"
    assert roles[f"{layer}.self_attn.q_proj.bias"].kind == "column"
    assert roles[f"{layer}.self_attn.q_proj.bias"].heads == "query"
    assert roles[f"{layer}.self_attn.v_proj.weight"].heads == "kv"
    assert roles[f"{layer}.self_attn.o_proj.bias"].kind == "row_bias"
    assert roles[f"{layer}.mlp.up_proj.weight"].heads is None


def test_roles_of_qwen3():
    roles = Anatomy.of(build_meta(tiny.qwen3())).roles
    assert "lm_head.weight" not in roles  # tied: once, under the embedding's name
    assert roles["model.layers.0.self_attn.q_norm.weight"].kind == "local"
    assert roles["model.layers.0.self_attn.k_norm.weight"].kind == "local"
    assert roles["model.layers.0.input_layernorm.weight"].kind == "norm"


def test_a_new_family_is_one_file(tmp_path, monkeypatch):
    model = build_meta(MistralConfig(**tiny.SIZES))
    before = Anatomy.of(model)
    assert before.family is None and "MistralForCausalLM" in before.tp_refusal
    assert "model.layers.*.input_layernorm.weight" in before.tp_refusal
    assert before.roles["model.layers.0.mlp.down_proj.weight"].kind == "row"  # what its plan says is known

    (tmp_path / "toy_family_of_a_test.py").write_text(TOY, encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    after = Anatomy.of(model)
    assert after.family == "toy" and after.tp_refusal is None
    assert after.roles["model.layers.0.self_attn.k_proj.weight"].heads == "kv"


def test_a_model_without_a_plan_says_why_tensor_parallel_is_refused():
    anatomy = Anatomy.of(build_meta(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64)))
    assert "GPT2LMHeadModel" in anatomy.tp_refusal and "transformer.h.*.attn.c_attn.weight" in anatomy.tp_refusal
    assert anatomy.layers == ("transformer.h.0", "transformer.h.1") and anatomy.final_norm == "transformer.ln_f"
    assert anatomy.sequence_parallel_refusal == anatomy.tp_refusal


def test_a_style_that_is_not_known_is_refused(monkeypatch):
    plan = {**LlamaConfig.base_model_tp_plan, "layers.*.mlp.up_proj": "packed_colwise"}
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", plan)
    anatomy = Anatomy.of(build_meta(tiny.llama()))
    assert "model.layers.*.mlp.up_proj.weight" in anatomy.tp_refusal
    assert "packed_colwise" in anatomy.roles["model.layers.0.mlp.up_proj.weight"].reason
