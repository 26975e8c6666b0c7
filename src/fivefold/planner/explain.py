"""Questions about layouts: what would fit (the longest rows, the fewest devices), why one takes its time or loses to
another, and the changes that would make it fit. No torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any

from fivefold.core.errors import UserError, refuse
from fivefold.core.units import GIB
from fivefold.hardware.cluster import Cluster
from fivefold.parallel import legality
from fivefold.parallel.context.keys import MOST_RING
from fivefold.parallel.features import limits_of
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import MOST_ROWS, MOST_TOKENS, TIGHT, Estimate, Item, PricedStep, Workload
from fivefold.planner.price import PriceList
from fivefold.planner.search import NEAR
from fivefold.planner.space import divisors
from fivefold.planner.timing import LIKELY, spread

# ---- what fits: memory alone decides, so no pipeline is run ----------------------------------------------------------

STEP = 1024  # granularity of lengths, in tokens
BYTES_PER_PARAMETER = 16  # at rest in fp32: the parameter, its gradient, two moments


def longest_sequence(prices: PriceList, workload: Workload, layout: Layout | None = None) -> Estimate:
    """Estimate a step of the longest rows that train on the cluster without being tight, in steps of 1,024 tokens.

    A step keeps about the tokens of `workload`: rows that are twice as long are half as many. It has at least the rows
    that a layout (`layout`, or any) needs: one micro batch for each data rank, and as many as a pipeline takes. Raises
    `UserError` if not even 1,024 tokens fit.
    """
    fixed = None if layout is None else (_legal(prices, layout),)

    def fitting(length: int) -> Iterator[PricedStep]:
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


def _step(prices: PriceList, layout: Layout, workload: Workload, length: int) -> PricedStep:
    fewest, multiple = layout.micro_batch_unit
    dealt = layout.micro_batch_size * layout.data_ranks
    rounds = min(round(workload.tokens / (length * dealt * multiple)), MOST_ROWS // (dealt * multiple))
    return PricedStep(prices, layout, Workload(length, dealt * max(fewest, rounds * multiple, multiple)))


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
) -> PricedStep | None:
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
    steps = (step for layout in legal if (step := PricedStep(own, layout, workload)).needs <= cluster.chip.memory_bytes)
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


# ---- reasons, and changes --------------------------------------------------------------------------------------------

USEFUL = ("matmuls", "attention")  # time that the model itself needs
MOST_CURES = 3
# Tried only if nothing else fits: copies to host memory are slow, and state in fewer bytes is rounded.
OFFLOADS: tuple[dict[str, Any], ...] = (
    {"offload_activations": True},
    {"offload_optimizer": True},
    {"offload_activations": True, "offload_optimizer": True},
    {"offload_activations": True, "offload_optimizer": True, "offload_parameters": True},
)
ROUNDED: tuple[dict[str, Any], ...] = ({"state_dtype": "bf16"}, {"state_dtype": "8bit"})
MOST_HALVES = 2 * 10**5  # halves of a GiB: a budget that nothing exceeds
TIMES_NODES = (2, 4, 8, 16, 32, 64)  # factors of the nodes, tried until a layout fits


@dataclass(frozen=True)
class Difference:
    """An item of time in which two layouts differ. `seconds`: how much longer it takes in the first. `share`: relative
    to the other's step; 0.1 is 10 %."""

    item: str
    seconds: float
    share: float


def binds(estimate: Estimate) -> Item:
    """The largest item of a step's time that another layout or faster hardware could avoid."""
    return max((row for row in _time(estimate) if row.item not in USEFUL), key=lambda row: row.amount)


def slower_by(estimate: Estimate, other: Estimate) -> tuple[Difference, ...]:
    """Items of time in which a layout differs from another, largest loss first. They add up to the difference of the
    two steps."""
    own, others = ({row.item: row.amount for row in _time(one)} for one in (estimate, other))
    found = [(item, own.get(item, 0.0) - others.get(item, 0.0)) for item in dict.fromkeys((*own, *others))]
    whole = other.step_seconds
    return tuple(Difference(item, more, more / whole) for item, more in sorted(found, key=lambda pair: -pair[1]))


def tied(one: Estimate, other: Estimate) -> bool:
    """True if two steps are near, or differ by less than the uncertainty of their difference. Errors of common terms
    are shared and cancel."""
    differs = {row.item: row.seconds for row in slower_by(one, other)}
    unsure = LIKELY * spread(differs, other.cluster.chip.doubt)
    return abs(one.step_seconds - other.step_seconds) <= max(NEAR * other.step_seconds, unsure)


def cures(prices: PriceList, estimate: Estimate) -> tuple[Estimate, ...]:
    """Find the changes that would make a layout fit, at most three: its neighbours that fit, the fastest first.

    A neighbour differs in one option, or doubles one degree at the cost of data parallelism. If fewer than three fit,
    neighbours of neighbours are tried, and theirs. Tight ones count only if all that fit are tight. If no neighbour
    fits, offload and then rounded state are tried. Instead of a change of recompute alone, a budget is named if it is
    faster. Empty if layouts that fit are further off.
    """
    has, seen, asked = prices.cluster.chip.memory_bytes, {estimate.layout}, [estimate.layout]
    fitting, easily = list[PricedStep](), list[PricedStep]()
    for _ in range(3):
        asked = [
            neighbour for layout in asked for neighbour in neighbours(prices, layout, estimate) if neighbour not in seen
        ]
        asked = list(dict.fromkeys(asked))
        seen |= set(asked)
        steps = sorted((PricedStep(prices, layout, estimate.workload) for layout in asked), key=lambda step: step.needs)
        fitting += [step for step in steps if step.needs <= has]
        easily = [step for step in fitting if step.needs <= has * TIGHT]
        if len(easily) >= MOST_CURES:
            break
        asked = [step.layout for step in steps if step.needs > has * TIGHT][:MOST_CURES]
    if not fitting:
        fitting = list(_last_resorts(prices, [estimate.layout, *asked], estimate.workload))
        easily = [step for step in fitting if step.needs <= has * TIGHT]
    found = sorted(easily or fitting, key=lambda step: step.seconds)
    again = [step for step in found if replace(step.layout, recompute="none") == estimate.layout]
    if again and (budget := budgeted(again[0], has * TIGHT if easily else has)) is not None:
        found = sorted([*(step for step in found if step not in again), budget], key=lambda step: step.seconds)
    return tuple(step.estimate() for step in found[:MOST_CURES])


def budgeted(step: PricedStep, most: float) -> PricedStep | None:
    """Replace `selective` or `full` by the largest budget, in halves of a GiB, with which a device has at most `most`
    bytes taken. None if that is not faster, and if nothing is recomputed."""
    layout = step.layout
    if layout.recompute not in ("selective", "full"):
        return None

    def of(halves: int) -> PricedStep:
        return replace(step, layout=replace(layout, recompute=f"{halves / 2:g}GiB"))

    if of(MOST_HALVES).seconds > step.seconds * (1 - NEAR):  # even without recompute
        return None
    # No budget below what full recompute keeps can be kept: `needs` is then infinite.
    halves = largest(lambda halves: not most < of(halves).needs < inf, MOST_HALVES)
    found = of(halves)
    is_one = halves < MOST_HALVES and found.needs <= most
    return found if is_one and found.seconds < step.seconds * (1 - NEAR) else None


def proposal(estimates: Sequence[Estimate], prices: PriceList, fastest: float) -> Estimate | None:
    """The fastest of `estimates` with a budget of recompute in which no device is tight; None if no such step is
    shorter than `fastest` seconds by more than `NEAR`."""
    most, enough, found = prices.cluster.chip.memory_bytes * TIGHT, fastest * (1 - NEAR), list[PricedStep]()
    for estimate in estimates:
        step = PricedStep(prices, estimate.layout, estimate.workload)
        if replace(step, layout=replace(step.layout, recompute="none")).at_least >= enough:
            continue  # not fast enough even without recompute
        if (budget := budgeted(step, most)) is not None and budget.seconds < enough:
            found.append(budget)
    return min(found, key=lambda step: step.seconds).estimate() if found else None


def _last_resorts(prices: PriceList, layouts: Sequence[Layout], workload: Workload) -> Iterator[PricedStep]:
    """Steps that fit with state or activations in host memory (not on a CPU), or else with rounded state."""
    chip = prices.cluster.chip
    for options in (() if chip.is_host else OFFLOADS, ROUNDED):
        found = False
        for layout, option in product(layouts, options):
            with suppress(UserError):  # a shard would split a block of 8-bit state
                step = PricedStep(prices, replace(layout, **option), workload)
                if step.needs <= chip.memory_bytes:
                    found = True
                    yield step
        if found:
            return


def neighbours(prices: PriceList, layout: Layout, estimate: Estimate) -> list[Layout]:
    """Legal layouts that need less memory in one respect."""
    limits, world, batch = limits_of(prices.facts), prices.cluster.world, estimate.workload.global_batch_size
    return [
        candidate
        for candidate in _changed(layout, prices.cluster)
        if not legality.violations(candidate, limits, world=world, batch=batch)
    ]


def _changed(layout: Layout, cluster: Cluster) -> Iterator[Layout]:
    """Layouts with one change each. A dimension grows at the cost of data parallelism: replicas first, then shards."""
    if layout.recompute == "none":
        yield replace(layout, recompute="selective")
    if layout.recompute in ("none", "selective"):
        yield replace(layout, recompute="full")
    if not cluster.chip.is_host:  # a CPU's memory is the host's
        if not layout.offload_activations:
            yield replace(layout, offload_activations=True)
        if not layout.offload_optimizer:
            yield replace(layout, offload_optimizer=True)
    if layout.micro_batch_size > 1:
        yield replace(layout, micro_batch_size=layout.micro_batch_size // 2)
    if layout.zero < 3:
        yield replace(layout, zero=layout.zero + 1)
        yield replace(layout, zero=3)
    if layout.hpz:
        yield replace(layout, hpz=0)
    if layout.dp_replicate > 1:
        yield replace(layout, dp_replicate=1, dp_shard=layout.data_ranks)
    if not layout.sequence_parallel:
        yield replace(layout, sequence_parallel=True)
    if layout.pp > 1 and layout.schedule.splits_backward:
        yield replace(layout, pp_schedule="1f1b", pp_virtual=1)
    fewer = [(name, getattr(layout, name)) for name in ("dp_replicate", "dp_shard")]
    lost = next(({name: size // 2} for name, size in fewer if size % 2 == 0), None)
    if lost is None:
        return
    if layout.tp * 2 <= cluster.domain:
        yield replace(layout, tp=layout.tp * 2, **lost)
    yield replace(layout, cp=layout.cp * 2, **lost)
    yield replace(layout, pp=layout.pp * 2, **lost)
    yield replace(layout, ep=layout.ep * 2)


def _time(estimate: Estimate) -> Iterator[Item]:
    return (row for row in estimate.rows if row.part == "time")


def too_large(prices: PriceList, workload: Workload, closest: Estimate | None) -> UserError:
    """Error for a model that fits nowhere: the excess of the smallest layout, `closest`, and what would fit."""
    if closest is None:
        return UserError("no layout fits")
    has, needs = (size / GIB for size in (closest.cluster.chip.memory_bytes, closest.reserved))
    return UserError(
        f"no layout fits on {closest.cluster.text}: the smallest, {closest.layout}, needs {needs:.1f} GiB of "
        f"{has:.1f} a device, {needs - has:.1f} too many",
        fix="; ".join(_what_fits(prices, workload, closest)) or "take a smaller model, or devices with more memory",
    )


def _what_fits(prices: PriceList, workload: Workload, closest: Estimate) -> Iterator[str]:
    """Remedies, as far as each helps: calibration if the memory is a guess, shorter rows, offload, more nodes."""
    if closest.cluster.chip.is_guess:
        yield "measure this machine, of whose memory the table is a guess: fivefold calibrate"
    with suppress(UserError):
        shorter = longest_sequence(prices, workload, closest.layout).workload.seq_length
        yield f"rows of {shorter:,} tokens fit, with {closest.layout}"
    for other in _last_resorts(prices, [closest.layout], workload):
        yield f"{other.layout} fits, with a step of {other.seconds:.3g} s"
        break
    for times in TIMES_NODES:
        cluster = replace(prices.cluster, nodes=prices.cluster.nodes * times)
        step = lean_step(prices, cluster, workload, closest.layout.precision)
        if step is not None:
            yield f"{cluster.text} is large enough, with {step.layout}"
            return
