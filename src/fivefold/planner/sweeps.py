"""Training speed on more or fewer devices, and with longer or shorter rows, each with its best layout. No torch."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from fivefold.core.errors import UserError
from fivefold.hardware.cluster import Cluster
from fivefold.planner.answers import TOP, answer
from fivefold.planner.estimate import Estimate, Workload
from fivefold.planner.price import PriceList

FEWER, MORE = 4, 1  # halvings and doublings of the devices
SHORTER, LONGER = 3, 5  # and of the rows
LEAST_LENGTH = 512
MOST_DEVICES = 2048  # a search over more takes seconds: only the cluster itself is searched


@dataclass(frozen=True)
class Sweeps:
    """The best layout for each number of devices, with the same batch, and for each length of rows, with about as many
    tokens a step. Points without a layout that runs and fits are missing."""

    devices: tuple[Estimate, ...]
    lengths: tuple[Estimate, ...]


def sweeps(prices: PriceList, workload: Workload, *, anew: bool = False) -> Sweeps:
    """Sweep around a cluster and a workload. `anew`: see `answer`."""
    clusters = [
        cluster for cluster in scaled(prices.cluster) if cluster == prices.cluster or cluster.world <= MOST_DEVICES
    ]
    few = SHORTER if prices.cluster.world <= MOST_DEVICES else 1
    workloads = [_with_rows(workload, times) for times in range(-few, LONGER + 1)]

    def best(asked: Iterable[tuple[PriceList, Workload]]) -> tuple[Estimate, ...]:
        found = list[Estimate]()
        for own, wanted in asked:
            top = TOP if (own.cluster, wanted) == (prices.cluster, workload) else 1  # cached: it was planned before
            with suppress(UserError):  # no layout is legal
                found += answer(own, wanted, top=top, anew=anew).best[:1]
        return tuple(found)

    return Sweeps(
        best((prices.repriced(cluster), workload) for cluster in clusters),
        best((prices, workload) for workload in workloads if workload.seq_length >= LEAST_LENGTH),
    )


def scaled(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with fewer and with more devices, by factors of two: whole nodes, or a part of one."""
    nodes, devices, smaller = cluster.nodes, cluster.devices_per_node, list[Cluster]()
    while (nodes % 2 == 0 or devices % 2 == 0) and len(smaller) < FEWER:
        nodes, devices = (nodes // 2, devices) if nodes % 2 == 0 else (nodes, devices // 2)
        smaller.append(replace(cluster, nodes=nodes, devices_per_node=devices))
    yield from reversed(smaller)
    for times in range(MORE + 1):
        yield replace(cluster, nodes=cluster.nodes * 2**times)


def _with_rows(workload: Workload, times: int) -> Workload:
    """The workload with rows 2^times as long."""
    length = max(1, int(workload.seq_length * 2.0**times))
    return Workload(length, max(1, workload.tokens // length))
