"""What a layer, the head and a step are priced at, by hand."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fivefold.core.units import GIB
from fivefold.hardware.cluster import Cluster
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Estimate, Item, PricedStep, Workload, estimate_layout
from fivefold.planner.parts import ITEMS, LayerPrice, Prices
from fivefold.planner.price import PriceList, work_layout
from fivefold.planner.rank_memory import BUFFERS, matmul_bytes, runtime_bytes
from fivefold.planner.sums import crowded

TOKENS = 4096


def priced(model: str, layout: str) -> Prices:
    """On tiles that are always full."""
    cluster = Cluster.parse("8xH100")
    chip = replace(cluster.chip, tile=(1, 1), tile_fill=0, memory_bandwidth_gbs=1e9, step_fraction=1.0)
    return PriceList(facts_of_config(model), replace(cluster, chip=chip)).of(Layout.parse(layout), TOKENS)


def times(price: LayerPrice, item: str) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    place = ITEMS.index(item)
    return float(price.forward[place]), float(price.backward[place])


def test_seconds_of_a_layer_of_llama() -> None:
    """Of 4,096 tokens: 2 FLOPs for each of 218,103,808 numbers in matrices; for each of 32 heads 4,096^2 scores of 128
    features twice, of which half are computed. Backward is 2 and 2.5 times that, and once more with recompute."""
    matmuls = 2 * 218_103_808 * TOKENS / (989.4e12 * 0.80)
    (layer,) = priced("llama-3.1-8b", "shard8").layers
    assert times(layer, "matmuls") == pytest.approx((matmuls, 2 * matmuls), rel=0.01)
    chip = Cluster.parse("8xH100").chip
    attention = 2 * 32 * TOKENS**2 * 128 / (989.4e12 * 0.80 * chip.attention_fraction)
    assert times(layer, "attention") == pytest.approx((attention, 2.5 * attention), rel=1e-6)
    (again,) = priced("llama-3.1-8b", "shard8+full").layers
    assert times(again, "attention") == pytest.approx((attention, 3.5 * attention), rel=1e-6)
    assert times(again, "matmuls") == pytest.approx((matmuls, 3 * matmuls), rel=0.01)


@pytest.mark.parametrize("layout", ["tp2.shard4", "cp2.shard4"])
def test_ranks_of_a_row_share_its_work(layout: str) -> None:
    """Half of the heads, or half of the tokens: half of the matmuls and of the attention."""
    (whole,), (half,) = priced("llama-3.1-8b", "shard8").layers, priced("llama-3.1-8b", layout).layers
    for item in ("matmuls", "attention"):
        assert times(half, item)[0] == pytest.approx(times(whole, item)[0] / 2, rel=0.01)


def test_a_token_goes_through_its_experts_alone() -> None:
    """Mixtral: attention has 41,943,040 numbers, the router 32,768, and an expert 176,160,768, of which a token has
    two."""
    (layer,) = priced("mixtral-8x7b", "shard8").layers
    matmuls = 2 * (41_943_040 + 32_768 + 2 * 176_160_768) * TOKENS / (989.4e12 * 0.80)
    assert times(layer, "matmuls")[0] == pytest.approx(matmuls, rel=0.01)


def test_the_head_has_a_backward_of_twice_its_forward() -> None:
    head = priced("llama-3.1-8b", "shard8").head
    forward = 2 * 128256 * 4096 * TOKENS / (989.4e12 * 0.80)
    assert times(head, "matmuls") == pytest.approx((forward, 2 * forward), rel=0.01)


def test_mfu_is_of_all_rows_on_all_devices() -> None:
    """6 FLOPs a token for each of 7,504,658,432 numbers in matrices, and for each layer and head 4,096 scores of 128
    features: 12 for each, halved. In one second on 8 devices of 989.4 TFLOP/s."""
    price_list = PriceList(facts_of_config("llama-3.1-8b"), Cluster.parse("8xH100"))
    found = estimate_layout(price_list, Layout.parse("shard8"), Workload(4096, 32))
    flops = 32 * 4096 * (6 * 7_504_658_432 + 32 * 32 * 4096 * 128 * 6)
    assert found.flops == pytest.approx(flops, rel=1e-3)
    second: Estimate = replace(found, rows=(Item("time", "matmuls", 1.0),))
    assert second.mfu == pytest.approx(flops / 8 / 989.4e12, rel=1e-3)


def test_the_optimizer_moves_34_bytes_of_each_number_that_a_rank_holds() -> None:
    """8,030,261,248 over 8, at 3,350 GB/s of which 90 % are reached."""
    price_list = PriceList(facts_of_config("llama-3.1-8b"), Cluster.parse("8xH100"))
    rows = {row.item: row.amount for row in estimate_layout(price_list, Layout.parse("shard8"), Workload(4096, 8)).rows}
    assert rows["optimizer"] == pytest.approx(34 * 8_030_261_248 / 8 / (3350e9 * 0.9), rel=1e-4)
    assert rows["parameters"] == rows["optimizer state"] / 2 == pytest.approx(4 * 8_030_261_248 / 8, rel=1e-4)


def test_frozen_weights_have_no_gradients_and_no_update() -> None:
    """A backward has the matmuls of a forward, those of the inputs' gradients. Adapters of rank 16 have 41,943,040
    numbers: 16 x 81,920 in each of 32 layers."""
    facts = adapted(facts_of_config("llama-3.1-8b"), Lora(rank=16))
    price_list, layout = PriceList(facts, Cluster.parse("8xH100")), Layout.parse("shard8")
    (layer,) = price_list.of(layout, TOKENS).layers
    forward, backward = times(layer, "matmuls")
    assert backward == pytest.approx(forward) and not layer.weights.any()
    rows = {row.item: row.amount for row in estimate_layout(price_list, layout, Workload(4096, 8)).rows}
    assert rows["optimizer"] == pytest.approx(34 * 41_943_040 / 8 / (3350e9 * 0.9), rel=1e-3)


def test_what_overlaps_is_hidden_for_as_long_as_what_it_overlaps_lasts() -> None:
    """On links that take far longer: the gathers of tp that backward makes hide behind its matmuls, the ring behind
    attention, where a send and a receive take the time of one."""
    cluster = Cluster.parse("8xH100")
    inside = replace(cluster.node.inside, gbs=1e-3)
    price_list = PriceList(facts_of_config("llama-3.1-8b"), replace(cluster, node=replace(cluster.node, inside=inside)))
    for text, item, beside, each in (("tp8", "tp", "matmuls", 1.0), ("cp8+ring", "cp", "attention", 0.5)):
        layout = Layout.parse(text)
        (layer,) = price_list.of(layout, TOKENS).layers
        calls = [call for call in layer.calls if call.axis.startswith(item) and call.phase == "backward"]
        took = [price_list.seconds(price_list.grid(layout).axes[call.axis], call) * call.times for call in calls]
        apart = sum(each * t if call.overlaps else t for t, call in zip(took, calls, strict=True))
        assert times(layer, item)[1] == pytest.approx(apart - times(layer, beside)[1], rel=1e-6), text


def test_what_lies_beside_tensors() -> None:
    """tp and dp_shard have communicators of their own, and the world has one. cuBLAS has 32 MiB on Hopper twice."""
    price_list = PriceList(facts_of_config("llama-3.1-8b"), Cluster.parse("8xH100"))
    chip = replace(price_list.cluster.chip, context_gib=1.0, communicator_gib=0.25)
    grid = price_list.grid(Layout.parse("shard4.tp2"))
    several = sum(axis.size > 1 for axis in grid.axes.values())
    assert several >= 2 and runtime_bytes(chip, grid) == (1.0 + 0.25 * (several + 1)) * GIB
    assert matmul_bytes(price_list.cluster) == 64 * 2**20
    assert matmul_bytes(Cluster.parse("8xA100-80")) == 2 * 8320 * 2**10


@pytest.mark.parametrize(
    ("layout", "layers"), [("shard2", 2), ("shard2+zero2", 1.5), ("shard2+zero1", 1.5), ("tp2", 0)]
)
def test_gloo_holds_copies_of_what_fsdp_sends(layout: str, layers: float) -> None:
    """A gather is copied once, beside the copy of the gradients that were reduced before it. ZeRO-1 and 2 gather
    nothing in backward: a layer's gradients are copied, and half of their sum is added up. On GPUs there are none."""
    facts, work = facts_of_config("llama-3.2-1b"), Workload(256, 8)
    numbers = facts.size - facts.only(facts.anatomy.layers[1:]).size
    price_list = PriceList(facts, Cluster.parse("2xcpu"))
    items = PricedStep(price_list, Layout.parse(f"{layout}+fp32"), work).fullest[1]
    assert items.get(BUFFERS, 0) == pytest.approx(4 * layers * numbers, rel=1e-3)
    gpus = PriceList(facts, Cluster.parse("2xH100"))
    assert BUFFERS not in PricedStep(gpus, Layout.parse(layout), work).fullest[1]


def test_processes_that_share_cores_take_as_long_as_all_their_work() -> None:
    """4 stages of 1 s forward and 2 s backward, 8 micro batches: 24 s for each of 4 devices. Two devices to a core can
    take no less, nor less than half of the span."""
    forward, backward = np.full(4, 1.0), np.full(4, 2.0)
    assert crowded(33.0, forward, backward, 8, 4, 1.0) == 33.0
    assert crowded(1e-3, forward, backward, 8, 4, 2.0) == pytest.approx(24.0)
    assert crowded(2e5, forward, backward, 8, 4, 2.0) == pytest.approx(1e5)


def test_matmuls_in_fp8_have_a_rate_of_their_own_and_numbers_that_are_cast_first() -> None:
    """Of one list, that has priced bf16 before: half of the seconds or so, and the casts of inputs, weights and, in
    backward, of the gradients of outputs; the head stays in bf16."""
    price_list = PriceList(facts_of_config("llama-3.1-8b"), Cluster.parse("8xH100"))
    usual, fast = (price_list.of(Layout.parse(text), TOKENS) for text in ("shard8", "shard8+fp8"))
    (before,), (after,) = usual.layers, fast.layers
    assert times(after, "matmuls")[0] < 0.75 * times(before, "matmuls")[0]
    assert times(fast.head, "matmuls") == times(usual.head, "matmuls")
    assert all(
        later > earlier for later, earlier in zip(*(times(x, "element-wise") for x in (after, before)), strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class _WithAnotherKey(Layout):
    """A layout with a key that the planner has never seen."""

    cap: int = 0


def test_a_new_key_of_a_layout_is_priced() -> None:
    """A list of the keys that count would leave it out, and its bytes with it."""
    layout = _WithAnotherKey(tp=2, pp=2, dp_shard=4, zero=1, recompute="full", precision="fp32", cap=3)
    assert work_layout(layout) == _WithAnotherKey(tp=2, precision="fp32", cap=3)


def test_a_loss_of_the_users_own_has_the_logits_of_the_whole_vocabulary() -> None:
    """On every tensor parallel rank, also where the prices are those of another cluster."""
    facts, cluster = facts_of_config("llama-3.2-1b"), Cluster.parse("2xH100")
    layout, workload = Layout.parse("tp2"), Workload(global_batch_size=2, seq_length=TOKENS)
    own = PriceList(facts, cluster, whole_logits=True)
    plain, with_own, again = (
        estimate_layout(prices, layout, workload).memory_gib
        for prices in (PriceList(facts, cluster), own, own.repriced(cluster))
    )
    assert again == with_own > plain


def test_what_is_coded_and_put_in_order_moves_through_memory() -> None:
    """Of a layer over two nodes of two ranks: between the levels 2 x 4 bytes of each number, 51 of one that is coded,
    25 of one that is decoded and 12 of one that is added up. A rank codes its own quarter of a gather, and the half of
    a reduction that its node has summed."""

    def moved(layout: str, what: str) -> float:
        """Bytes of a layer's gather or reduction."""
        found = []
        for bandwidth in (1e9, 1.0):  # GB/s
            cluster = Cluster.parse("2x2xcpu")
            chip = replace(cluster.chip, memory_bandwidth_gbs=bandwidth, memory_fraction=1.0)
            price_list = PriceList(facts_of_config("llama-3.1-8b"), replace(cluster, chip=chip))
            (unit,) = PricedStep(price_list, Layout.parse(layout), Workload(TOKENS, 4)).shards.layers[0].units
            found.append(float(getattr(unit, what)))
        return (found[1] - found[0]) * 1e9

    numbers, plain = 218_112_000, "shard4+hier2+fp32"
    gather = moved("shard4+hier2+qwz+fp32", "gather_seconds") - moved(plain, "gather_seconds")
    less = 2 * (4 - 1) * numbers  # what is put in order is coded, too
    assert gather == pytest.approx((51 / 4 + 25) * numbers - less, rel=0.01)
    assert moved("shard4+hier2+qgz+fp32", "reduce_seconds") - moved(plain, "reduce_seconds") == pytest.approx(
        (51 + 25 + 12) * numbers / 2, rel=0.01
    )
    # From the copy of a node, too, what is gathered is copied in and out: 5.5 bytes for each of its bytes.
    near = moved("shard4+hpz2+fp32", "near_seconds")
    assert near == moved("shard4+hpz2+fp32", "gather_seconds") == pytest.approx(5.5 * 4 * numbers, rel=0.01)
    in_two = moved(plain, "reduce_seconds") - moved("shard4+fp32", "reduce_seconds")
    assert in_two == pytest.approx(2 * 4 * numbers, rel=0.01)


def sent_over_tp(layout: str, *, compiled: bool) -> Counter[tuple[str, str]]:
    """Of a layer, for a micro batch: tp's collectives by phase and kind."""
    price_list = PriceList(facts_of_config("llama-3.1-70b"), Cluster.parse("8xH100"), compiled=compiled)
    calls = price_list.of(Layout.parse(layout), TOKENS).layers[0].calls
    return Counter((each.phase, each.kind) for each in calls if each.axis == "tp" for _ in range(each.times))


@pytest.mark.parametrize(("layout", "again"), [
    ("tp8", 2), ("tp8+nosp", 0), ("tp8+full", 0), ("pp2.tp4+zb", 0), ("cp2.tp4", 0), ("tp8+fp8", 0),
])  # fmt: skip
def test_compiled_layers_send_a_gather_again_where_that_is_of_use(layout: str, again: int) -> None:
    """Not without sequence parallelism, of layers that are computed again, and of those of several graphs."""
    compiled, eager = (sent_over_tp(layout, compiled=each) for each in (True, False))
    assert compiled - eager == Counter({("backward", "all_gather"): again} if again else {})
