"""Failure arithmetic: from the mean time between failures of a device to `checkpoint.every` and goodput. No torch.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval (CACM, 1974); J. T. Daly, A higher
order estimate of the optimum checkpoint interval for restart dumps (FGCS, 2006). Failures are independent and have no
memory, so that N devices fail N times as often as one, and any of them ends the step of all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp, expm1, sqrt

from fivefold.core.units import human_bytes
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.planner.estimate import Estimate, PricedStep
from fivefold.planner.price import PriceList
from fivefold.report.findings import Cell, Column, Notes, Row, Section, Table

HANG_SECONDS = 605  # default of train.collective_timeout, and five seconds until the rank is named


def best_interval(stall: float, between: float) -> float:
    """Seconds of training between two checkpoints that waste the least time (Daly 2006, its higher order).

    `stall`: seconds that training stands still for a checkpoint. `between`: mean seconds between failures. Young's
    sqrt(2 * stall * between) is its first term.
    """
    if stall >= 2 * between:
        return between
    part = stall / (2 * between)
    return sqrt(2 * stall * between) * (1 + sqrt(part) / 3 + part / 9) - stall


def goodput(trained: float, stall: float, lost: float, between: float) -> float:
    """Share of all time that is spent on steps which count (Daly 2006, its complete model).

    `trained`: seconds of steps between two checkpoints. `stall`: seconds of a checkpoint. `lost`: seconds of each
    failure besides the steps since the last checkpoint began. A failure may strike at any moment of these, too.
    """
    try:
        return trained / (between * exp(lost / between) * expm1((trained + stall) / between))
    except OverflowError:  # failures come faster than anything is done
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Cost of failures under one layout, in seconds.

    `between`: mean time between failures of the whole cluster. `stall`: training stands still for a checkpoint, by
    item. `write`: from then on, until the checkpoint counts. `restart`: from a failure to the next step, by item.
    `storage`: bytes a second of all nodes together.
    """

    step: float
    between: float
    checkpoint_bytes: int
    stall: Mapping[str, float]
    write: float
    restart: Mapping[str, float]
    storage: float

    @cached_property
    def every(self) -> int:
        """Steps between checkpoints (`checkpoint.every`). A save waits for the write of the one before it."""
        steps = best_interval(self.stall_seconds, self.between) / self.step
        return max(round(steps), ceil(self.write / self.step), 1)

    @property
    def stall_seconds(self) -> float:
        return sum(self.stall.values())

    @property
    def restart_seconds(self) -> float:
        return sum(self.restart.values())

    @property
    def lost_seconds(self) -> float:
        """Mean seconds of steps that a failure undoes: half an interval, and the write of the newest checkpoint."""
        return (self.every * self.step + self.stall_seconds) / 2 + self.write

    @property
    def goodput(self) -> float:
        """Share of all time spent on steps that count."""
        return self.goodput_at(self.every)

    @property
    def goodput_of_hangs(self) -> float:
        """The same where no failure is seen before `train.collective_timeout`."""
        return self.goodput_at(self.every, HANG_SECONDS)

    def goodput_at(self, every: int, unseen: float = 0.0) -> float:
        """Goodput with another number of steps between checkpoints; `unseen`: seconds until a failure is seen."""
        lost = self.restart_seconds + unseen + self.write
        return goodput(every * self.step, self.stall_seconds, lost, self.between)

    def to_json(self) -> dict[str, object]:
        return {
            "checkpoint_every": self.every, "goodput": self.goodput, "goodput_of_hangs": self.goodput_of_hangs,
            "between_seconds": self.between, "checkpoint_bytes": self.checkpoint_bytes, "stall": dict(self.stall),
            "storage_bytes_per_second": self.storage,
            "write_seconds": self.write, "lost_seconds": self.lost_seconds, "restart": dict(self.restart),
        }  # fmt: skip


def failures(prices: PriceList, estimate: Estimate, mtbf_hours: float) -> Failures:
    """Failures of a cluster whose devices each fail once in `mtbf_hours`, with asynchronous saves."""
    step = PricedStep(prices, estimate.layout, estimate.workload)
    cluster, layout, failure = prices.cluster, estimate.layout, prices.cluster.node.failure
    whole, held = checkpoint_bytes(step), max(_saved(step, rank) for rank in range(layout.pp))
    speed = cluster.node.storage.bytes_per_second(cluster.nodes)
    # The first copy of the shards writes: with dp_replicate, on a part of the nodes.
    writers = max(1, cluster.nodes // layout.dp_replicate)
    write = whole / cluster.node.storage.bytes_per_second(writers)
    return Failures(
        step=estimate.step_seconds,
        between=mtbf_hours * 3600 / cluster.world,
        checkpoint_bytes=whole,
        stall={"copy to host memory": held / (cluster.chip.host_gbs * 1e9), "ranks meet, checks": failure.save_seconds},
        write=2 * write,  # written, and read back
        restart={
            "detect and replace": failure.replace_seconds,
            "start processes": failure.start_seconds,
            "set up communicators": failure.meet_ms / 1e3 * cluster.world,
            "verify the checkpoint": whole / speed,
            "read the checkpoint": held * cluster.world / speed,
        },
        storage=speed,
    )


def checkpoint_bytes(step: PricedStep) -> int:
    prices, shape = step.price_list, step.shards.shape
    placement = lower(prices.facts, step.layout, 0).placement
    trained = [name for name, parameter in prices.facts.parameters.items() if parameter.is_trained]
    return placement.checkpoint_bytes(trained * len(shape.optimizer.state), shape.master_bytes)


def _saved(step: PricedStep, pp_rank: int) -> int:
    """Bytes of weights and optimizer state on a rank of the pipeline rank."""
    shape = step.shards.shape
    units = [(unit, count) for shard, count in step.shards.of(step.stages.contents[pp_rank]) for unit in shard.units]
    numbers = sum((unit.trained if step.price_list.facts.has_adapter else unit.held) * count for unit, count in units)
    return numbers * shape.master_bytes + sum(unit.state * count for unit, count in units) * len(shape.optimizer.state)


# ---- in words --------------------------------------------------------------------------------------------------------

WIDTH = 30  # characters of a layout in one line


def failure_sections(costs: Mapping[Layout, Failures]) -> Iterator[Section]:
    if not costs:
        return
    layout, first = next(iter(costs.items()))
    title = f"One failure in {duration(first.between)} of the whole cluster"
    yield Section([_table(costs), Notes(list(_told(layout, first)))], title)


def _table(costs: Mapping[Layout, Failures]) -> Table:
    columns = [
        Column("layout", "name", folds="+", most=WIDTH),
        Column("checkpoint\n.every", "n", "checkpoint.every"),
        Column("that is", "n"),
        Column("lost a\nfailure", "n", "lost a failure"),
        Column("restart", "n"),
        Column("goodput\n%", "n", "goodput %"),
    ]
    rows = [
        Row([
            Cell(str(layout)), Cell(f"{cost.every:,}"), Cell(duration(cost.every * cost.step)),
            Cell(duration(cost.lost_seconds)), Cell(duration(cost.restart_seconds)), Cell(f"{100 * cost.goodput:.1f}"),
        ])
        for layout, cost in costs.items()
    ]  # fmt: skip
    return Table(columns, rows, is_narrow=True)


def _told(layout: Layout, cost: Failures) -> Iterator[str]:
    """Sentences about the first layout: what its numbers are made of."""
    size, written = human_bytes(cost.checkpoint_bytes), duration(cost.write)
    yield f"a checkpoint of {layout}: {size}, training stands still for {_items(cost.stall)}"
    yield f"it is written and read back in {written}, with storage at {cost.storage / 1e9:,.0f} GB/s in all"
    yield f"a restart: {_items(cost.restart)}"
    hangs = f"{100 * cost.goodput_of_hangs:.1f} % if each failure only hangs ({HANG_SECONDS} s until it is named)"
    yield f"goodput (Young 1974, Daly 2006): steps that count, of all time; {hangs}"


def _items(items: Mapping[str, float]) -> str:
    return f"{duration(sum(items.values()))} (" + ", ".join(f"{name} {duration(s)}" for name, s in items.items()) + ")"


def duration(seconds: float) -> str:
    """`0.4 s`, `12 min`, `3.1 h`, `5.2 days`: the largest unit of which there is one or more."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"
