"""Sums of prices over the stages and the ranks of a pipeline, for one layout or for many at once. No torch.

The last dimension of an array counts parts (kinds of layers, embedding, head), stages, or pipeline ranks. Dimensions
before it, if any, count layouts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from fivefold.core.schedule import Kind
from fivefold.hardware.cluster import Span
from fivefold.parallel.collectives import Call
from fivefold.parallel.layout import Layout
from fivefold.parallel.outer.spec import mean_calls
from fivefold.parallel.ranks import Axis
from fivefold.planner.flow import Gathers
from fivefold.planner.parts import Content, LayerPrice, Numbers, Prices, RankShards, Shard, Stages
from fivefold.planner.price import PriceList
from fivefold.planner.timing import Traits, collective_seconds, traffic_seconds

Places = NDArray[np.int64] | int | tuple[NDArray[np.int64], ...]
ROUNDING = 1e-9  # of sums in a different order
MEET = 4  # sharpness of the smooth maximum of a crowded pipeline's two bounds: judgement


def data_seconds(
    work: "Work", sent: "UnitSeconds", stages: Stages, of: Gathers, *, overlaps: bool
) -> tuple[Numbers, Numbers]:
    """Seconds of FSDP's collectives that compute cannot hide, in a forward and in a backward of each stage.
    Neighbouring layers are taken to be alike: a layer's parameters are gathered while the previous one runs."""
    forward, backward = (work.forward, work.backward) if overlaps else (0.0, 0.0)

    def exposed(seconds: Numbers | float) -> Numbers:
        found: Numbers = np.maximum(0.0, seconds) @ stages.layers.T
        return found

    def with_gathers(gather: Numbers, times: Numbers, reductions: Numbers) -> tuple[Numbers, Numbers]:
        """(exposed seconds of backwards that gather, reductions that are left for the others)"""
        together = np.minimum(times, reductions)
        both, again = exposed(gather + sent.reduce - backward), exposed(gather - backward)
        return together * both + (times - together) * again, reductions - together

    ahead = of.forward * exposed(sent.gather - forward)
    behind, left = with_gathers(sent.gather, of.backward, of.reductions)
    if of.near_forward.any() or of.near_backward.any():
        ahead = ahead + of.near_forward * exposed(sent.near - forward)
        near, left = with_gathers(sent.near, of.near_backward, left)
        behind = behind + near
    return ahead, behind + left * exposed(sent.reduce - backward)


@dataclass(frozen=True, eq=False)
class Work:
    """Work of each part. Device seconds of a forward, of a backward, and of the backward's weight gradients; host
    seconds of a forward and of a backward; bytes kept until backward, and additional bytes of a backward. `edges`:
    bytes of a stage's input and output, which a pipeline holds, and of the head's gradients."""

    forward: Numbers
    backward: Numbers
    weights: Numbers
    host_forward: Numbers
    host_backward: Numbers
    kept: Numbers
    working: Numbers
    edges: Numbers

    @staticmethod
    def of(prices: Sequence[Prices]) -> "Work":
        """Stack prices: [one for each of `prices`, part]."""

        def each(value: Callable[[LayerPrice], float]) -> Numbers:
            return np.array([[value(part) for part in price.parts] for price in prices])

        return Work(
            each(lambda part: part.forward.sum()), each(lambda part: part.backward.sum()),
            each(lambda part: part.weights.sum()), each(lambda part: part.host[0]), each(lambda part: part.host[1]),
            each(lambda part: part.kept), each(lambda part: part.working),
            np.array([price.edges for price in prices], dtype=float),
        )  # fmt: skip

    def at(self, places: Places) -> "Work":
        return Work(*(getattr(self, field.name)[places] for field in fields(self)))


@dataclass(frozen=True, eq=False)
class UnitSeconds:
    """Seconds of one gather, of one reduction, and of one gather from the secondary copy, of each part's units."""

    gather: Numbers
    reduce: Numbers
    near: Numbers

    @staticmethod
    def of(shards: Sequence[RankShards]) -> "UnitSeconds":
        """Stack shards: [one for each of `shards`, part]. The head is in the model's own unit, which stays gathered."""
        units = [[unit.units for unit in (*shard.layers, shard.embedding, Shard())] for shard in shards]
        return UnitSeconds(
            np.array([[sum(unit.gather_seconds for unit in part) for part in parts] for parts in units]),
            np.array([[sum(unit.reduce_seconds for unit in part) for part in parts] for parts in units]),
            np.array([[sum(unit.near_seconds for unit in part) for part in parts] for parts in units]),
        )

    def at(self, places: Places) -> "UnitSeconds":
        return UnitSeconds(self.gather[places], self.reduce[places], self.near[places])


def passes(work: Work, sent: UnitSeconds, stages: Stages, of: Gathers, traits: Traits) -> tuple[Numbers, Numbers]:
    """Seconds of a micro batch's forward and backward in each stage."""
    before, after = data_seconds(work, sent, stages, of, overlaps=traits.overlaps)
    return (
        met(work.forward @ stages.layers.T + before, work.host_forward @ stages.layers.T, traits.meet),
        met(work.backward @ stages.layers.T + after, work.host_backward @ stages.layers.T, traits.meet),
    )


def met(device: Numbers, host: Numbers, meet: float) -> Numbers:
    """Seconds of a slot. Python runs ahead of the device, which waits only if Python takes longer for the whole slot.
    The result is a smooth maximum of both times."""
    found: Numbers = (device**meet + host**meet) ** (1 / meet)
    return found


def durations(forward: Numbers, backward: Numbers, work: Work, stages: Stages) -> dict[Kind, Numbers]:
    """Seconds of each kind of slot, for each stage."""
    weights = work.weights @ stages.layers.T
    return {"F": forward, "B": backward, "I": backward - weights, "W": weights}


def busiest(forward: Numbers, backward: Numbers, stages: Stages) -> "NDArray[np.int64]":
    """The pipeline rank with the most to do, the first one of equals."""
    work = (forward + backward) @ stages.ranks.T
    found: NDArray[np.int64] = np.argmax(work >= work.max(axis=-1, keepdims=True) * (1 - ROUNDING), axis=-1)
    return found


def least_span(
    slots: Mapping[Kind, Numbers], stages: Stages, left: Numbers, micro_batches: NDArray[np.int64] | int,
    transfer: Numbers | float, *, splits_backward: bool,
) -> Numbers:  # fmt: skip
    """Lower bound of any schedule's span. A rank waits until the first micro batch has passed the stages before its
    first one. It does all of its work. After its last backward, that micro batch still has to return through those
    stages, while the rank can compute the weight gradients that are `left`, for each stage."""
    forward, backward, weights = slots["F"], slots["B"], slots["W"]
    back = slots["I"] if splits_backward else backward
    hops = stages.first * np.expand_dims(transfer, -1)
    there, again = ((np.cumsum(seconds, axis=-1) - seconds)[..., stages.first] + hops for seconds in (forward, back))
    work = (forward + backward) @ stages.ranks.T * np.expand_dims(micro_batches, -1)
    found: Numbers = np.max(there + np.maximum(work, work - left * weights @ stages.ranks.T + again), axis=-1)
    return found


def crowded(
    span: Numbers | float, forward: Numbers, backward: Numbers, micro_batches: NDArray[np.int64] | int, pp: int,
    crowding: float,
) -> Numbers | float:  # fmt: skip
    """`span` of a pipeline whose devices share cores (`Cluster.crowding`): a device that waits leaves its share to
    others. No step is shorter than with a core for each device, nor than all work on all cores."""
    if crowding == 1:
        return span
    work = (forward + backward).sum(axis=-1) * micro_batches / pp
    found: Numbers = (work**MEET + (span / crowding) ** MEET) ** (1 / MEET)
    return found


# ---- once a step -----------------------------------------------------------------------------------------------------

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
        return Edges(*(getattr(self, field.name)[places] for field in fields(self)))

    def seconds(self, backward: Numbers | float) -> Numbers:
        """Seconds that no compute hides, without the update. `backward`: seconds that hide sums over replicas."""
        hidden = np.maximum(0.0, backward - self.reductions)
        found: Numbers = self.ends + np.maximum(self.last, self.replicas - hidden) + self.sums + self.outer
        return found


def edges_of(price_list: PriceList, shards: RankShards, content: Content, layout: Layout) -> Edges:
    cluster, of_rank = price_list.cluster, shards.of(content)
    units = [(unit, count) for shard, count in of_rank for unit in shard.units]
    replicas = price_list.span(Axis(layout.dp_replicate, layout.dp_shard * layout.cp * layout.tp))
    is_summed = layout.copies_apart == 1
    over = [
        (sum(collective_seconds(cluster, replicas, call) for call in unit.calls["replicas"] if is_summed), count)
        for unit, count in units
    ]
    sums = sum(
        collective_seconds(cluster, price_list.span(shards.grid.axes[call.axis]), call) for call in sum_calls(of_rank)
    )
    if (call := tied_call(shards, content, layout)) is not None:
        sums += collective_seconds(cluster, price_list.span(Axis(2, layout.world // layout.pp * (layout.pp - 1))), call)
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


def _outer_seconds(price_list: PriceList, layout: Layout, shards: RankShards, held: float, replicas: Span) -> float:
    """Seconds of an outer step: the mean over replicas, and SGD with momentum on the outer weights."""
    width, cluster = shards.shape.master_bytes, price_list.cluster
    mean = mean_calls(int(held), layout.copies_apart, width)
    update = traffic_seconds(cluster.chip, OUTER_TRAFFIC * int(held) * width)
    return sum(collective_seconds(cluster, replicas, call) for call in mean) + float(update)


def tied_call(shards: RankShards, content: Content, layout: Layout) -> Call | None:
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
    took = collective_seconds(cluster, span, transfer_call(prices)) if pp > 1 else 0.0
    return took * cluster.crowding if span.nodes > 1 else took
