"""Changes to the keys of a run file that would make a run fit after it ran out of memory. No torch.

They come from the planner that chooses layouts: the nearest layouts that fit (`explain.py`), the longest rows
(`inverse.py`). If a run needed more than was planned for it, changes must fit by as much more.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.layout import SAID, Layout
from fivefold.core.units import GIB
from fivefold.models.facts import ModelFacts
from fivefold.planner.auto import workload_of
from fivefold.planner.cluster import Cluster
from fivefold.planner.engines import ENGINES
from fivefold.planner.estimate import Estimate, Step
from fivefold.planner.explain import MOST_CURES, cures
from fivefold.planner.inverse import longest_sequence
from fivefold.planner.price import PriceList
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
    lean = prices.repriced(replace(cluster, chip=replace(cluster.chip, memory_gib=budget / GIB)), prices.engine)
    found = [(changed(layout, each.layout), each.layout, workload) for each in cures(lean, own)]
    if len(found) < MOST_CURES:
        with suppress(UserError):
            length = longest_sequence(lean, workload, layout).seq_length
            if length < workload.seq_length:
                found.append((f"data.seq_length={length}", layout, replace(workload, seq_length=length)))
    changes = (Change(text, Step(prices, each, of).estimate()) for text, each, of in found)
    items = step.memory_of(rank // (cluster.world // layout.pp))
    return Relief(own, items, tuple(changes))


def planned(config: RunConfig, cluster: Cluster, facts: ModelFacts) -> Step:
    """The step of a run on a cluster. Raises `UserError` if the planner cannot price it."""
    engine = replace(ENGINES["fivefold"], compiled=config.train.compile is not False)
    return Step(PriceList(facts, cluster, engine), config.layout.resolve(cluster.world), workload_of(config))


def changed(layout: Layout, other: Layout) -> str:
    """Overrides that turn a run's layout into another: `layout.dp_shard=4 layout.tp=2`."""
    pairs = ((said, getattr(layout, name), getattr(other, name)) for name, said in SAID.items())
    return " ".join(f"{said.section}.{said.key}={_written(new)}" for said, old, new in pairs if old != new)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
