"""The search: its numbers are those of the plan that runs, its bounds are sound, its best is that of all layouts."""

import random
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from fivefold.core.errors import UserError
from fivefold.hardware.cluster import Cluster
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel import legality
from fivefold.parallel.collectives import StepShape, summed
from fivefold.parallel.features import calls, limits_of
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.plan import ParallelPlan
from fivefold.planner.bounds import Bounding
from fivefold.planner.estimate import TIGHT, PricedStep, Workload
from fivefold.planner.price import PriceList
from fivefold.planner.rank_memory import MATMULS, OUTSIDE
from fivefold.planner.search import ALIKE, NEAR, search, simplicity
from fivefold.planner.space import Space
from fivefold.planner.sums import ROUNDING, transfer_call
from tests.planner.priced_calls import priced_calls
from tests.planner.settings import layouts, prices, sampled
from tests.tiers import put_off

WORKLOAD = Workload(2048, 64)
SETTINGS = [
    ("llama", "8xH100", 90), ("llama", "2x4xA100-80", 60), ("mixtral", "8xH100", 90), ("mixtral", "2x4xH100", 60),
    ("gemma2", "8xH100", 20), ("deepseek_v3", "4xH100", 20),
    ("llama", "1xH100", 12), ("mixtral", "1xH100", 12),
]  # fmt: skip


@cache
def sample() -> list[tuple[PriceList, Layout]]:
    """Of every setting. Not made when this file is imported, which every process of a test run does."""
    return [each for family, cluster, count in SETTINGS for each in sampled(family, cluster, count)]


# ---- the same as the plan that runs ----------------------------------------------------------------------------------


def plan_and_step(price_list: PriceList, layout: Layout, pp_rank: int) -> tuple[PricedStep, ParallelPlan, StepShape]:
    step = PricedStep(price_list, layout, WORKLOAD)
    plan = lower(price_list.facts, layout, pp_rank * (layout.world // layout.pp))
    shape = plan.step_shape(layout.micro_batch_size, layout.padded(WORKLOAD.seq_length), step.micro_batches)
    return step, plan, replace(shape, compiled=price_list.traits.compiled)


@pytest.mark.full  # ten seconds of arithmetic
@pytest.mark.parametrize("every", [7, put_off(1)])
def test_memory_is_that_of_the_plan(every: int) -> None:
    """Of the first, a middle and the last pipeline rank, item by item."""
    assert len(sample()) >= 200
    for price_list, layout in sample()[::every]:
        for rank in {0, layout.pp // 2, layout.pp - 1}:
            step, plan, shape = plan_and_step(price_list, layout, rank)
            planned = step_bytes(plan, shape).by_kind
            found = {item: size for item, size in step.memory_of(rank).items() if item not in (*OUTSIDE, MATMULS)}
            assert found == pytest.approx(planned, rel=0, abs=0.5), f"{layout} rank {rank}"


@pytest.mark.parametrize("every", [7, put_off(1)])
def test_collectives_are_those_of_the_plan(every: int) -> None:
    """(axis, kind, times, bytes) of the busiest rank's step."""
    for price_list, layout in sample()[every // 2 :: every]:
        step = PricedStep(price_list, layout, WORKLOAD)
        _, plan, shape = plan_and_step(price_list, layout, step.busiest)
        planned = [call for call in calls(plan, shape) if call.axis != "pp"]
        sent = {call.bytes for call in calls(plan, shape) if call.axis == "pp"}
        assert summed(priced_calls(step, step.busiest)) == summed(planned), str(layout)
        assert sent <= {transfer_call(step.prices).bytes}, str(layout)


@pytest.mark.parametrize(("layout", "sums"), [("pp2.shard2", 1), ("pp2.shard2+zbv+v2", 0)])
def test_a_tied_embedding_is_summed_between_two_ranks_alone(layout: str, sums: int) -> None:
    """In a V the first and the last stage are of one rank."""
    price_list = PriceList(facts_of_config("llama-3.2-1b"), Cluster.parse("4xH100"))
    step, plan, shape = plan_and_step(price_list, Layout.parse(layout), 0)
    both = priced_calls(step, 0), calls(plan, shape)
    assert [sum(call.times for call in own if call.axis == "pp_ends") for own in both] == [sums, sums]


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama", ("shard16+hpz8", "shard16+hier8", "shard8.tp2+hpz4+hier4", "pp2.shard8+interleaved+v2+hpz4+hier4")),
        ("llama", ("shard16+qwz", "shard16+qgz", "dp2.shard8+hier4+qwz+qgz+zero2", "shard16+hpz8+hier8+qwz+qgz")),
        ("llama", ("dp2.shard8+outer50", "dp4.shard4+hpz2+outer50")),
        ("mixtral", ("shard16.ep2+hpz8+hier8+qwz+qgz", "shard8.tp2.ep4+hpz4", "shard16.ep4+hier4")),
    ],
)  # fmt: skip
def test_keys_of_slow_links_are_planned_as_they_run(family: str, words: tuple[str, ...]) -> None:
    """No search sets them: what they send and keep, of a layout that a user gives. Of the losses and norms of replicas
    that train apart, which all ranks sum, the planner counts one."""
    beside = ("pp", "world")
    for text in words:
        step, plan, shape = plan_and_step(prices(family, "2x8xH100"), Layout.parse(text), 0)
        sent = [call for call in calls(plan, shape) if call.axis not in beside]
        assert summed(call for call in priced_calls(step, 0) if call.axis not in beside) == summed(sent), text
        planned, items = step_bytes(plan, shape).by_kind, step.memory_of(0).items()
        found = {item: size for item, size in items if item not in (*OUTSIDE, MATMULS)}
        assert found == pytest.approx(planned, rel=0, abs=0.5), text


# ---- which layouts there are -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "cluster"), [("llama", "4xH100"), ("mixtral", "4xH100"), ("mixtral", "2x4xH100")])
def test_every_layout_is_legal_and_no_legal_one_of_its_options_is_missing(family: str, cluster: str) -> None:
    price_list = prices(family, cluster)
    limits, world = limits_of(price_list.facts), price_list.cluster.world
    found = set(layouts(Space(price_list, WORKLOAD)))
    assert not any(legality.violations(each, limits, world=world, batch=WORKLOAD.global_batch_size) for each in found)
    degrees = [each for each in range(1, world + 1) if world % each == 0]
    values = product(degrees, degrees, degrees, degrees, degrees, (False, True), (1, 2), ("none", "full"))
    for tp, cp, pp, shard, ep, features, rows, recompute in values:
        if world % (tp * cp * pp * shard) or tp > price_list.cluster.domain or (features and tp == 1):
            continue
        layout = Layout(
            tp=tp, cp=cp, pp=pp, dp_shard=shard, dp_replicate=world // (tp * cp * pp * shard), ep=ep,
            expert_tp=features, micro_batch_size=rows, recompute=recompute,
        )  # fmt: skip
        is_legal = not legality.violations(layout, limits, world=world, batch=WORKLOAD.global_batch_size)
        assert (layout in found) == is_legal, str(layout)


# ---- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cluster", "factor"), [("2x2xcpu", 2.0), ("4xcpu", 1.0)])
def test_a_network_sends_no_faster_where_devices_share_cores(cluster: str, factor: float) -> None:
    """The seconds of a pipeline with two devices a core are halved afterwards."""
    price_list = prices("llama", cluster)
    transfers = []
    for crowding in (1, 2):
        there = price_list.cluster
        node = replace(there.node, cores=there.devices_per_node // crowding)
        crowded = price_list.repriced(replace(there, node=node))
        assert crowded.cluster.crowding == crowding
        transfers.append(PricedStep(crowded, Layout.parse("pp2.dp2"), WORKLOAD).transfer)
    assert transfers[1] == pytest.approx(factor * transfers[0])


@pytest.mark.parametrize(
    ("family", "cluster"), [("llama", "8xH100"), ("mixtral", "2x4xA100-80"), ("llama", "4xcpu"), ("llama", "1xH100")]
)
def test_bounds_are_sound(family: str, cluster: str) -> None:
    """Memory is that of an estimate; no step is shorter than its bound; in batches a step takes as long as alone. Of
    processes on a CPU two share a core."""
    price_list = prices(family, cluster)
    if price_list.cluster.chip.is_host:
        node = replace(price_list.cluster.node, cores=price_list.cluster.world // 2)
        price_list = price_list.repriced(replace(price_list.cluster, node=node))
        assert price_list.cluster.crowding == 2
    space = Space(price_list, WORKLOAD)
    bounding, rng = Bounding(space), np.random.default_rng(0)
    for rows in space.rows:
        some = rows.at(np.sort(rng.choice(len(rows), size=min(8, len(rows)), replace=False)))
        bounds = bounding.of(some)
        for number in range(len(some)):
            layout = space.layout(some, number)
            step = PricedStep(price_list, layout, WORKLOAD)
            estimate = step.estimate()
            assert bounds.needs[number] == pytest.approx(estimate.reserved, rel=1e-12)
            assert bounds.at_least[number] <= estimate.step_seconds * (1 + ROUNDING), str(layout)
            assert step.at_least <= estimate.step_seconds * (1 + ROUNDING), str(layout)
            alone = bounding.seconds(some.at(np.array([number])))[0]
            assert alone == pytest.approx(estimate.step_seconds, rel=1e-9), str(layout)
            if layout.pp == 1:
                assert bounds.at_least[number] == pytest.approx(estimate.step_seconds, rel=1e-9)


def test_one_process_copies_its_parameters_once_a_step_under_every_zero_stage() -> None:
    """In estimates and in bounds; a CPU has nothing that hides the time of it."""
    price_list = prices("llama", "1xcpu")
    layouts_of_one = [Layout.parse(f"single{zero}") for zero in ("", "+zero1", "+zero2")]
    assert len({PricedStep(price_list, each, WORKLOAD).estimate().step_seconds for each in layouts_of_one}) == 1
    space = Space(price_list, WORKLOAD)
    for rows in space.rows:
        every = [PricedStep(price_list, space.layout(rows, number), WORKLOAD).estimate() for number in range(len(rows))]
        found = Bounding(space).of(rows).at_least
        assert found.tolist() == pytest.approx([each.step_seconds for each in every], rel=1e-9)


@pytest.mark.parametrize("less", [0, 1])
def test_the_size_of_the_whole_model_decides_on_copies(less: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the few layers whose prices are asked for."""
    price_list = prices("llama", "1xH100")
    size = 2 * sum(each.size for each in price_list.facts.parameters.values())
    monkeypatch.setattr("fivefold.parallel.fsdp.spec.COPIED_BYTES", size - less)
    assert price_list.plan(Layout.parse("single")).feature(FsdpPlan).is_used == bool(less)


EXHAUSTIVE = [
    ("llama", "2xH100", 4, 8), ("llama", "4xH100", 4, 16), ("llama", "4xA10G", 6, 8), ("llama", "2x2xA100-80", 4, 16),
    ("mixtral", "2xH100", 4, 8), ("mixtral", "4xH100", 4, 8), ("mixtral", "2x2xH100", 4, 8), ("gemma2", "4xH100", 4, 8),
    ("deepseek_v3", "2xH100", 4, 8), ("qwen3", "2x2xH100", 5, 8), ("llama", "8xH100", 4, 8),
]  # fmt: skip
DRAWN = random.Random(0)
FAMILIES, CLUSTERS = ("llama", "gemma2", "qwen3", "mixtral"), ("2xA10G", "3xH100", "4xH200", "2x2xA100-40")
for _ in range(6):
    size = DRAWN.randint(2, 7), DRAWN.choice((6, 12, 20, 24, 36))
    EXHAUSTIVE.append((DRAWN.choice(FAMILIES), DRAWN.choice(CLUSTERS), *size))


@pytest.mark.parametrize(("family", "cluster", "layers", "batch"), EXHAUSTIVE)
def test_the_best_are_those_of_an_exhaustive_search(family: str, cluster: str, layers: int, batch: int) -> None:
    price_list, workload = prices(family, cluster, layers), Workload(1024, batch)
    memory = price_list.cluster.chip.memory_bytes
    every = [PricedStep(price_list, layout, workload).estimate() for layout in layouts(Space(price_list, workload))]
    by_degrees: dict[tuple[int, ...], list[tuple[float, Layout]]] = {}
    for each in every:
        if each.reserved <= memory * TIGHT:
            own = each.layout
            by_degrees.setdefault((own.tp, own.cp, own.pp, own.ep), []).append((each.step_seconds, own))
    fitting = [each for own in by_degrees.values() for each in own]
    fastest = min(seconds for seconds, _ in fitting)
    found = search(price_list, workload, top=3)
    assert found.legal == len(every) and found.fitting == sum(each.fits for each in every)
    assert found.fastest and found.fastest.step_seconds == pytest.approx(fastest, rel=ROUNDING)
    assert simplest(fitting, fastest * (1 + ROUNDING)) <= simplicity(found.best[0].layout)
    assert simplicity(found.best[0].layout) <= simplest(fitting, fastest * (1 - ROUNDING))
    for each in found.best:
        own = by_degrees[each.layout.tp, each.layout.cp, each.layout.pp, each.layout.ep]
        least = min(seconds for seconds, _ in own)
        near = (fastest if least <= fastest * (1 + NEAR) else least) * (1 + ROUNDING)
        assert simplicity(each.layout) == simplest(own, near)
        assert each.step_seconds <= near * (1 + NEAR)
    if len(found.best) == 3:  # a set that is clearly faster is shown, or a simpler one as good stands for it
        last = max(each.step_seconds for each in found.best)
        shown = {(each.layout.tp, each.layout.cp, each.layout.pp, each.layout.ep) for each in found.best}
        for degrees, own in by_degrees.items():
            seconds, layout = min(own, key=lambda each: each[0])
            if degrees not in shown and seconds * (1 + NEAR) * (1 + ROUNDING) < last:
                others = [each for name, each in by_degrees.items() if axes(name) < axes(degrees) or name < degrees
                          or sum(name) <= sum(degrees)]  # fmt: skip
                assert any(took <= seconds * ALIKE * (1 + NEAR) for each in others for took, _ in each), str(layout)


def simplest(layouts: list[tuple[float, Layout]], fastest: float) -> tuple[int, ...]:
    """How simple the simplest is of those near `fastest` seconds."""
    return min(simplicity(layout) for seconds, layout in layouts if seconds <= fastest * (1 + NEAR))


def axes(degrees: tuple[int, ...]) -> int:
    return sum(degree > 1 for degree in degrees)


def test_the_simpler_layout_comes_first() -> None:
    order = [
        "shard64", "shard64+mb2", "shard64+zero1", "shard64+full", "dp8.shard8", "dp8.shard8+full", "shard32.tp2",
        "shard16.tp4", "shard16.cp4", "shard16.pp4", "shard16.tp4+mb2", "shard16.tp4+full", "shard16.pp4+zbv",
        "shard16.pp4+interleaved+v2", "shard8.tp4.pp2", "shard4.tp4.pp4", "shard8.tp4.pp2+full",
        "shard4.cp2.tp2.pp4",
    ]  # fmt: skip
    assert sorted(order, key=lambda text: simplicity(Layout.parse(text))) == order


def test_the_first_is_the_simplest_of_those_near_the_fastest() -> None:
    """70B on 64 H100s: neither a third kind of parallelism nor a dearer schedule for 2 %."""
    price_list = PriceList(facts_of_config("llama-3.1-70b"), Cluster.parse("8x8xH100"))
    found = search(price_list, Workload(8192, 256))
    first, fastest = found.best[0], found.faster
    assert fastest and fastest.step_seconds < first.step_seconds <= fastest.step_seconds * (1 + NEAR)
    assert simplicity(first.layout) < simplicity(fastest.layout)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def test_degrees_are_shown_once_and_say_what_stands_behind_them() -> None:
    found = search(prices("llama", "8xH100"), WORKLOAD)
    degrees = [(each.layout.tp, each.layout.cp, each.layout.pp, each.layout.ep) for each in found.best]
    assert len(degrees) == len(set(degrees))
    assert found.fastest and found.fastest.step_seconds <= min(each.step_seconds for each in found.best)


def test_a_small_model_is_trained_with_data_parallelism_alone() -> None:
    best = search(prices("llama", "8xH100"), WORKLOAD).best[0].layout
    assert best.world == best.data_ranks and best.recompute == "none"


def test_no_legal_layout_is_an_error() -> None:
    with pytest.raises(UserError, match="no layout of 1x8xH100"):
        search(prices("llama", "8xH100", layers=1), Workload(128, 3))
