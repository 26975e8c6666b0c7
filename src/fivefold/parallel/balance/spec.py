"""Balance of experts: collectives, edits of modules, and bytes of routers. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from fivefold.models.facts import Experts
from fivefold.parallel.collectives import Call, StepShape
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.ranks import tokens_by_rank
from fivefold.parallel.step import Step


def calls(step: Step) -> Iterator[Call]:
    """Yield one all-reduce a step for the counts of all routers. If the tokens of a row lie on several ranks (sequence
    or context parallelism), a loss for uneven load or a capacity also needs a collective for each router."""
    plan, shape = step.plan, step.shape
    if not plan.watches_routers:
        return
    numbers = sum(router_numbers(block) for block in plan.facts.experts)
    yield Call(axis="world", kind="all_reduce", bytes=8 * numbers, phase="step")
    axes = [*([("tp", plan.layout.tp)] if plan.splits_sequence else []), ("cp", plan.layout.cp)]
    for block in plan.experts:
        for axis, _ in axes if shape.balances_load else ():
            yield from step.forwards(axis, "all_reduce", 8 * shape.rows * block.experts, block.name)
        size = 8 * shape.rows * block.experts * _slots(plan, shape)
        for axis, ranks in axes if shape.has_capacity else ():
            size *= ranks
            yield from step.forwards(axis, "all_gather", size, block.name)


def router_numbers(experts: Experts) -> int:
    """Numbers counted for one router: tokens of each expert, two losses, dropped picks."""
    return experts.experts + 3


def _slots(plan: ParallelPlan, shape: StepShape) -> int:
    """Number of blocks of a row on the rank that has most."""
    cp = plan.layout.cp
    return max(map(len, tokens_by_rank(shape.tokens * cp, cp, plan.sequence_ranks)))


@dataclass(frozen=True)
class WatchRouter(Edit):
    kind = "hook"
    experts: Experts


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    for block in plan.facts.experts if plan.watches_routers else ():
        yield WatchRouter(block.router, "balance", "what experts get is counted, and held even", block)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def buffer_bytes(buffers: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of the routers' buffers, in fp32; `buffers`: their shapes."""
    return 4 * sum(map(prod, buffers.values()))
