"""The built-in shapes: as many parameters as published, and facts that come without a trace and equal one."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from fivefold.core.shapes import shape_folder, shape_names
from fivefold.models import config_facts, discover, facts_store
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.config_facts import facts_of_config
from fivefold.models.facts_store import SHIPPED, ship_facts, shipped_facts
from tests.tiers import put_off

# Parameters, a tied head once. Those of a model card or paper, in full; the GPTs are GPT-3's and Megatron-LM's (arXiv
# 2205.05198) without learnt positions: 174.6B and 22B with them.
PARAMETERS = {
    "demo": 2_016_960,
    "deepseek-v3": 671_026_404_352,  # and 14,848 numbers of correction biases
    "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "gpt-22b": 22_061_690_880, "gpt-175b": 174_579_093_504,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552, "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112,
    "nemotron-4-340b": 341_029_195_776,
    "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
}  # fmt: skip
ACTIVE = {"qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9, "deepseek-v3": 37e9, "mixtral-8x7b": 12.9e9}
OFTEN = ("demo", "gemma-2-9b", "qwen3-30b-a3b")  # traced in every run: one kind of layer, two that alternate, experts


@pytest.mark.parametrize("name", shape_names())
def test_facts_of_a_shape_come_without_a_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_meta(load_model_config(name))
    assert sum(each.numel() for each in model.parameters()) == PARAMETERS[name]
    if (found := shipped_facts(_folder(name))) is None:
        pytest.skip("traced with other versions of torch or transformers")
    monkeypatch.setattr(config_facts, "kept", lambda *_: pytest.fail("not shipped"))
    assert facts_of_config(name) == found
    assert found.size == PARAMETERS[name]
    assert found.partition.refusal is None and found.partition.sequence_parallel_refusal is None
    assert found.anatomy == discover.anatomy_of(model)
    assert found.parameters == discover._parameters(model)
    active = sum(cost.active for cost in found.layer_costs) + sum(each.weights for each in found.outside)
    assert active == pytest.approx(ACTIVE.get(name, active), rel=0.1)  # published with the embedding


@pytest.mark.parametrize("name", [name if name in OFTEN else put_off(name) for name in shape_names()])
def test_a_trace_finds_what_is_shipped(name: str) -> None:
    """Where it does not: python benchmarks/shape_facts.py"""
    if (found := shipped_facts(_folder(name))) is None:
        pytest.skip("traced with other versions of torch or transformers")
    cut = discover.cut_of(build_meta(load_model_config(name)))
    assert cut is not None
    short, like = cut
    assert discover._found(short).with_layers(found.anatomy.layers, like) == found


def test_facts_of_another_config_or_version_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text((_folder("demo") / "config.json").read_text())
    model = build_meta(load_model_config("demo"))
    short, like = discover.cut_of(model) or pytest.fail("not cut")
    ship_facts(tmp_path, discover.facts_of(short), like)
    found = shipped_facts(tmp_path)
    assert found == discover.facts_of_deep(model)
    monkeypatch.setattr(facts_store, "version", lambda name: "9.9.9")
    assert shipped_facts(tmp_path) is None
    monkeypatch.undo()
    assert shipped_facts(tmp_path) == found
    text = (tmp_path / SHIPPED).read_text()
    for damaged in (text[:99], "{}", json.dumps(json.loads(text) | {"like": [0, 7]})):
        (tmp_path / SHIPPED).write_text(damaged)
        assert shipped_facts(tmp_path) is None
    (tmp_path / SHIPPED).write_text(text)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shipped_facts(tmp_path) is None


@pytest.mark.full
def test_a_deep_shape_is_known_at_once_and_without_torch() -> None:
    """In seconds of the CPU, Python's own start included. The facts of 126 layers take 0.1 of them."""
    script = (
        "import sys, time; from fivefold.models.config_facts import facts_of_config; facts_of_config('llama-3.1-405b');"
        "assert not {'torch', 'transformers'} & set(sys.modules); print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 1.0


def _closed_form(hidden: int, heads: tuple[int, int], head_size: int, inner: int) -> int:
    """Numbers of a token that a decoder layer of fused kernels keeps: both norms' inputs and outputs, queries, keys,
    values and the attention's output, gate and up, and their product. (Megatron's count, arXiv:2205.05198, for RMSNorm,
    GQA and SwiGLU without dropout.)"""
    query, kv = heads
    return 4 * hidden + 2 * query * head_size + 2 * kv * head_size + 3 * inner


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "mixtral-8x22b"])
def test_saved_activations_are_those_of_the_closed_form_and_of_plain_kernels(name: str) -> None:
    """The trace finds more, 22.6 against 17.0 times the hidden size in an 8B Llama, and every number of it is known.

    The model's plain modules keep silu(gate) besides gate, up and the product; what a norm scaled, before its weight,
    and one reciprocal root; cosines and sines. An expert keeps its own copy of a row that comes, and of its result;
    a router 15 numbers of 8 logits and 2 picks, of which each is as long as two.
    """
    if (found := shipped_facts(_folder(name))) is None:
        pytest.skip("traced with other versions of torch or transformers")
    (cost,), hidden = found.costs, found.hidden_size
    attention, down = cost.attention[0], next(each for each in cost.matmuls if "down_proj" in each.name)
    inner = down.inputs * down.times
    closed = _closed_form(hidden, (attention.query, attention.kv), attention.size, inner)
    plain = inner + 2 * (hidden + 1) + 2 * attention.size
    of_experts = 2 * down.times * hidden + 15 if found.experts else 0
    saved = sum(getattr(cost.saved, each.name) for each in fields(cost.saved))
    assert saved == closed + plain + of_experts


def test_shipped_facts_are_small() -> None:
    sizes = {name: (_folder(name) / SHIPPED).stat().st_size for name in shape_names()}
    assert {name: size for name, size in sizes.items() if size > 20_000} == {}


def _folder(name: str) -> Path:
    folder = shape_folder(name)
    assert folder is not None
    return folder
