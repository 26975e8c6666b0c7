"""Seconds of a collective, by hand, on round numbers: 100 GB/s and 10 us inside a node, 10 GB/s and 100 us between
nodes, and 8 MB."""

from dataclasses import replace

import pytest

from fivefold.hardware.cluster import Cluster, Span
from fivefold.parallel.collectives import Call
from fivefold.planner.timing import collective_seconds


def cluster(text: str = "2x4xH100", rails: int = 0, decay: float = 0.0) -> Cluster:
    usual = Cluster.parse(text)
    inside = replace(usual.node.inside, gbs=100.0, fraction=1.0, latency_us=10.0, decay=0.0, rails=0)
    between = replace(usual.node.between, gbs=10.0, fraction=1.0, latency_us=100.0, decay=decay, rails=rails)
    return replace(usual, node=replace(usual.node, inside=inside, between=between))


def microseconds(of: Cluster, kind: str, span: Span) -> float:
    return 1e6 * collective_seconds(of, span, Call(axis="", kind=kind, bytes=8_000_000, phase="forward"))


@pytest.mark.parametrize(
    ("kind", "on_node", "on_two"),
    [
        # Of 4 ranks 3 hops and 3/4 of 80 us. Of 2 x 4, 6 hops inside and 1 between, and 7/8 of 200 us: 4 links of 10.
        ("all_gather", 30 + 60, 160 + 175),
        ("reduce_scatter", 30 + 60, 160 + 175),
        # Both ways. A tree over 2 nodes has 3 hops inside and 1 between.
        ("all_reduce", 2 * (30 + 60), 2 * (130 + 175)),
        # 3/4 of 80 us. Half of all goes to the other node, over a link of each rank.
        ("all_to_all", 10 + 60, 100 + 400),
        ("send", 10 + 80, 100 + 800),
    ],
)
def test_seconds_of_a_collective(kind: str, on_node: float, on_two: float) -> None:
    of = cluster()
    assert microseconds(of, kind, of.tier_of(range(4))) == pytest.approx(on_node)
    assert microseconds(of, kind, of.tier_of(range(8))) == pytest.approx(on_two)
    assert microseconds(of, kind, of.tier_of([3])) == 0


def test_a_ring_has_as_many_network_links_as_it_can_use() -> None:
    """Two of four: 20 GB/s. One rank of each node has one: half of 800 us."""
    of = cluster(rails=2)
    assert microseconds(of, "all_gather", of.tier_of(range(8))) == pytest.approx(160 + 350)
    assert microseconds(of, "all_gather", of.tier_of([0, 4])) == pytest.approx(100 + 400)


def test_a_ring_carries_less_over_more_nodes() -> None:
    """Of 100 GB/s 25 over 4 nodes: less than 4 links of 10, and more than the one of a rank a node."""
    of = cluster("4x4xH100", decay=1.0)
    assert microseconds(of, "all_gather", of.tier_of(range(16))) == pytest.approx(12 * 10 + 300 + 15 / 16 * 320)
    assert microseconds(of, "all_gather", of.tier_of(range(0, 16, 4))) == pytest.approx(300 + 3 / 4 * 800)


def test_processes_on_a_cpu_reduce_and_scatter_by_an_all_reduce() -> None:
    """Each collective waits until all have come; a send does not."""
    of = cluster("4xcpu")
    meet = of.node.inside.meet_us
    assert meet > 0
    assert microseconds(of, "reduce_scatter", of.tier_of(range(4))) == pytest.approx(meet + 2 * (30 + 60))
    assert microseconds(of, "all_gather", of.tier_of(range(4))) == pytest.approx(meet + 30 + 60)
    assert microseconds(of, "send", of.tier_of(range(4))) == pytest.approx(10 + 80)


def test_so_they_do_between_nodes() -> None:
    of = cluster("2x2xcpu")
    meet = of.node.between.meet_us
    assert microseconds(of, "reduce_scatter", of.tier_of([0, 2])) == pytest.approx(meet + 2 * (100 + 400))
    assert microseconds(of, "reduce_scatter", of.tier_of(range(4))) == pytest.approx(meet + 2 * (120 + 300))
