"""Why a layout is as fast as it is, and what makes one fit."""

import math
from dataclasses import replace

import pytest

from fivefold.hardware.cluster import Cluster
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.layout import Layout
from fivefold.planner import price
from fivefold.planner.estimate import Workload, estimate_layout
from fivefold.planner.explain import USEFUL, binds, cures, neighbours, slower_by, tied
from fivefold.planner.price import PriceList
from fivefold.planner.rank_memory import MATMULS
from fivefold.planner.timing import DOUBTS, OF_TERMS, memory_interval, step_interval
from tests.planner.settings import prices, with_memory

WORKLOAD = Workload(8192, 16)


def test_what_binds_is_the_largest_item_that_is_not_the_model_itself() -> None:
    found = estimate_layout(prices("llama", "8xH100"), Layout.parse("shard2.tp4"), WORKLOAD)
    largest = binds(found)
    assert largest.item not in USEFUL
    assert all(row.amount <= largest.amount for row in found.rows if row.part == "time" and row.item not in USEFUL)


def test_a_slower_layout_says_in_what() -> None:
    price_list = prices("llama", "8xH100")
    one, other = (estimate_layout(price_list, Layout.parse(text), WORKLOAD) for text in ("pp8", "dp8"))
    found = slower_by(one, other)
    assert sum(each.seconds for each in found) == pytest.approx(one.step_seconds - other.step_seconds)
    assert found[0].item == "bubble" and found[0].share > 0
    assert slower_by(one, one)[0].seconds == 0


def test_an_interval_is_as_wide_as_its_terms_are_unsure() -> None:
    """A half of each of two terms: the doubts add up as squares. A bubble is as unsure as what it waits for."""
    low, high = step_interval({"matmuls": 1.0, "tp": 1.0}, 1)
    doubt = math.hypot(DOUBTS["matmuls"] / 2, DOUBTS["links"] / 2)
    assert (math.log(high / 2), math.log(low / 2)) == pytest.approx((1.28 * doubt, -1.28 * doubt))
    assert step_interval({"matmuls": 1.0, "tp": 1.0, "bubble": 2.0}, 1) == pytest.approx((2 * low, 2 * high))
    assert step_interval({"matmuls": 2.0}, 4)[1] == pytest.approx(2 * math.exp(1.28 * 4 * DOUBTS["matmuls"]))


def test_what_is_taken_lies_nearer_below_than_above() -> None:
    """Of 40 GiB: 80 % of the rehearsed ranks took 39 to 42.6."""
    assert memory_interval(40.0) == pytest.approx((39.0, 42.6))


def test_every_item_of_a_slot_is_as_unsure_as_its_term() -> None:
    """Also those that few layouts have, such as ep."""
    items = [item for own in OF_TERMS.values() for item in own]
    assert set(price.ITEMS) < set(items) and len(items) == len(set(items)) and set(OF_TERMS) == set(DOUBTS)


@pytest.mark.parametrize(
    ("more", "is_tied"),
    [
        ({"host": 0.01}, True),  # nearer than anybody can tell
        ({"host": 0.1}, False),  # the same term, known to 30 %: it is longer by 6 to 14 %
        ({"host": -0.05, "attention": 0.075}, True),  # 2.5 % longer, in terms that are wrong by 2.7 % together
    ],
)
def test_steps_are_tied_within_the_error_of_their_difference(more: dict[str, float], is_tied: bool) -> None:
    other = estimate_layout(prices("llama", "8xH100"), Layout.parse("shard8"), WORKLOAD)
    whole = other.step_seconds
    rows = tuple(replace(row, amount=row.amount + whole * more.get(row.item, 0.0)) for row in other.rows)
    assert tied(replace(other, rows=rows), other) is is_tied and tied(other, other)


@pytest.mark.parametrize("text", ["dp4", "dp4+mb4", "dp2.shard2+zero1", "tp2.pp2", "shard2.tp2+mb2+nosp"])
def test_cures_fit_are_legal_and_come_by_their_time(text: str) -> None:
    """With a fifth less than it needs beside the work space of matmuls, which is most of what a small model takes."""
    large = estimate_layout(with_memory(prices("llama", "4xH100"), gib=80), Layout.parse(text), WORKLOAD)
    always = sum(row.amount for row in large.rows if row.item == MATMULS)
    price_list = with_memory(prices("llama", "4xH100"), gib=(0.8 * large.reserved + 0.2 * always) / 2**30)
    found = estimate_layout(price_list, Layout.parse(text), WORKLOAD)
    assert not found.fits
    cured = cures(price_list, found)
    assert 0 < len(cured) <= 3 and all(each.fits for each in cured)
    times = [each.step_seconds for each in cured]
    assert times == sorted(times)
    for each in cured:
        assert estimate_layout(price_list, each.layout, WORKLOAD).step_seconds == each.step_seconds


def test_neighbours_differ_in_one_respect() -> None:
    price_list = prices("mixtral", "8xH100")
    layout = Layout.parse("dp2.shard4+zero1+mb2")
    found = set(map(str, neighbours(price_list, layout, estimate_layout(price_list, layout, WORKLOAD))))
    assert {"dp2.shard4+zero1+mb2+full", "dp2.shard4+zero1", "dp2.shard4+zero2+mb2", "dp2.shard4+mb2"} <= found
    assert {"shard8+zero1+mb2", "shard4.tp2+zero1+mb2", "shard4.cp2+zero1+mb2", "shard4.pp2+zero1+mb2"} <= found
    assert "dp2.shard4.ep2+zero1+mb2" in found


def test_nothing_cures_a_model_that_is_far_too_large() -> None:
    price_list = with_memory(prices("llama", "4xH100"), gib=0.001)
    assert cures(price_list, estimate_layout(price_list, Layout.parse("dp4"), WORKLOAD)) == ()


@pytest.mark.parametrize(
    ("cluster", "least", "expected"),
    [
        # A CPU's memory is the host's: nothing can be moved there.
        ("1xcpu", "single+full+fp32", {"single+full+fp32+bf16_states", "single+full+fp32+8bit_states"}),
        ("1xH100", "single+full", {"single+full+offload_optimizer", "single+full+offload+offload_optimizer"}),
    ],
)
def test_state_is_rounded_where_nothing_else_fits(cluster: str, least: str, expected: set[str]) -> None:
    whole = PriceList(facts_of_config("llama-3.2-1b"), Cluster.parse(cluster))
    layout, needed = Layout.parse(least), Workload(1024, 1)
    price_list = with_memory(
        whole, gib=0.97 * estimate_layout(with_memory(whole, gib=80), layout, needed).reserved / 2**30
    )
    found = cures(price_list, estimate_layout(price_list, layout, needed))
    assert {str(each.layout) for each in found} == expected and all(each.fits for each in found)
