"""Sums of prices over the stages and the ranks of a pipeline, for one layout or for many at once. No torch.

The last dimension of an array counts parts (kinds of layers, embedding, head), stages, or pipeline ranks. Dimensions
before it, if any, count layouts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from fivefold.core.schedule import Kind
from fivefold.planner.flow import Gathers
from fivefold.planner.parts import LayerPrice, Numbers, Prices, Shard, Shards, Stages
from fivefold.planner.traits import Traits

Places = NDArray[np.int64] | int | tuple[NDArray[np.int64], ...]
ROUNDING = 1e-9  # of sums in a different order
MEET = 4  # sharpness of the smooth maximum of a crowded pipeline's two bounds: judgement


def data_seconds(work: "Work", sent: "Sent", stages: Stages, of: Gathers, *, overlaps: bool) -> tuple[Numbers, Numbers]:
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
        """The entries at `places`."""
        return Work(*(getattr(self, field.name)[places] for field in fields(self)))


@dataclass(frozen=True, eq=False)
class Sent:
    """Seconds of one gather, of one reduction, and of one gather from the secondary copy, of each part's units."""

    gather: Numbers
    reduce: Numbers
    near: Numbers

    @staticmethod
    def of(shards: Sequence[Shards]) -> "Sent":
        """Stack shards: [one for each of `shards`, part]. The head is in the model's own unit, which stays gathered."""
        units = [[unit.units for unit in (*shard.layers, shard.embedding, Shard())] for shard in shards]
        return Sent(
            np.array([[sum(unit.gather_seconds for unit in part) for part in parts] for parts in units]),
            np.array([[sum(unit.reduce_seconds for unit in part) for part in parts] for parts in units]),
            np.array([[sum(unit.near_seconds for unit in part) for part in parts] for parts in units]),
        )

    def at(self, places: Places) -> "Sent":
        """The entries at `places`."""
        return Sent(self.gather[places], self.reduce[places], self.near[places])


def passes(work: Work, sent: Sent, stages: Stages, of: Gathers, traits: Traits) -> tuple[Numbers, Numbers]:
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
