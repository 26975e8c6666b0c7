"""The sweep over all classes of `transformers`: a few of them, and that it calls wrong what is wrong."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import sweep
from tests.pool import run_ranks
from tests.tiers import put_off

# Refused before: why.
ONCE_REFUSED = {
    "BertLMHeadModel": "its head's bias has two names, and its gradient counted twice",
    "CamembertForCausalLM": "positions behind the padding token, and a head that is made before the rest",
    "DiffLlamaForCausalLM": "parameters drawn on the CPU, whatever the device",
    "Emu3ForCausalLM": "a config that is a part of another model's",
    "Gemma3ForConditionalGeneration": "a tower for images with as many layers",
    "Gemma3nForCausalLM": "several streams of hidden states",
    "Gemma4ForConditionalGeneration": "a row of the embedding's weight, looked up directly",
    "Gemma4UnifiedForCausalLM": "inv_freq copied in _init_weights",
    "Gemma4UnifiedForConditionalGeneration": "a mask that looks at what kind of token each is",
    "GotOcr2ForConditionalGeneration": "a convolution that text never runs through",
    "JetMoeForCausalLM": "several rows per token, in the order of experts",
    "Llama4ForCausalLM": "a base model under another name than its class states",
    "MossTranscribeDiarizeForConditionalGeneration": "a tower for sound, and layers of another model",
    "LongcatFlashForCausalLM": "two attentions in a layer",
}
# The others in a campaign, as does the sweep over all classes.
OFTEN = {
    "BertLMHeadModel",
    "Emu3ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "JetMoeForCausalLM",
    "LongcatFlashForCausalLM",
}
WITHOUT_TUNING = {"Llama4ForCausalLM": {"attn_temperature_tuning": False}}  # it counts tokens of the row
# (class, what is switched) that crashed.
ONCE_CRASHED = [("BertLMHeadModel", {"tie_word_embeddings": False})]  # a bias that nothing depends on
# Under tp: experts shared by all tokens [N, D], and what scales them.
SHARED_EXPERTS = ("Qwen2MoeForCausalLM", "FlintForCausalLM", "HYV3ForCausalLM", "LagunaForCausalLM")


@pytest.mark.full
@pytest.mark.parametrize("model_class", [each if each in OFTEN else put_off(each) for each in ONCE_REFUSED])
def test_classes_that_were_refused_are_right(model_class: str) -> None:
    (found,) = run_ranks(1, sweep.on_rank, model_class, "single", WITHOUT_TUNING.get(model_class, {}))
    verdict = sweep.module("held_against").judged([found])
    assert verdict.kind == "right", verdict


@pytest.mark.full
@pytest.mark.parametrize(("model_class", "changed"), ONCE_CRASHED)
def test_switches_that_crashed_are_right(model_class: str, changed: dict[str, Any]) -> None:
    (found,) = run_ranks(1, sweep.on_rank, model_class, "single", changed)
    verdict = sweep.module("held_against").judged([found])
    assert verdict.kind == "right", verdict


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_class", "layout"),
    [
        pair if tp == at and at < 2 else put_off(*pair)
        for at, each in enumerate(SHARED_EXPERTS)
        for tp, pair in enumerate(((each, "tp2"), (each, "tp2+nosp")))
    ],
)
def test_shared_experts_and_their_gates_are_split(model_class: str, layout: str) -> None:
    verdict = sweep.module("held_against").judged(run_ranks(2, sweep.on_rank, model_class, layout))
    assert verdict.kind == "right", verdict


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_class", "layout"),
    [
        put_off("Gemma3ForConditionalGeneration", "tp2"),  # a tower that no token comes to
        put_off("MiMoV2FlashForCausalLM", "tp2"),  # layers with other numbers of heads
        ("RobertaForCausalLM", "tp2+nosp"),  # what changes hidden states for the head, and its bias of two names
        ("HunYuanMoEV1ForCausalLM", "tp2"),  # one expert, of whose weights FSDP leaves a rank no rows
        put_off("MllamaForCausalLM", "tp2"),  # its embedding has more rows than its head
        ("Llama4ForCausalLM", "pp2"),  # asks its embedding's weight for the device
    ],
)
def test_parameters_that_had_no_role_have_one(model_class: str, layout: str) -> None:
    verdict = sweep.module("held_against").judged(run_ranks(2, sweep.on_rank, model_class, layout))
    assert verdict.kind == "right", verdict


@pytest.mark.full
def test_an_embedding_whose_weight_is_read_outside_of_it_is_gathered_for_that() -> None:
    changed = {"tie_word_embeddings": False}
    verdict = sweep.module("held_against").judged(
        run_ranks(2, sweep.on_rank, "Gemma4ForConditionalGeneration", "shard2", changed)
    )
    assert verdict.kind == "right", verdict


@pytest.mark.full
@pytest.mark.parametrize(("plant", "kind"), [("", "right"), ("scale", "WRONG"), ("crash", "CRASH")])
def test_what_is_wrong_is_called_wrong(plant: str, kind: str) -> None:
    (found,) = run_ranks(1, sweep.on_rank, "LlamaForCausalLM", "single", {}, plant)
    verdict = sweep.module("held_against").judged([found])
    assert verdict.kind == kind and (plant != "crash" or "index 7" in verdict.reason), verdict


@pytest.mark.full
def test_a_case_that_hangs_is_a_crash() -> None:
    models = sweep.module("models")
    verdict = sweep.module("held_against").judged(models._asked(1, time.sleep, 60.0, timeout=0.5))
    assert verdict.kind == "CRASH" and "no answer" in verdict.reason


@pytest.mark.parametrize(
    ("reason", "is_unclear"),
    [
        ("OPTForCausalLM cannot be trained here: it asks for a position bias", False),
        ("it asks for a position bias", True),
        ("OPTForCausalLM cannot be trained here: 'NoneType' object is not subscriptable", True),
    ],
)
def test_a_refusal_names_the_model_and_speaks_of_it(reason: str, is_unclear: bool) -> None:
    assert sweep.module("models").is_unclear("OPTForCausalLM", reason) is is_unclear


def test_every_switch_is_turned_once_at_every_depth() -> None:
    values = {"a_bias": True, "use_cache": True, "sliding_window": None, "attn_config": {"qk_ln": False, "p_drop": 0.0}}
    found = dict(sweep.module("tiny_configs").switches(values))
    assert list(found) == ["a_bias: false", "sliding_window: 5", "attn_config.qk_ln: true", "attn_config.p_drop: 0.1"]
    assert found["attn_config.qk_ln: true"]["attn_config"] == {"qk_ln": True, "p_drop": 0.0}
    assert values["attn_config"]["qk_ln"] is False


def test_layers_of_every_kind_are_kept_and_lists_are_cut_with_them() -> None:
    kinds = ["dense", *["sparse"] * 9]
    values = {"num_hidden_layers": 10, "mlp_layer_types": kinds, "layer_types": ["s", "s", "s", "f", "s"] * 2}
    values |= {"moe_layers": [3, 8], "per_layer_config": {"3": {"head_dim": 7}}}
    cut = sweep.module("tiny_configs")._with_few_layers(values)
    assert cut["num_hidden_layers"] == 3 and cut["mlp_layer_types"] == ["dense", "sparse", "sparse"]
    assert cut["layer_types"] == ["s", "s", "f"] and cut["moe_layers"] == [2]
    assert cut["per_layer_config"] == {2: {"head_dim": 7}}


SMOKE = (
    "LlamaForCausalLM", "OPTForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "MixtralForCausalLM",
    "DeepseekV3ForCausalLM", "NanoChatForCausalLM", "FalconForCausalLM", "BloomForCausalLM", "MambaForCausalLM",
)  # fmt: skip


@pytest.mark.campaign
def test_the_sweep_over_ten_classes(tmp_path: Path) -> None:
    """Right or refused in words; begun again, it does nothing twice."""
    command = [sys.executable, f"{sweep.BENCHMARKS}/models.py", "--results", str(tmp_path / "models.json")]
    command += ["--classes", ",".join(SMOKE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    classes = json.loads((tmp_path / "models.json").read_text())["classes"]
    kinds = {name: row["layouts"]["single"]["kind"] for name, row in classes.items()}
    refused = {"FalconForCausalLM", "BloomForCausalLM", "MambaForCausalLM"}
    assert kinds == {name: "refused" if name in refused else "right" for name in SMOKE}
    assert "NOT IN WORDS" not in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "LlamaForCausalLM" not in again.stdout


def test_the_docs_have_the_place_for_the_tables() -> None:
    models = sweep.module("models")
    text = models.DOCS.read_text(encoding="utf-8")
    assert text.count(models.BEGIN) == text.count(models.END) == 1
