"""What a proof looks at, and what it leaves out."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fivefold.parallel.layout import Layout
from fivefold.verification.proof import Proof
from fivefold.verification.proof_case import ProofCase
from fivefold.verification.ranks import flips, left_to_chance, prepare, rounding
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.results import FACTOR, LayoutResult, relative_number
from tests.parallel.test_context_parity import ROBERTA
from tests.parity import VOCABULARY
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.verification.faults import Model
from tests.verification.mutation import SEED, make_subject, prove, save_on_rank


@pytest.mark.full
def test_a_module_that_runs_twice_in_a_pass_is_left_out(tmp_path: Path) -> None:
    """Gemma 3 asks for its rotary tables once for each kind of layer, in an order that differs between processes."""
    kinds = ["sliding_attention", "full_attention"]
    outcome = prove("step", Model("gemma3", changes=(("layer_types", kinds),)), "tp2", tmp_path, steps=1)
    assert not outcome.is_killed, outcome.row
    seen = {row.where for row in outcome.found.rows if row.what == "output"}
    assert "model.rotary_emb" not in seen
    assert {"model.layers.0.self_attn.q_norm", "model.layers.1.mlp.down_proj input", "model.norm"} < seen


@pytest.mark.full
def test_a_model_that_counts_from_its_padding_token_is_no_false_alarm(tmp_path: Path) -> None:
    """Its `generate` counts that token too, its forward does not; and it changes hidden states behind its base."""
    prompt = np.random.default_rng([SEED, 1_000_003]).integers(0, VOCABULARY, 5)
    more = {"pad_token_id": int(prompt[1]), "max_position_embeddings": 256}
    roberta = Model("none", tied=True, changes=tuple((ROBERTA | more).items()))
    outcome = prove("step", roberta, "shard2", tmp_path, steps=1)
    assert not outcome.is_killed, outcome.row
    assert outcome.found.not_told == ["tokens, continuations"] and "lm_head.dense" in outcome.found.not_shown


@pytest.mark.parametrize(
    ("found", "expected"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (math.inf, math.inf)]
)
def test_what_is_no_number_is_infinitely_wrong(found: float, expected: float) -> None:
    assert relative_number(found, expected) == math.inf and relative_number(3.0, 2.0) == 0.5


def test_an_update_may_be_off_by_the_rounding_of_weights() -> None:
    weight, update = torch.full((16,), 1.0), torch.full((16,), 1e-3)
    found = rounding({"weight/a": weight, "update/a": update, "weight/b": weight, "update/b": torch.zeros(16)})
    assert 5e-5 < found["update/a"] < 7e-5  # half of 1.2e-7 in 1e-3
    assert found["update/b"] < 100  # relative to a millionth of all updates, not to its own


def test_a_continuation_is_left_to_chance_from_the_first_tie_on() -> None:
    margins = torch.tensor([[9.0, 9.0, 0.09, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0, 9.0]])
    assert left_to_chance(margins, 0.01) == pytest.approx(3 / 10 / 10)
    assert left_to_chance(margins, 0.001) == 0.0


def test_an_update_may_be_a_sign_that_is_left_to_chance() -> None:
    """Of 16 gradients 4 are below their noise: these may go the other way, at every step."""
    gradient = torch.tensor([1e-6] * 4 + [1.0] * 12)
    tensors = {
        f"{kind}/{name}": torch.full((16,), size) for kind, size in (("update", 1e-3), ("last", 0.5)) for name in "ab"
    }
    tensors |= {"clipped/a": gradient, "clipped/b": gradient}
    found = flips(tensors, {"clipped/a": 1e-4, "clipped/b": 1e-9}, 5)
    assert FACTOR * found["update/a"] == pytest.approx(1.0)  # a quarter of it twice as large: half of its norm, twice
    assert FACTOR * found["last/a"] == pytest.approx(5 * 1e-3 / 0.5)
    assert found["update/b"] == found["last/b"] == 0.0


def in_bf16(place: str, layout: str) -> dict[str, object]:
    subject = ProofCase.load(Path(place) / "subject.json")
    return (
        Proof(subject, Layout.parse(layout), ReferenceTensors(Path(place) / "bf16.safetensors"), "cpu").run().to_json()
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("dpo", "fp8_delayed"),
        ("distill", "fp8"),
        put_off("dpo", "fp8"),
        put_off("dpo", "fp8_rowwise"),
        put_off("distill", "fp8_rowwise"),
        put_off("distill", "fp8_delayed"),
    ],
)
def test_an_objective_whose_scales_span_a_row_is_no_false_alarm(objective: str, words: str, tmp_path: Path) -> None:
    """One scale spans both answers of a row; and passes of an objective leave no history to the first step."""
    outcome = prove("step", Model("llama", objective=objective), f"single+{words}", tmp_path, steps=2)
    assert not outcome.is_killed, outcome.row or outcome.found.refused
    assert "gradient of the objective" in {row.what for row in outcome.found.rows}


@pytest.mark.full
def test_routers_compute_in_fp32_on_both_sides_of_a_proof_in_bf16(tmp_path: Path) -> None:
    place = make_subject(Model("mixtral"), tmp_path, steps=2)
    prepare(ProofCase.load(place / "subject.json"), Layout(), place / "bf16.safetensors", "cpu")
    types = ReferenceTensors(place / "bf16.safetensors").about["dtypes"]
    assert (types["model.layers.0.mlp.gate"], types["model.layers.0.mlp"]) == ("torch.float32", "torch.bfloat16")
    found = LayoutResult.of(run_ranks(2, in_bf16, str(place), "shard2.ep2")[0])
    assert not [row for row in found.rows if not row.ok]
    assert "types" in {row.what for row in found.rows}


@pytest.mark.full
def test_what_hands_on_the_embedding_is_looked_at_in_the_first_stage_only(tmp_path: Path) -> None:
    """GPT-2's dropout before the layers runs in every stage, and is given a stand-in's zeros in the later ones."""
    outcome = prove("step", Model("gpt2"), "pp2", tmp_path, steps=1)
    assert not outcome.is_killed, outcome.row or outcome.found.refused
    assert any(row.where == "transformer.drop" for row in outcome.found.rows)


DBRX = (
    ("model_type", "dbrx"), ("d_model", 32), ("n_heads", 4), ("n_layers", 2), ("max_seq_len", 64),
    ("attn_config", {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 0.5}),
    ("ffn_config", {"ffn_hidden_size": 17, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}}),
)  # fmt: skip
ERNIE = (
    ("model_type", "ernie4_5_moe"), ("moe_num_experts", 4), ("moe_k", 2), ("moe_intermediate_size", 17),
    ("moe_num_shared_experts", 1), ("moe_layer_start_index", 1),
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("changes", [DBRX, ERNIE], ids=["experts of two dimensions", "a parameter without a gradient"])
def test_experts_of_two_dimensions_and_parameters_without_a_gradient(changes: Any, tmp_path: Path) -> None:
    """DBRX keeps all experts of a layer in one matrix, which decays; ERNIE's correction bias is a parameter."""
    outcome = prove("step", Model("none", changes=changes), "shard2", tmp_path, steps=2)
    assert not outcome.is_killed, outcome.row or outcome.found.refused


@pytest.mark.full
@pytest.mark.parametrize(("layout", "optimizer"), [put_off("shard2", "muon"), ("shard2+8bit_states", "adamw")])
def test_a_bias_that_load_moves_is_saved_where_an_optimizer_keeps_its_own_states(
    layout: str, optimizer: str, tmp_path: Path
) -> None:
    """It is no parameter: the optimizer keeps nothing of it."""
    model = Model("deepseek_v3", optimizer=optimizer)
    place = make_subject(model, tmp_path, steps=1, like=Layout.parse(layout))
    run_ranks(2, save_on_rank, str(place), layout, None, str(tmp_path / "saved"))
    with safe_open(tmp_path / "saved" / "expected.safetensors", framework="pt") as saved:
        kept = {key for key in saved.keys() if key.endswith("e_score_correction_bias")}  # noqa: SIM118
    assert kept == {"weight/model.layers.1.mlp.gate.e_score_correction_bias"}
