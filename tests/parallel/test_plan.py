"""The plan of a layout as a value: what it says of any rank of any world, from facts that JSON can hold."""

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from fivefold.core.errors import UserError
from fivefold.core.schedule import TYPICAL, Slot
from fivefold.models import discover, facts_store
from fivefold.models.build import build_meta
from fivefold.models.config_facts import facts_of_config
from fivefold.models.discover import cut_of, facts_of, facts_of_deep
from fivefold.models.facts import ModelFacts
from fivefold.models.facts_store import read_facts, write_facts
from fivefold.models.hf_internals import unmodified_model
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.apply import builders
from fivefold.parallel.census import census, own_part
from fivefold.parallel.collectives import summed
from fivefold.parallel.features import calls, edits
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.graphs.spec import Outside
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.pipeline.spec import PipelinePlan
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.step import FIRST, MOMENTS, UPDATE
from tests.parity import Case, hf_config, reference_model

GIB = 2**30


def facts(family: str = "llama", **overrides: Any) -> ModelFacts:
    return facts_of(build_meta(hf_config(Case("single", family, overrides=tuple(overrides.items())))))


# ---- facts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "deepseek_v3", "olmo2"])
def test_facts_are_text_and_back(family: str) -> None:
    found = facts(family)
    assert ModelFacts.from_json(found.to_json()) == found
    assert list(ModelFacts.from_json(found.to_json()).partition.roles) == list(found.parameters)


ALTERNATE = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "sliding")]


@pytest.mark.parametrize(
    ("family", "types", "like"),
    [
        *((family, None, [0] * 5) for family in ("llama", "phi3", "mixtral", "qwen3")),
        ("deepseek_v3", None, [0, 1, 1, 1, 1]),  # the first layer has no experts
        *((family, ALTERNATE, [0, 1, 0, 1, 0]) for family in ("gemma2", "gpt_oss")),
    ],
)
def test_facts_of_a_few_layers_make_those_of_the_deep_model(
    family: str, types: list[str] | None, like: list[int]
) -> None:
    """As all of its layers traced."""
    overrides = {"num_hidden_layers": 5} | ({"layer_types": types} if types else {})
    deep = build_meta(hf_config(Case("single", family, overrides=tuple(overrides.items()))))
    cut = cut_of(deep)
    assert cut is not None and cut[1] == like
    found = discover._found(deep)
    assert facts_of_deep(deep) == found
    made = facts_of(cut[0]).with_layers(found.anatomy.layers, like)
    assert made == found and [*made.parameters] == [*found.parameters]
    assert made.only(found.anatomy.layers[:2]) == facts_of(cut[0])


def test_what_lies_between_layers_is_not_repeated() -> None:
    found = facts()
    apart = (found.anatomy.layers[0], "model.rotary_emb", found.anatomy.layers[1])
    with pytest.raises(ValueError, match="belongs to one layer"):
        replace(found, before=apart).with_layers(found.anatomy.layers, [0, 1, 1])


def test_kept_facts_are_read_and_a_damaged_file_is_not(tmp_path: Path) -> None:
    file, found = tmp_path / "facts" / "key.json", facts()
    assert read_facts(file) is None
    write_facts(file, found)
    assert read_facts(file) == found
    text = file.read_text()
    changed = text.replace('"hidden_size": 32', '"hidden_size": 64')
    for damaged in (changed, text[: len(text) // 2], "", "{}\n{}", "\x00"):
        file.write_text(damaged)
        assert read_facts(file) is None


def test_a_second_start_does_not_trace_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    monkeypatch.setattr(discover, "_KNOWN", {})
    first = facts()
    monkeypatch.setattr(discover, "_KNOWN", {})
    monkeypatch.setattr(discover, "trace", lambda *_: pytest.fail("traced again"))
    assert facts() == first


def test_facts_depend_on_config_class_and_what_is_trained() -> None:
    model = build_meta(hf_config(Case("single")))
    keys = {discover._key(model), discover._key(build_meta(hf_config(Case("single", "qwen2"))))}
    model.model.embed_tokens.weight.requires_grad_(False)
    keys.add(discover._key(model))
    model.config.rope_parameters = dict(model.config.rope_parameters) | {"rope_theta": 5.0}
    keys.add(discover._key(model))
    drops = build_meta(hf_config(Case("single", "gpt2")))
    keys.add(discover._key(drops))
    drops.transformer.drop.p = 0.25  # which no config says
    keys.add(discover._key(drops))
    assert len(keys) == 6


def test_facts_depend_on_the_code_that_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of `models/`, or of `torch_internals.py`, that is another gives names under which nothing is kept."""
    home = Path(facts_store.__file__).parent
    shutil.copytree(home, tmp_path / home.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(home.parent / "torch_internals.py", tmp_path)
    monkeypatch.setattr(facts_store, "__file__", str(tmp_path / home.name / "facts_store.py"))
    monkeypatch.setattr(facts_store, "_code", facts_store._code.__wrapped__)
    names = [tuple(facts_store.about_code())]
    for file in (tmp_path / home.name / "partition.py", tmp_path / "torch_internals.py"):
        file.write_text(file.read_text() + "# another\n")
        names.append(tuple(facts_store.about_code()))
    assert len(set(names)) == 3


class Adapted(nn.Module):
    """A linear with a second path beside it, of few features."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain, self.down = plain, nn.Linear(plain.in_features, 4, bias=False)
        self.up = nn.Linear(4, plain.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) + self.up(self.down(x))


def _mixes(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """An MLP in which tokens meet."""
    return type(self).forward(self, x.cumsum(1))


def _adapt(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)


def _other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.Identity()


def _own_forward(model: Any) -> None:
    model.model.layers[0].mlp.forward = MethodType(_mixes, model.model.layers[0].mlp)


def _own_number(model: Any) -> None:
    model.model.layers[0].self_attn.is_causal = False


def _plain_model() -> Any:
    return unmodified_model(hf_config(Case("single")), torch.float32)


@pytest.mark.parametrize(("change", "named"), [(_adapt, "q_proj is a Adapted"), (_other_activation, "a Identity")])
def test_facts_are_of_the_model_at_hand(change: Any, named: str) -> None:
    """Not of what its class makes of its config: what was put into it is traced, and is not split."""
    model, expected = _plain_model(), facts()
    before = [each.clone() for each in model.buffers()]
    assert discover._found(model) == expected
    change(model)
    found = facts_of(model)
    assert found.parameters.keys() == dict(model.named_parameters()).keys() and found != expected
    assert all(map(torch.equal, before, model.buffers())) and not next(model.parameters()).is_meta
    lower(found, Layout.parse("shard2.cp2.pp2"), 0)
    with pytest.raises(UserError, match=named):
        lower(found, Layout.parse("tp2"), 0)


def _holds_a_lock(model: Any) -> None:
    _adapt(model)
    model.model.layers[0].self_attn.q_proj.lock = threading.Lock()


@pytest.mark.parametrize(
    ("change", "said"),
    [(_own_forward, "lets tokens meet"), (_own_number, "is not causal"), (_holds_a_lock, "cannot be copied")],
)
def test_a_model_is_refused_for_what_it_was_changed_to(change: Any, said: str) -> None:
    model = _plain_model()
    change(model)
    with pytest.raises(UserError, match=said):
        facts_of(model)


def test_a_resized_vocabulary_is_no_change() -> None:
    model = _plain_model()
    model.resize_token_embeddings(120)
    found = facts_of(model)
    assert found.vocabulary == 120 and found.partition.refusal is None


def test_code_of_others_is_traced_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that was patched has the name of the one that was not, and a base class may be in another file."""
    model = build_meta(hf_config(Case("single")))
    assert discover._key(model)
    with monkeypatch.context() as patched:
        patched.setattr(type(model.model.layers[0].mlp), "forward", _mixes)
        assert discover._key(model) is None
    _adapt(model)
    assert discover._key(model) is None


def test_a_config_with_keys_of_several_types_is_a_name_too() -> None:
    model = build_meta(hf_config(Case("single")))
    model.config.label_names = {1: "a", "b": 2}
    assert discover._key(model)


def test_facts_under_the_name_of_others_are_not_believed(tmp_path: Path) -> None:
    write_facts(tmp_path / "one.json", facts())
    (tmp_path / "one.json").rename(tmp_path / "two.json")
    assert read_facts(tmp_path / "two.json") is None


@pytest.mark.parametrize("family", ["llama", "olmo2", "phi3"])
def test_saved_activations_are_those_of_a_real_forward(family: str) -> None:
    """Numbers that a layer of the reference keeps, each tensor once; its attention keeps no scores."""
    case = Case("single", family)
    found = facts(family)
    model = reference_model(case, torch.float32).train()
    tokens, kept = 24, dict[int, int]()

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.numel() >= tokens and tokens in x.shape and not isinstance(x, nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    held = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: held.append(sum(kept.values())))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model.model(input_ids=torch.arange(tokens).unsqueeze(0), use_cache=False)
    measured = (held[1] - held[0]) / tokens
    expected = found.layer_costs[0].saved.on_rank(1, sequence_parallel=False)
    assert abs(expected - measured) <= 0.1 * measured, (expected, measured)


# ---- any rank of any world -------------------------------------------------------------------------------------------

SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}


def plans(layout: str, found: ModelFacts) -> list[ParallelPlan]:
    parsed = Layout.parse(layout)
    return [lower(found, parsed, rank) for rank in range(parsed.world)]


@pytest.mark.parametrize("layout", ["single", "dp2.shard2.tp2", "pp2.tp2+zb", "shard3.cp2.tp2", "tp8+nosp"])
def test_the_parts_of_all_ranks_are_the_model(layout: str) -> None:
    """Each number of every parameter is owned once, and plans of the ranks agree on who holds what."""
    found = facts(**SIZES)
    of_ranks = plans(layout, found)
    owned = 0
    for plan in of_ranks:
        for name in found.parameters:
            assert plan.placement.regions(name) == of_ranks[0].placement.regions(name, plan.placement.rank)
            owned += plan.placement.held_bytes(name, 1) if plan.placement.is_owner(name) else 0
    assert owned == found.size
    assert {plan.placement.data_rank for plan in of_ranks} == set(range(of_ranks[0].layout.data_ranks))
    firsts = sum(plan.placement.is_first_of_row for plan in of_ranks)
    assert firsts == of_ranks[0].layout.data_ranks


@pytest.mark.parametrize("layout", ["shard2.ep2", "pp2.tp2", "dp2.shard2.ep2"])
def test_a_routers_buffer_has_one_owner(layout: str) -> None:
    """Which alone saves it; every rank of a stage has it whole."""
    of_ranks = plans(layout, facts("deepseek_v3", num_key_value_heads=4))
    placements = [plan.placement for plan in of_ranks]
    assert placements[0].buffers
    for name in placements[0].buffers:
        assert sum(placement.is_owner(name) for placement in placements) == 1
    assert sum(placement.is_first_of_stage for placement in placements) == of_ranks[0].layout.pp


def test_what_is_frozen_beside_an_adapter_rests_as_it_computes() -> None:
    placement = lower(adapted(facts(), Lora(rank=3)), Layout.parse("shard2"), 0).placement
    resting = {name for name in placement.shards if placement.rests_as_computed(name)}
    assert resting == {name for name in placement.shards if "lora" not in name}
    assert {placement.rests_in(name, 4) for name in resting} == {2}
    assert {placement.rests_in(name, 4) for name in placement.shards.keys() - resting} == {4}


@pytest.mark.parametrize(("layout", "expected"), [
    ("pp2", [(True, False), (False, True)]), ("pp2+zbv", [(True, True), (False, False)]), ("single", [(True, True)]),
])  # fmt: skip
def test_the_ends_are_where_the_first_and_the_last_stage_are(layout: str, expected: list[tuple[bool, bool]]) -> None:
    assert [plan.placement.has_ends for plan in plans(layout, facts(**SIZES))] == expected


@pytest.mark.parametrize(("layout", "expected"), [
    ("pp2+zbv", [({0, 3}, {0, 3}), ({1, 2}, {1, 2})]), ("pp2", [({0}, {1}), ({2}, {3})]),
    ("pp2+interleaved+v2", [({0, 2}, {0, 2}), ({1, 3}, {1, 3})]),
])  # fmt: skip
def test_every_stage_has_a_first_layer_and_a_last(layout: str, expected: list[tuple[set[int], set[int]]]) -> None:
    found = facts(**SIZES)
    for plan, ends in zip(plans(layout, found), expected, strict=True):
        assert plan.placement.stage_ends == tuple({found.anatomy.layers[at] for at in end} for end in ends)


def test_what_one_rank_sends_another_receives() -> None:
    of_ranks = plans("pp4.cp4+ring", facts(**SIZES))
    sums: dict[tuple[str, str], int] = {}
    for plan in of_ranks:
        for each in summed(calls(plan, plan.step_shape(1, 64, 8))):
            sums[each.axis, each.kind] = sums.get((each.axis, each.kind), 0) + each.bytes
    assert sums["pp", "send"] == sums["pp", "recv"] > 0
    assert sums["cp", "send"] == sums["cp", "recv"] > 0


def test_bytes_of_a_step() -> None:
    """ZeRO-3 divides parameters, gradients and state; recompute leaves the input of each layer."""
    found = facts(**SIZES)
    whole, shards = (lower(found, Layout.parse(text), 0) for text in ("single+fp32", "shard4+fp32"))
    one = step_bytes(whole, whole.step_shape(1, 64, 1))
    part = step_bytes(shards, shards.step_shape(1, 64, 1))
    assert one.parameters == one.gradients == 4 * found.size and one.optimizer == 2 * one.parameters
    assert one.parameters / 4 <= part.parameters < one.parameters / 3
    every = lower(found, Layout.parse("shard4+fp32+zero1"), 0)
    kept_whole = step_bytes(every, every.step_shape(1, 64, 2))
    for moment, kinds in ((each, kept_whole.moments[each]) for each in MOMENTS if each not in (*FIRST, UPDATE)):
        assert part.moments[moment]["gathered parameters"] < kinds["gathered parameters"]
        assert part.moments[moment]["unreduced gradients"] < kinds["unreduced gradients"]
    full = lower(found, Layout.parse("single+fp32+full"), 0)
    kept = step_bytes(full, full.step_shape(1, 64, 1)).saved
    least = 64 * found.hidden_size * 4
    assert [*kept.values()] == [least] * 4
    assert sum(kept.values()) < sum(one.saved.values())
    half = lower(found, Layout.parse("tp2+fp32"), 0)
    assert sum(step_bytes(half, half.step_shape(1, 64, 1)).saved.values()) < sum(one.saved.values())


def test_a_stage_takes_as_long_as_its_layers_cost() -> None:
    plan = lower(facts(**SIZES), Layout.parse("pp2+split1-3"), 0)
    short, long = (plan.feature(PipelinePlan).slot_duration(Slot(stage, "F", 0)) for stage in (0, 1))
    assert long > 3 * short and (short + long) / 2 == pytest.approx(TYPICAL["F"])
    assert plan.feature(PipelinePlan).slot_duration(Slot(1, "B", 0)) == 2 * long


def test_refusals_say_what_fits() -> None:
    found = facts(**SIZES)
    for layout, said in (("tp3", "tp=3 does not fit"), ("pp8", "the model has 4 layers"), ("shard2.ep2", "no experts")):
        with pytest.raises(UserError, match=said):
            lower(found, Layout.parse(layout), 0)
    with pytest.raises(UserError, match="layer 1 is given more, and a stage is sent no more"):
        lower(replace(found, carried="layer 1 is given more"), Layout.parse("pp2"), 0)


@pytest.mark.parametrize("layout", ["tp2+selective", "tp2+nosp+selective", "tp2+keep1GiB"])
def test_recompute_that_saves_no_products_of_rows_is_refused_beside_an_adapter(layout: str) -> None:
    """With sequence parallelism or without, and for a budget, which may choose it."""
    with pytest.raises(UserError, match="keeps nothing that the gradient of an adapter needs"):
        lower(adapted(facts(), Lora(rank=3)), Layout.parse(layout), 0)


# ---- 405B on 16,384 ranks --------------------------------------------------------------------------------------------

LARGE = LlamaConfig(
    hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8,
    head_dim=128, vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)  # fmt: skip
ASK = """
import re, sys, time
from pathlib import Path
start = time.process_time()
from fivefold.doctor.model import examine_layout
from fivefold.parallel.features import calls, edits
from fivefold.parallel.memory import step_bytes
report = examine_layout({folder!r}, layout={layout!r}, rank={rank})
took = time.process_time() - start  # and memory: of this program alone, where `ru_maxrss` starts with its parent's
kib = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
assert report.rows and "torch" not in sys.modules
print(took, kib)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its config, beside a cache that has its facts."""
    folder = tmp_path_factory.mktemp("large")
    LARGE.save_pretrained(folder / "model")
    with patch.dict(os.environ, {"FIVEFOLD_CACHE": str(folder / "cache")}):
        facts_of_config(folder / "model")
    return folder


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads memory in /proc")
@pytest.mark.parametrize("layout", ["dp8.shard16.cp8.tp8.pp2+full", "shard128.tp8.pp16+interleaved+v7"])
def test_a_rank_of_16384_is_planned_in_two_seconds_and_a_gibibyte(layout: str, large: Path) -> None:
    """In seconds of the CPU, and without torch, once its facts are kept."""
    assert Layout.parse(layout).world == 16384
    ask = [sys.executable, "-c", ASK.format(folder=str(large / "model"), layout=layout, rank=9876)]
    env = os.environ | {"FIVEFOLD_CACHE": str(large / "cache")}
    done = subprocess.run(ask, env=env, check=True, capture_output=True, text=True)
    seconds, kib = map(float, done.stdout.split())
    assert seconds < 2 and kib * 1024 < GIB


def test_the_plan_is_plain_data() -> None:
    """Calls have nothing that JSON does not; edits are values, of values."""
    plan = lower(facts("mixtral"), Layout.parse("shard2.tp2.ep2"), 3)
    for call in calls(plan, plan.step_shape(1, 64, 2)):
        assert json.loads(json.dumps(vars(call))) == vars(call)
    for edit in edits(plan):
        assert json.dumps(asdict(edit), default=sorted) and {edit: 1}


def test_the_last_row_of_a_recomputed_layer_of_several_graphs_runs_outside_of_them() -> None:
    for layout, outside in (
        ("cp2.tp2+full", True),
        ("cp2.tp2+selective", False),
        ("tp2+full", False),
        ("cp2+full", False),
    ):
        todo = edits(lower(facts(), Layout.parse(layout), 0, compiled=True))
        rows = [f"model.layers.{at}.mlp.down_proj" for at in range(3)] * outside
        assert [each.path for each in todo if isinstance(each, Outside)] == rows, layout


def test_every_edit_that_a_plan_may_list_has_one_builder() -> None:
    def below(kind: type[Edit]) -> set[type[Edit]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    of_features = {each for each in below(Edit) - {Edit} if each.__module__.startswith("fivefold.")}
    assert of_features == set(builders(MagicMock(model=torch.nn.Module())))


def test_what_computes_in_which_type_is_told_by_role() -> None:
    """DeepSeek-V3 with its first and last layer in bf16: every matmul is counted once, and only those that
    `parallelize` places multiply in fp8."""
    facts = facts_of_config("deepseek-v3")
    plan = lower(facts, Layout.parse("shard8.ep8+fp8_blockwise+hp1"), 0)
    found = {(each.what, each.dtype): each for each in census(plan)}
    assert set(found) == {
        ("linears", "fp8 blockwise"), ("experts", "fp8 blockwise"), ("latent projections", "bf16"), ("routers", "fp32"),
        ("first and last layers", "bf16"), ("head", "bf16"),
    }  # fmt: skip
    assert found["linears", "fp8 blockwise"].linears == len(plan.feature(Fp8Plan).linears)
    head = facts.parameters["lm_head.weight"].size
    assert sum(each.weights for each in found.values()) == head + sum(cost.active for cost in facts.layer_costs)
    assert 0.9 < own_part(plan) < 0.95
    assert own_part(lower(facts, Layout.parse("shard8.ep8"), 0)) == 0
