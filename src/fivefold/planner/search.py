"""`plan`: every legal layout of a cluster, ranked. No torch.

Layouts that cannot run are left out by the rules that refuse them at the start of a run (`core/legality.py`). Of the
others the busiest pipeline rank's work is priced, which bounds the step from below; the pipeline itself is run slot by
slot for those that may still be among the best.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from fivefold.core import legality
from fivefold.core.errors import UserError
from fivefold.core.layout import Layout
from fivefold.core.legality import ModelLimits
from fivefold.parallel.limits import limits_of
from fivefold.planner.estimate import Estimate, Step, Workload
from fivefold.planner.price import PriceList

MOST_MICRO_BATCH = 16  # rows of a forward pass: more of them make no matmul faster
NEAR = 0.02  # two layouts whose times are this close are tied: the simpler one comes first
SIMULATED = 200  # layouts whose pipeline is run slot by slot, beyond those that are asked for


@dataclass(frozen=True, kw_only=True)
class Found:
    """`best`: estimates, best first. `legal`: layouts that can run. `fitting`: those that fit the memory."""

    best: tuple[Estimate, ...]
    legal: int
    fitting: int
    closest: Estimate | None = None


def layouts(
    limits: ModelLimits, world: int, devices_per_node: int, batch: int, *, has_experts: bool
) -> Iterator[Layout]:
    """Every layout worth pricing. Tensor parallelism stays inside a node: over the network it loses everywhere that it
    was measured."""
    divisors = [each for each in range(1, world + 1) if world % each == 0]
    tps = [each for each in divisors if each <= devices_per_node]
    most_pp = limits.layers or 1
    for tp, cp, pp in product(tps, divisors, divisors):
        if world % (tp * cp * pp) or pp > most_pp:
            continue
        data = world // (tp * cp * pp)
        basis = Layout(tp=tp, cp=cp, pp=pp, dp_shard=data)
        if any((*legality.of_heads(basis, limits), *legality.of_layers(basis, limits))):
            continue
        for shard in (each for each in divisors if data % each == 0):
            degrees = replace(basis, dp_replicate=data // shard, dp_shard=shard)
            yield from _options(degrees, limits, batch, has_experts=has_experts)


def _options(degrees: Layout, limits: ModelLimits, batch: int, *, has_experts: bool) -> Iterator[Layout]:
    """The execution options of a layout's degrees."""
    ranks = degrees.expert_ranks
    eps = [ep for ep in range(1, ranks + 1) if ranks % ep == 0] if has_experts else [1]
    zeros = (3, 2, 1) if degrees.dp_shard * degrees.cp > 1 else (3,)
    rows = [each for each in (1, 2, 4, 8, MOST_MICRO_BATCH) if batch % (each * degrees.data_ranks) == 0]
    for ep, zero, rows_each, recompute, (schedule, virtual) in product(
        eps, zeros, rows, ("none", "full"), _schedules(degrees, limits)
    ):
        layout = replace(
            degrees, ep=ep, zero=zero, micro_batch_size=rows_each, recompute=recompute, pp_schedule=schedule,
            pp_virtual=virtual,
        )  # fmt: skip
        if not legality.violations(layout, limits, world=layout.world, batch=batch):
            yield layout


def _schedules(degrees: Layout, limits: ModelLimits) -> list[tuple[str, int]]:
    """(schedule, stages a rank). The gradients of weights of compiled blocks are not put off, so that the schedules
    which split backward gain nothing: see docs/pipeline.md."""
    if degrees.pp == 1:
        return [("1f1b", 1)]
    most = (limits.layers or 1) // degrees.pp
    return [("1f1b", 1), *(("interleaved", each) for each in (2, 4, 8) if each <= most)]


def simplicity(layout: Layout) -> tuple[int, ...]:
    """The simpler layout comes first: data parallelism before tensor parallelism, and that before context and
    the pipeline; then fewer options."""
    return (
        layout.pp, layout.cp, layout.tp, layout.ep, layout.dp_replicate, 3 - layout.zero,
        layout.recompute != "none", layout.pp_virtual, layout.micro_batch_size,
    )  # fmt: skip


def search(prices: PriceList, workload: Workload, *, top: int = 10) -> Found:
    """The best layouts. Raises `UserError` where no layout is legal."""
    cluster, limits = prices.cluster, limits_of(prices.facts)
    legal, fitting, smallest = 0, list[tuple[float, Step]](), None
    memory = cluster.chip.memory_bytes
    candidates = layouts(
        limits, cluster.world, cluster.domain, workload.global_batch_size, has_experts=bool(prices.facts.experts)
    )
    for layout in candidates:
        legal += 1
        step = Step(prices, layout, workload)
        if step.needs <= memory:
            fitting.append((step.at_least, step))
        elif smallest is None or step.needs < smallest.needs:
            smallest = step
    if not legal:
        raise UserError(
            f"no layout of {cluster.text} runs {prices.facts.model_class} with global_batch_size "
            f"{workload.global_batch_size}",
            fix="a multiple of the devices is a good global batch size",
        )
    fitting.sort(key=lambda each: (each[0], simplicity(each[1].layout)))
    found = list[Estimate]()
    for at_least, step in fitting:
        times = sorted(each.step_seconds for each in found)
        if len(found) >= top and (at_least > times[top - 1] * (1 + NEAR) or len(found) >= top + SIMULATED):
            break
        found.append(step.estimate())
    closest = None if fitting or smallest is None else smallest.estimate()
    return Found(best=tuple(ranked(found)[:top]), legal=legal, fitting=len(fitting), closest=closest)


def ranked(found: list[Estimate]) -> list[Estimate]:
    """Fastest first; of layouts within `NEAR` of the fastest of those that are left, the simplest first."""
    left, order = sorted(found, key=lambda each: each.step_seconds), list[Estimate]()
    while left:
        near = [each for each in left if each.step_seconds <= left[0].step_seconds * (1 + NEAR)]
        order += sorted(near, key=lambda each: simplicity(each.layout))
        left = left[len(near) :]
    return order
