"""Changes to the keys of a run file that would make a run fit after it ran out of memory. No torch.

They come from the planner that chooses layouts: the nearest layouts that fit (`explain.py`), the longest rows
(`inverse.py`). If a run needed more than was planned for it, changes must fit by as much more.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.units import GIB
from fivefold.hardware.cluster import Cluster
from fivefold.models.facts import ModelFacts
from fivefold.parallel.layout import KEYS, Layout
from fivefold.parallel.memory import BETWEEN_STEPS, REST
from fivefold.planner.auto import workload_of
from fivefold.planner.estimate import Estimate, Step
from fivefold.planner.explain import MOST_CURES, cures
from fivefold.planner.inverse import longest_sequence
from fivefold.planner.price import PriceList
from fivefold.planner.rank_memory import OUTSIDE
from fivefold.planner.report import seconds_text

LESS = 0.97  # of the planned bytes: a change may need at most this much
MOST_MORE = 2.0  # times the planned bytes: a run that needs more does something that no plan knows


@dataclass(frozen=True)
class Change:
    """A change of the run file. `overrides`: as the command line takes them: `memory.recompute=full`."""

    overrides: str
    estimate: Estimate

    def __str__(self) -> str:
        has = self.estimate.cluster.chip.memory_gib
        seconds = seconds_text(self.estimate.step_seconds)
        return f"{self.estimate.reserved / GIB:6.1f} of {has:.1f} GiB, {seconds:>5} s a step:  {self.overrides}"


@dataclass(frozen=True)
class Relief:
    """Remedies of a run. `planned`: the run as it is; `items`: bytes of the rank by item. `changes`: fastest first."""

    planned: Estimate
    items: dict[str, float]
    changes: tuple[Change, ...]


def relief(config: RunConfig, cluster: Cluster, facts: ModelFacts, *, rank: int = 0, needed: float = 0) -> Relief:
    """Find remedies for a run whose global rank `rank` ran out of memory with `needed` bytes of its device, or about to
    have them; 0 if unknown. Raises `UserError` if the planner cannot price the run."""
    step = planned(config, cluster, facts)
    prices, layout, workload = step.price_list, step.layout, step.workload
    own, has = step.estimate(), cluster.chip.memory_bytes
    # Example: 70 GiB planned, 84 needed, 80 available. A change planned with 66 is taken to need 79.
    more = min(max(needed / own.reserved, 1.0), MOST_MORE)
    budget = min(has / more, LESS * own.reserved)
    lean = prices.repriced(replace(cluster, chip=replace(cluster.chip, memory_gib=budget / GIB)))
    found = [(changed(layout, cure.layout), cure.layout, workload) for cure in cures(lean, own)]
    if len(found) < MOST_CURES:
        with suppress(UserError):
            length = longest_sequence(lean, workload, layout).seq_length
            if length < workload.seq_length:
                found.append((f"data.seq_length={length}", layout, replace(workload, seq_length=length)))
    changes = (Change(text, Step(prices, layout, of).estimate()) for text, layout, of in found)
    items = step.memory_of(rank // (cluster.world // layout.pp))
    return Relief(own, items, tuple(changes))


def planned(config: RunConfig, cluster: Cluster, facts: ModelFacts) -> Step:
    """The step of a run on a cluster. Raises `UserError` if the planner cannot price it."""
    prices = PriceList(facts, cluster, config.objective.is_own, compiled=config.train.compile is not False)
    return Step(prices, config.layout.resolve(cluster.world), workload_of(config))


def changed(layout: Layout, other: Layout) -> str:
    """Overrides that turn a run's layout into another: `layout.dp_shard=4 layout.tp=2`."""
    pairs = ((key, getattr(layout, name), getattr(other, name)) for name, key in KEYS.items())
    return " ".join(f"{key.place}={_written(new)}" for key, old, new in pairs if old != new)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- in words --------------------------------------------------------------------------------------------------------


def table(told: Relief, there: Mapping[str, float]) -> Iterator[str]:
    """Yield lines of GiB by item: planned, and `there`, measured. Torch does not say what the other tensors are."""
    rest = {name: size for name, size in told.items.items() if name not in (*BETWEEN_STEPS, *OUTSIDE)}
    planned = {name: told.items.get(name, 0.0) for name in BETWEEN_STEPS} | {REST: sum(rest.values())}
    planned |= {name: told.items.get(name, 0.0) for name in OUTSIDE}
    yield f"  {'GiB':<24} {'there':>8} {'planned':>8}" if there else f"  {'GiB':<33} {'planned':>8}"
    for name in (*planned, *(kind for kind in there if kind not in planned)):
        seen = f"{there[name] / GIB:8.2f}" if name in there else " " * 8
        own = f"{planned[name] / GIB:8.2f}" if name in planned else ""
        largest = sorted(rest, key=lambda kind: -rest[kind])[:3] if name == REST else ()
        parts = ", ".join(f"{kind} {rest[kind] / GIB:.2f}" for kind in largest if rest[kind] > 0)
        yield f"  {_WORDS.get(name, name):<24} {seen} {own}{f'  {parts}' if parts else ''}".rstrip()
    total = sum(planned.values())
    before = f"{sum(there.values()) / GIB:8.2f}" if "allocator" in there else " " * 8
    has = told.planned.cluster.chip
    guess = ", whose table is a guess" if has.is_guess else ""
    yield f"  {'all':<24} {before} {total / GIB:8.2f}  of {has.memory_gib:.2f} GiB of {has.name}{guess}"


_WORDS = {"allocator": "kept by the allocator", "runtime": "outside of torch"}


def changes(told: Relief) -> Iterator[str]:
    """Yield lines with the changes that would make it fit."""
    if not told.changes:
        yield "nothing small makes it fit: take more devices, or devices with more memory (fivefold plan says which)"
        return
    if told.planned.fits:
        yield "as planned it fits: something else may hold memory here, or needs more than was planned"
    now = seconds_text(told.planned.step_seconds)
    yield f"these would fit, the fastest first, as planned (a step takes {now} s as it is):"
    yield from map(str, told.changes)
