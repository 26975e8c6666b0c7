"""The longest sequence, the fewest devices, the price of a token."""

import pytest

from fivefold.core.errors import UserError
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import TIGHT, PricedStep, Workload
from fivefold.planner.explain import STEP, cost_per_million_tokens, fewest_devices, leanest, longest_sequence
from fivefold.planner.price import PriceList
from fivefold.planner.search import search
from tests.planner.settings import prices, with_memory

WORKLOAD = Workload(2048, 16)


@pytest.fixture(scope="module")
def small() -> PriceList:
    """A chip whose memory a small model fills."""
    return with_memory(prices("llama", "4xH100"), gib=3)


@pytest.mark.parametrize("text", ["dp4", "shard4+full", "shard2.tp2", "cp4+full", "pp2.shard2+full", "pp2.dp2+zb"])
def test_the_longest_sequence_of_a_layout_fits_and_a_longer_one_does_not(small: PriceList, text: str) -> None:
    layout, memory = Layout.parse(text), small.cluster.chip.memory_bytes
    found = longest_sequence(small, WORKLOAD, layout)
    assert found.layout == layout and found.verdict == "fits" and found.workload.seq_length % STEP == 0
    rows = found.workload.global_batch_size
    longer = PricedStep(small, layout, Workload(found.workload.seq_length + STEP, rows))
    assert longer.needs > memory * TIGHT


def test_the_longest_sequence_of_a_cluster_is_that_of_its_best_layout(small: PriceList) -> None:
    found = longest_sequence(small, WORKLOAD)
    every = [longest_sequence(small, WORKLOAD, each).workload.seq_length for each in leanest(small, 2048)]
    assert found.workload.seq_length == max(every)
    assert found.layout.cp * found.layout.tp * found.layout.pp > 1


def test_a_step_keeps_its_tokens_while_it_has_rows_for_all(small: PriceList) -> None:
    found = longest_sequence(small, Workload(2**20, 256), Layout.parse("cp4+full"))
    assert found.workload.tokens == pytest.approx(2**28, rel=0.05)


def test_what_does_not_fit_at_all_is_an_error() -> None:
    tiny = with_memory(prices("llama", "4xH100"), gib=0.0001)
    with pytest.raises(UserError, match="does not fit"):
        longest_sequence(tiny, WORKLOAD)
    with pytest.raises(UserError, match="no layout of 1x4xH100 fits"):
        fewest_devices(tiny, WORKLOAD)


def test_the_fewest_devices_fit_and_half_of_them_do_not() -> None:
    workload = Workload(65536, 16)
    for family in ("llama", "mixtral"):
        alone = with_memory(prices(family, "1xH100"), gib=80)
        gib = 0.6 * min(PricedStep(alone, each, workload).needs for each in leanest(alone, workload.seq_length)) / 2**30
        found = fewest_devices(with_memory(prices(family, "2x4xH100"), gib=gib), workload)
        assert found.fits and found.layout.world in (4, 8)
        half = with_memory(prices(family, f"{found.layout.world // 2}xH100"), gib=gib)
        assert not search(half, workload).fitting


def test_tokens_cost_what_their_device_hours_cost(small: PriceList) -> None:
    estimate = search(small, WORKLOAD, top=1).best[0]
    cost = cost_per_million_tokens(estimate, per_device_hour=2.0)
    seconds = 1e6 / estimate.tokens_per_second_per_device
    assert cost == pytest.approx(2.0 * seconds / 3600)
