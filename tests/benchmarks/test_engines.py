"""Other trainers' published steps, priced from their layouts; and what the traits of a trainer mean."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from benchmarks.engines import (
    ENGINES,
    Engine,
    TrainerPrices,
    as_planned,
    dealt_until_full,
    estimate,
    evenly,
    fused_saved,
)
from transformers import GPTNeoXConfig, LlamaConfig

import fivefold
from benchmarks import planner_accuracy
from fivefold.core.errors import UserError
from fivefold.hardware.cluster import Cluster
from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of_deep
from fivefold.models.facts import ModelFacts
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Estimate, Workload
from fivefold.planner.price import PriceList


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
    prices = TrainerPrices(facts, Cluster.parse(cluster), engine=ENGINES[engine])
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
    ("torchtitan", "dp2.shard4"), ("nanotron", "dp2.shard4+zero1"), ("megatron", "shard8+zero1"),
])  # fmt: skip
def test_states_are_dealt_out_as_the_trainer_does(engine: str, laid: str) -> None:
    assert ENGINES[engine].laid(Layout.parse("dp2.shard4")) == Layout.parse(laid)


def test_a_pipeline_over_nodes_costs_nanotron_host_time_for_every_rank_of_tp() -> None:
    """Its floor for a layer and micro batch grew from 8.7 to 21.4 ms from tp2 to tp8 (Ultra-Scale playbook)."""
    facts = llama(16, 2048, 32, 32, 8192, 131072)

    def floor(layout: str, cluster: str) -> float:
        found = said(facts, cluster, layout, 4096, 64, "nanotron")
        host = sum(row.amount for row in found.rows if row.item in ("matmuls", "attention", "element-wise", "host"))
        return host / 64 / 10  # the busiest stage has 10 or 11 layers

    assert floor("tp8.pp2+nosp", "2x8xH100") > 2 * floor("tp2.pp2+nosp", "2x2xH100") > 0


def test_ranks_of_dp_shard_may_share_the_state_of_the_optimizer() -> None:
    assert replace(ENGINES["megatron"], over="dp_shard").laid(Layout.parse("dp8")) == Layout.parse("dp8+zero1")


def of_tp(engine: Engine) -> tuple[Counter[tuple[str, str]], int]:
    """Of a layer of Llama 70B, for a micro batch: tp's collectives by phase and kind, and the bytes that are kept."""
    prices = TrainerPrices(llama(*LLAMA_70B), Cluster.parse("8xH100"), engine=engine)
    found = prices.of(Layout.parse("tp8"), 4096).layers[0]
    calls = [each for each in found.calls if each.axis == "tp"]
    return Counter((each.phase, each.kind) for each in calls for _ in range(each.times)), found.kept


@pytest.mark.parametrize("name", ENGINES)
def test_a_gather_again_is_in_the_fitted_traits_and_no_call(name: str) -> None:
    sent, _ = of_tp(ENGINES[name])
    assert sent["forward", "all_gather"] == sent["backward", "reduce_scatter"] == 2
    assert sent["backward", "all_gather"] == 2


@pytest.mark.parametrize("name", [each.name for each in ENGINES.values() if each.gathers_again])
def test_who_gathers_again_keeps_a_part_of_what_enters_a_column(name: str) -> None:
    (_, kept), (_, more) = (of_tp(replace(ENGINES[name], gathers_again=again)) for again in (True, False))
    whole = 2 * 4096 * 8192 * 2  # two entries of all tokens in bf16
    assert 7 / 8 * whole <= more - kept <= whole


def test_a_trainer_has_neither_copies_nor_scales_of_this_runtime() -> None:
    facts, cluster, layout = llama(2, 64, 4, 4, 128, 512), Cluster.parse("2xH100"), Layout.parse("tp2+fp8")
    own, other = PriceList(facts, cluster), TrainerPrices(facts, cluster, engine=ENGINES["megatron"])
    assert own.plan(layout).in_copies and own.plan(layout).matmuls.is_used
    assert not other.plan(layout).in_copies and not other.plan(layout).matmuls.is_used


# ---- of a model's name -----------------------------------------------------------------------------------------------

ASKED = {"model": "llama-3.2-1b", "cluster": "8xH100", "workload": {"seq_length": 4096, "global_batch_size": 16}}


def test_a_layout_is_estimated_under_any_trainer() -> None:
    found = {
        name: planner_accuracy.estimate(**ASKED, layout={"dp_replicate": 8}, engine=name)
        for name in ("fivefold", *ENGINES)
    }
    assert len({each.step_seconds for each in found.values()}) == len(found)
    assert found["fivefold"] == fivefold.estimate(**ASKED, layout="dp8")
    assert found["megatron"].layout == Layout.parse("shard8+zero1")


@pytest.mark.parametrize(("engine", "layout", "why"), [
    ("x", "shard8", "engine 'x' is not known\nchoose one of fivefold, megatron, "),
    ("megatron", "shard8+keep12GiB", "megatron has no budget of recompute, such as 12GiB"),
    ("megatron", "tp3", "tp"),
])  # fmt: skip
def test_what_cannot_be_estimated_is_said(engine: str, layout: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        planner_accuracy.estimate(**ASKED, layout=layout, engine=engine)
