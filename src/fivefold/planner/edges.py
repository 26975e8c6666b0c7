"""Work of a pipeline rank once a step, and what it sends to others between passes: seconds and calls. No torch."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from fivefold.hardware.cluster import Span
from fivefold.parallel.collectives import Call
from fivefold.parallel.layout import Layout
from fivefold.parallel.outer import spec as outer
from fivefold.parallel.ranks import Axis
from fivefold.planner.compute import traffic_seconds
from fivefold.planner.links import seconds
from fivefold.planner.parts import Content, Numbers, Prices, Shard, Shards
from fivefold.planner.price import PriceList
from fivefold.planner.sums import Places

OUTER_TRAFFIC = 20  # numbers that the operators of an outer step read and write for each one
UPDATE_BYTES = 34  # memory traffic of AdamW and the gradient norm per parameter, all in fp32


@dataclass(frozen=True)
class Edges:
    """Seconds that a pipeline rank spends once a step. `update`: the optimizer. `ends`: first gather and last
    reduction, of the slowest unit. `replicas`, `last`: all-reduces over replicas, of all units and of the slowest.
    `reductions`: one of each unit. `sums`: all-reduces of gradients that are partial on each rank. `outer`: the part of
    an outer step."""

    update: Numbers | float
    ends: Numbers | float
    replicas: Numbers | float
    last: Numbers | float
    reductions: Numbers | float
    sums: Numbers | float
    outer: Numbers | float = 0.0

    def at(self, places: Places) -> "Edges":
        """The entries at `places`."""
        return Edges(*(getattr(self, field.name)[places] for field in fields(self)))

    def seconds(self, backward: Numbers | float) -> Numbers:
        """Seconds that no compute hides, without the update. `backward`: seconds that hide sums over replicas."""
        hidden = np.maximum(0.0, backward - self.reductions)
        found: Numbers = self.ends + np.maximum(self.last, self.replicas - hidden) + self.sums + self.outer
        return found


def edges_of(price_list: PriceList, shards: Shards, content: Content, layout: Layout) -> Edges:
    """Compute the edges of a pipeline rank."""
    cluster, of_rank = price_list.cluster, shards.of(content)
    units = [(unit, count) for shard, count in of_rank for unit in shard.units]
    replicas = price_list.span(Axis(layout.dp_replicate, layout.dp_shard * layout.cp * layout.tp))
    is_summed = layout.copies_apart == 1
    over = [
        (sum(seconds(cluster, replicas, call) for call in unit.calls["replicas"] if is_summed), count)
        for unit, count in units
    ]
    sums = sum(seconds(cluster, price_list.span(shards.grid.axes[call.axis]), call) for call in sum_calls(of_rank))
    if (call := tied_call(shards, content, layout)) is not None:
        sums += seconds(cluster, price_list.span(Axis(2, layout.world // layout.pp * (layout.pp - 1))), call)
    held = sum(unit.trained * count for unit, count in units)
    return Edges(
        update=traffic_seconds(cluster.chip, UPDATE_BYTES * held),
        ends=max((unit.gather_seconds + unit.reduce_seconds for unit, _ in units), default=0.0),
        replicas=sum(took * count for took, count in over),
        last=max((took for took, _ in over), default=0.0),
        reductions=sum(unit.reduce_seconds * count for unit, count in units),
        sums=sums,
        outer=0.0 if is_summed else _outer_seconds(price_list, layout, shards, held, replicas) / layout.outer_every,
    )


def _outer_seconds(price_list: PriceList, layout: Layout, shards: Shards, held: float, replicas: Span) -> float:
    """Seconds of an outer step: the mean over replicas, and SGD with momentum on the outer weights."""
    width, cluster = shards.shape.master_bytes, price_list.cluster
    mean = outer.mean_calls(int(held), layout.copies_apart, width)
    update = traffic_seconds(cluster.chip, OUTER_TRAFFIC * int(held) * width)
    return sum(seconds(cluster, replicas, call) for call in mean) + float(update)


def tied_call(shards: Shards, content: Content, layout: Layout) -> Call | None:
    """All-reduce of a tied embedding's gradients, if it is on two pipeline ranks and this is one of them."""
    if not shards.tied or layout.pp == 1 or content.has_embedding == content.has_head:
        return None
    return Call(axis="pp_ends", kind="all_reduce", bytes=shards.tied, phase="step")


def sum_calls(of_rank: Iterable[tuple[Shard, int]]) -> Iterator[Call]:
    """All-reduces, once a step, of the gradients that are partial on each rank."""
    sums = Counter[str]()
    for shard, count in of_rank:
        for axis, size in shard.sums.items():
            sums[axis] += size * count
    for axis, size in sums.items():
        if size:
            yield Call(axis=axis, kind="all_reduce", bytes=size, phase="step")


def transfer_call(prices: Prices) -> Call:
    """Send of hidden states from one pipeline rank to the next."""
    size = prices.shape.hidden_bytes // prices.plan.sequence_ranks
    return Call(axis="pp", kind="send", bytes=size, phase="forward")


def transfer_seconds(price_list: PriceList, prices: Prices, pp: int) -> float:
    """Seconds to send hidden states from one pipeline rank to the next. Where devices share cores, `crowded` speeds up
    a whole span, but not the network between nodes: its seconds are that much more before."""
    cluster, span = price_list.cluster, price_list.span(Axis(pp, price_list.cluster.world // pp))
    took = seconds(cluster, span, transfer_call(prices)) if pp > 1 else 0.0
    return took * cluster.crowding if span.nodes > 1 else took
