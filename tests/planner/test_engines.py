"""Other trainers' published steps, priced from their layouts; and what the traits of a trainer mean."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from transformers import GPTNeoXConfig, LlamaConfig

from fivefold.hardware.cluster import Cluster
from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of_deep
from fivefold.models.facts import ModelFacts
from fivefold.parallel.layout import Layout
from fivefold.planner.compute import fused_saved
from fivefold.planner.engines import ENGINES, Engine, as_planned, dealt_until_full, evenly
from fivefold.planner.estimate import Estimate, Workload, estimate
from fivefold.planner.price import PriceList
from fivefold.planner.space import Space
from tests.planner import settings


@cache
def llama(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocabulary: int = 128256) -> ModelFacts:
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv,
        intermediate_size=ffn, vocab_size=vocabulary, tie_word_embeddings=False,
    )  # fmt: skip
    return facts_of_deep(build_meta(config))


@cache
def gpt(layers: int, hidden: int, heads: int) -> ModelFacts:
    """With weights as GPT-3 has them: an MLP of two matrices, and a tied head."""
    config = GPTNeoXConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden,
        vocab_size=51200, use_parallel_residual=False, tie_word_embeddings=True,
    )  # fmt: skip
    return facts_of_deep(build_meta(config))


def said(facts: ModelFacts, cluster: str, layout: str, length: int, batch: int, engine: str) -> Estimate:
    prices = PriceList(facts, Cluster.parse(cluster), ENGINES[engine])
    return estimate(prices, Layout.parse(layout), Workload(length, batch))


# Iterations of Megatron-LM in seconds, all with full recompute (Korthikanti et al., arXiv 2205.05198, table 5).
MEGATRON = (
    ((96, 12288, 96), "8x8xA100-80", "tp8.pp8+interleaved+v3+full+nosp", 64, 18.13),
    ((105, 20480, 128), "35x8xA100-80", "tp8.pp35+interleaved+v3+full+nosp", 280, 49.05),
    ((128, 25600, 160), "64x8xA100-80", "tp8.pp64+full+nosp", 512, 94.42),
)


@pytest.mark.parametrize(("shape", "cluster", "layout", "batch", "seconds"), MEGATRON, ids=["175B", "530B", "1T"])
def test_steps_of_megatron(
    shape: tuple[int, int, int], cluster: str, layout: str, batch: int, seconds: float
) -> None:  # fmt: skip
    found = said(gpt(*shape), cluster, layout, 2048, batch, "megatron")
    assert found.step_seconds == pytest.approx(seconds, rel=0.08)


LLAMA_70B, LLAMA_405B = (12, 8192, 64, 8, 28672), (4, 16384, 128, 8, 53248)  # cut to 12 and to 4 layers
# Allocated GiB and tokens/s of a device of Megatron-LM on 8 B200, as SimuMax v1.2 measured them (its
# docs/b200/b200_release_v1.2_summary). Its data parallelism deals out the optimizer's state alone.
SIMUMAX = (
    (LLAMA_70B, "dp4.pp2+nosp", 4096, 16, 66.55, 9717.7),
    (LLAMA_70B, "dp4.pp2+nosp", 4096, 128, 66.55, 12054.8),
    (LLAMA_70B, "cp8+nosp", 32768, 4, 104.51, 9266.4),
    (LLAMA_405B, "dp2.tp4", 4096, 16, 52.89, 9106.3),
    (LLAMA_405B, "dp2.tp4", 4096, 64, 52.89, 9483.1),
    (LLAMA_405B, "dp4.tp2", 4096, 16, 81.59, 9029.0),
    (LLAMA_405B, "tp8", 4096, 32, 38.57, 8615.0),
    (LLAMA_405B, "dp4.pp2+nosp", 4096, 128, 87.08, 9300.6),
)


@pytest.mark.parametrize(("shape", "layout", "length", "batch", "gib", "speed"), SIMUMAX)
def test_memory_and_speed_of_megatron_on_b200(
    shape: tuple[int, int, int, int, int], layout: str, length: int, batch: int, gib: float, speed: float
) -> None:  # fmt: skip
    found = said(llama(*shape), "1x8xB200", layout, length, batch, "megatron")
    assert found.memory_gib == pytest.approx(gib, rel=0.025)
    assert found.tokens_per_second_per_device == pytest.approx(speed, rel=0.10)


def test_nanotron_deals_layers_until_a_stage_has_its_part() -> None:
    facts = llama(16, 2048, 32, 32, 8192, 131072)  # a layer of 67 million, a head of 268
    assert dealt_until_full(facts, Layout(pp=2)) == ((0, 10), (10, 16))
    assert dealt_until_full(facts, Layout(pp=3)) == ((0, 7), (7, 14), (14, 16))
    assert dealt_until_full(facts, Layout(pp=4)) == ((0, 5), (5, 10), (10, 15), (15, 16))
    assert as_planned(facts, Layout(pp=2)) == ((0, 10), (10, 16))


def test_even_stages_give_what_is_left_to_the_first() -> None:
    assert evenly(llama(16, 2048, 32, 32, 8192, 131072), Layout(pp=3)) == ((0, 6), (6, 11), (11, 16))


def test_fused_kernels_save_the_closed_form_and_less_than_the_traced_layer() -> None:
    facts = llama(*LLAMA_70B)
    saved = fused_saved(facts.anatomy.layers[0], facts.layer_costs[0], facts.partition, facts.hidden_size)
    # Inputs of norms and of columns, 4 h; q and what attention gives, 2 h, k and v, h / 4; gate, up, product, 10.5 h.
    assert saved.on_rank(1, sequence_parallel=False) == 16.75 * 8192
    assert saved.on_rank(4, sequence_parallel=True) == (2 / 4 + 2 + 12.75 / 4) * 8192
    assert saved.inside < facts.layer_costs[0].saved.inside


@pytest.mark.parametrize(("engine", "laid"), [
    ("fivefold", "dp2.shard4"), ("torchtitan", "dp2.shard4"), ("nanotron", "dp2.shard4+zero1"),
    ("megatron", "shard8+zero1"),
])  # fmt: skip
def test_states_are_dealt_out_as_the_trainer_does(engine: str, laid: str) -> None:
    assert ENGINES[engine].laid(Layout.parse("dp2.shard4")) == Layout.parse(laid)


@pytest.mark.parametrize("engine", ["megatron", "nanotron", "torchtitan"])
def test_a_search_for_a_trainer_has_the_layouts_that_it_can_run(engine: str) -> None:
    prices = PriceList(settings.facts("llama", 8), Cluster.parse("1x8xA100-80"), ENGINES[engine])
    found = list(settings.layouts(Space(prices, Workload(2048, 64))))
    assert found and all(ENGINES[engine].laid(layout) == layout for layout in found)
    assert len(found) == len(set(found))
    if engine == "megatron":
        assert {layout.dp_replicate for layout in found} == {1}


def test_a_pipeline_over_nodes_costs_nanotron_host_time_for_every_rank_of_tp() -> None:
    """Its floor for a layer and micro batch grew from 8.7 to 21.4 ms from tp2 to tp8 (Ultra-Scale playbook)."""
    facts = llama(16, 2048, 32, 32, 8192, 131072)

    def floor(layout: str, cluster: str) -> float:
        found = said(facts, cluster, layout, 4096, 64, "nanotron")
        host = sum(row.amount for row in found.rows if row.item in ("matmuls", "attention", "element-wise", "host"))
        return host / 64 / 10  # the busiest stage has 10 or 11 layers

    assert floor("tp8.pp2+nosp", "2x8xH100") > 2 * floor("tp2.pp2+nosp", "2x2xH100") > 0


def test_an_unsaid_trainer_is_this_one() -> None:
    assert ENGINES["fivefold"].laid(Layout.parse("shard8.tp2")) == Layout.parse("shard8.tp2")
    assert replace(ENGINES["megatron"], over="dp_shard").laid(Layout.parse("dp8")) == Layout.parse("dp8+zero1")


def of_tp(engine: Engine, layout: str = "tp8") -> tuple[Counter[tuple[str, str]], int]:
    """Of a layer of Llama 70B, for a micro batch: tp's collectives by phase and kind, and the bytes that are kept."""
    found = PriceList(llama(*LLAMA_70B), Cluster.parse("8xH100"), engine).of(Layout.parse(layout), 4096).layers[0]
    calls = [each for each in found.calls if each.axis == "tp"]
    return Counter((each.phase, each.kind) for each in calls for _ in range(each.times)), found.kept


@pytest.mark.parametrize("name", ENGINES)
def test_compiled_layers_of_this_runtime_alone_send_a_gather_again(name: str) -> None:
    """What others do of it is in the traits that were fitted on them."""
    sent, _ = of_tp(ENGINES[name])
    assert sent["forward", "all_gather"] == sent["backward", "reduce_scatter"] == 2
    assert sent["backward", "all_gather"] == (4 if name == "fivefold" else 2)  # two of them leave a row


@pytest.mark.parametrize("name", [each.name for each in ENGINES.values() if each.gathers_again])
def test_who_gathers_again_keeps_a_part_of_what_enters_a_column(name: str) -> None:
    (_, kept), (_, more) = (of_tp(replace(ENGINES[name], gathers_again=again)) for again in (True, False))
    whole = 2 * 4096 * 8192 * 2  # two entries of all tokens in bf16
    assert 7 / 8 * whole <= more - kept <= whole


@pytest.mark.parametrize("layout", ["tp8+nosp", "tp8+full", "pp2.tp4+zb", "cp2.tp4", "tp8+fp8"])
def test_nothing_is_gathered_again_where_that_is_no_use(layout: str) -> None:
    """Without sequence parallelism, of layers that are computed again, and of those of several graphs."""
    engine = ENGINES["fivefold"]
    assert of_tp(engine, layout) == of_tp(replace(engine, gathers_again=False), layout)
