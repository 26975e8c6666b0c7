"""Inverse questions: the longest sequence that fits, the fewest devices, the price of a token. No torch.

Only memory decides what fits, so these try the layouts that need little of it, and run no pipeline.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from fivefold.core.errors import UserError, refuse
from fivefold.hardware.cluster import Cluster
from fivefold.parallel import legality
from fivefold.parallel.context.keys import MOST_RING
from fivefold.parallel.features import limits_of
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import MOST_ROWS, MOST_TOKENS, TIGHT, Estimate, Step, Workload
from fivefold.planner.price import PriceList
from fivefold.planner.space import divisors

STEP = 1024  # granularity of lengths, in tokens
BYTES_PER_PARAMETER = 16  # at rest in fp32: the parameter, its gradient, two moments


def longest_sequence(prices: PriceList, workload: Workload, layout: Layout | None = None) -> Estimate:
    """Estimate a step of the longest rows that train on the cluster without being tight, in steps of 1,024 tokens.

    A step keeps about the tokens of `workload`: rows that are twice as long are half as many. It has at least the rows
    that a layout (`layout`, or any) needs: one micro batch for each data rank, and as many as a pipeline takes. Raises
    `UserError` if not even 1,024 tokens fit.
    """
    fixed = None if layout is None else (_legal(prices, layout),)

    def fitting(length: int) -> Iterator[Step]:
        steps = (_step(prices, layout, workload, length) for layout in fixed or leanest(prices, length))
        return (step for step in steps if step.needs <= prices.cluster.chip.memory_bytes * TIGHT)

    units = largest(lambda number: any(True for _ in fitting(number * STEP)), MOST_TOKENS // STEP)
    if not units:
        what = f"{prices.facts.model_class} on {prices.cluster.text} with rows of {STEP:,} tokens"
        raise UserError(
            f"{layout or 'no layout'}: {what} does not fit", fix="use more devices, or devices with more memory"
        )
    return min(fitting(units * STEP), key=lambda step: step.at_least).estimate()


def _legal(prices: PriceList, layout: Layout) -> Layout:
    """Resolve the shards of a layout. Raises `UserError` if it cannot run the model."""
    refuse(layout.against_world(prices.cluster.world, prices.cluster.text))
    layout = layout.resolve(prices.cluster.world)
    refuse(legality.violations(layout, limits_of(prices.facts), world=prices.cluster.world))
    return layout


def _step(prices: PriceList, layout: Layout, workload: Workload, length: int) -> Step:
    """A layout's step with rows of `length`."""
    fewest, multiple = layout.micro_batch_unit
    dealt = layout.micro_batch_size * layout.data_ranks
    rounds = min(round(workload.tokens / (length * dealt * multiple)), MOST_ROWS // (dealt * multiple))
    return Step(prices, layout, Workload(length, dealt * max(fewest, rounds * multiple, multiple)))


def leanest(prices: PriceList, length: int, precision: str = Layout.precision) -> Iterator[Layout]:
    """Yield the layout with the least memory for each legal set of degrees: everything sharded, one row at a time, full
    recompute."""
    limits, cluster = limits_of(prices.facts), prices.cluster
    degrees = divisors(cluster.world)
    for tp, cp, pp in product(degrees, degrees, degrees):
        too_short = tp * cp > 1 and length < 2 * tp * cp
        if tp > cluster.domain or cp > MOST_RING or cluster.world % (tp * cp * pp) or too_short:
            continue
        for ep in degrees if limits.experts else (1,):
            layout = Layout(
                tp=tp, cp=cp, pp=pp, ep=ep, dp_shard=cluster.world // (tp * cp * pp), recompute="full",
                sequence_parallel="sequence_parallel" not in limits.refusals, precision=precision,
            )  # fmt: skip
            if not legality.violations(layout, limits, world=cluster.world):
                yield layout


def fewest_devices(prices: PriceList, workload: Workload) -> Estimate:
    """Estimate a step of `workload` on the fewest devices of the cluster that run it: a part of a node, or whole nodes.

    Raises `UserError` if the whole cluster is too small.
    """
    for cluster in _smaller(prices.cluster):
        if (found := lean_step(prices, cluster, workload)) is not None:
            return found.estimate()
    raise UserError(
        f"no layout of {prices.cluster.text} fits {prices.facts.model_class} with {workload.global_batch_size} rows of "
        f"{workload.seq_length:,} tokens",
        fix="name a larger cluster, or a shorter --seq-length",
    )


def lean_step(
    prices: PriceList, cluster: Cluster, workload: Workload, precision: str = Layout.precision
) -> Step | None:
    """The fastest step on a cluster among the `leanest` layouts that fit; None if none fits."""
    trained = sum(parameter.size for parameter in prices.facts.parameters.values() if parameter.is_trained)
    if cluster.world * cluster.chip.memory_bytes < BYTES_PER_PARAMETER * trained:
        return None
    own = prices.repriced(cluster)
    limits, batch = limits_of(own.facts), workload.global_batch_size
    legal = (
        layout
        for layout in leanest(own, workload.seq_length, precision)
        if not legality.violations(layout, limits, world=cluster.world, batch=batch)
    )
    steps = (step for layout in legal if (step := Step(own, layout, workload)).needs <= cluster.chip.memory_bytes)
    return min(steps, key=lambda step: step.at_least, default=None)


def _smaller(cluster: Cluster) -> Iterator[Cluster]:
    """Clusters with fewer devices, the smallest first, and the cluster itself."""
    for devices in divisors(cluster.devices_per_node)[:-1]:
        yield replace(cluster, nodes=1, devices_per_node=devices)
    for nodes in range(1, cluster.nodes + 1):
        yield replace(cluster, nodes=nodes)


def cost_per_million_tokens(estimate: Estimate, per_device_hour: float, seconds: float | None = None) -> float:
    """Cost of training on a million tokens, in the currency of `per_device_hour`. `seconds`: of a step, if not the
    estimate's own."""
    device_hours = estimate.layout.world * (estimate.step_seconds if seconds is None else seconds) / 3600
    return per_device_hour * device_hours / estimate.workload.tokens * 1e6


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 0 to `most` for which `holds` is true. `holds` must be true for all numbers below it."""
    high = 1
    while high <= most and holds(high):
        high *= 2
    low, high = high // 2, min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
