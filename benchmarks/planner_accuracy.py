"""The planner held against published measurements: how far its throughput and its memory are off, and what its choice
of a layout would have cost.

    python -m benchmarks.planner_accuracy --published DIR            the tables, and results/planner_accuracy.json
    python -m benchmarks.planner_accuracy --fit nanotron             the constants of a trainer and its cluster, fitted

Constants are fitted on one half of the rows, chosen by a hash of the row, and the tables say both halves. No row is a
special case.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.engines import ENGINES, Engine, TrainerPrices, TrainerStep
from benchmarks.published import Measured, folder_of, read
from numpy.typing import NDArray

import fivefold
from benchmarks import engines
from fivefold.core.errors import UserError
from fivefold.hardware.cluster import Cluster
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Estimate, PricedStep, Workload
from fivefold.planner.plan import Model, as_layout, as_workload, price_list
from fivefold.planner.rank_memory import OUTSIDE
from fivefold.planner.timing import Interval, step_interval

Vector = NDArray[np.float64]
RESULT = Path(__file__).parent / "results" / "planner_accuracy.json"

# What `--fit` may move for each trainer: traits of the engine, and the links of the cluster that its rows ran on.
FREE = {
    "nanotron": (
        "matmul", "attention", "traffic", "logit_bytes", "host_seconds", "host_across", "host_power", "step_seconds",
        "overlaps_tensor", "tensor_seconds", "tensor_across", "sum_bytes", "between.fraction", "between.latency_us",
        "between.decay",
    ),
    "megatron": ("matmul", "attention", "traffic", "host_seconds", "host_across", "tensor_seconds", "step_seconds"),
    "megatron-2022": ("matmul",),
    "megatron-deepspeed": (
        "matmul", "traffic", "score_bytes", "logit_bytes", "sum_bytes", "host_seconds", "tensor_seconds",
        "step_seconds",
    ),
    "fsdp1": ("matmul", "attention", "traffic", "host_seconds"),
    "torchtitan": ("matmul", "traffic", "host_seconds"),
}  # fmt: skip


def estimate(
    model: Model, cluster: Cluster | str, workload: Workload | Mapping[str, int],
    layout: Layout | str | Mapping[str, Any], *, engine: str = "fivefold",
) -> Estimate:  # fmt: skip
    """`fivefold.estimate` for any trainer of `ENGINES`. The layout is written as that trainer's users write it."""
    if engine == "fivefold":
        return fivefold.estimate(model, cluster, workload, layout)
    if engine not in ENGINES:
        raise UserError(f"engine {engine!r} is not known", fix=f"choose one of fivefold, {', '.join(ENGINES)}")
    own, asked, given = price_list(model, cluster), as_layout(layout), as_workload(workload)
    return engines.estimate(TrainerPrices(own.facts, own.cluster, engine=ENGINES[engine]), asked, given)


@dataclass(frozen=True)
class Predicted:
    """A row and what the planner says of it. `likely`: its interval of tokens per second. `memory_gib`: what the row's
    is of, without and with the sequence split over tp where the row does not say. `needs_gib`: of the fullest rank, all
    in all, at the least."""

    row: Measured
    tokens_per_second: float
    memory_gib: tuple[float, ...]
    needs_gib: float
    likely: Interval = (0.0, math.inf)

    @property
    def is_likely(self) -> bool:
        """Whether the planner's own interval holds the truth."""
        return self.likely[0] <= (self.row.tokens_per_second or 0.0) <= self.likely[1]

    @property
    def fits(self) -> bool:
        return self.needs_gib <= self.row.cluster.chip.memory_gib

    @property
    def memory_error(self) -> float:
        """Of the memory, relative: the smaller one where the row leaves two."""
        return min((each / (self.row.memory_gb or 1) - 1 for each in self.memory_gib), key=abs)


class Planner:
    """Estimates rows with one price list for each model, cluster and trainer."""

    def __init__(self, change: Mapping[str, float] | None = None, known: "Planner | None" = None) -> None:
        """`change`: other constants. `known`: a planner whose plans are used."""
        self.change, self.known = dict(change or {}), known
        self.lists = dict[tuple[object, ...], TrainerPrices]()

    def prices(self, row: Measured) -> TrainerPrices:
        key = (row.shape, row.cluster.text, row.cluster.node, row.engine)
        if key not in self.lists:
            engine, cluster = changed(ENGINES[row.engine], row.cluster, self.change)
            if self.known:
                self.lists[key] = self.known.prices(row).changed(cluster, engine)
            else:
                self.lists[key] = TrainerPrices(row.shape.facts(), cluster, engine=engine)
        return self.lists[key]

    def step(self, row: Measured, layout: Layout | None = None) -> TrainerStep:
        prices = self.prices(row)
        return TrainerStep(prices, prices.engine.laid(layout or row.layout), row.workload)

    def predict(self, row: Measured, *, simulated: bool = True) -> Predicted | None:
        """None where the planner cannot make stages of the layout: more of them than layers."""
        try:
            step = self.step(row)
            took, likely = math.inf, (0.0, math.inf)
            if not row.failed:
                items = step.time(steady_span(step) if simulated else closed_span(step))
                seconds = {item.item: item.amount for item in items}
                took, likely = sum(seconds.values()), step_interval(seconds, row.cluster.chip.doubt)
            each_device = row.workload.tokens / row.layout.world
            if not simulated:
                return Predicted(row, each_device / took, (), 0.0)
            modes = [step]
            if row.unsure:
                other = replace(row.layout, sequence_parallel=not row.layout.sequence_parallel)
                modes.append(self.step(row, other))
            return Predicted(
                row, each_device / took, tuple(memory_of(each, row) for each in modes),
                min(each.needs for each in modes) / 2**30,
                (each_device / likely[1], each_device / likely[0] if likely[0] else math.inf),
            )  # fmt: skip
        except (UserError, IndexError, ValueError):
            return None


def memory_of(step: PricedStep, row: Measured) -> float:
    """GiB of what a row's memory is of."""
    rank = row.of_rank
    memory = step.fullest[1] if rank is None else step.memory_of(rank % step.layout.pp)
    return sum(amount for name, amount in memory.items() if name not in OUTSIDE or name in row.beside) / 2**30


def steady_span(step: PricedStep) -> float:
    """The span, of which every round of micro batches beyond the first few takes as long as the one before it."""
    pp = step.layout.pp
    rounds = step.micro_batches // pp
    if pp == 1 or rounds <= 6:
        return step.span()
    few = [replace(step, workload=_of_rounds(step, count)).span() for count in (4, 5)]
    return few[1] + (rounds - 5 + step.micro_batches % pp / pp) * (few[1] - few[0])


def _of_rounds(step: PricedStep, rounds: int) -> Workload:
    rows = rounds * step.layout.pp * step.layout.micro_batch_size * step.layout.data_ranks
    return replace(step.workload, global_batch_size=rows)


def closed_span(step: PricedStep) -> float:
    """The span of 1F1B without its simulation, for fitting: the slowest stage for every micro batch, all once."""
    totals = sum(step.passes)
    return float((step.micro_batches - 1) * totals.max() + totals.sum() + 2 * step.transfer * (len(totals) - 1))


def changed(engine: Engine, cluster: Cluster, change: Mapping[str, float]) -> tuple[Engine, Cluster]:
    """The engine and the cluster with other constants: `matmul`, or `between.decay` of a link."""
    traits = {name: value for name, value in change.items() if "." not in name}
    links = defaultdict[str, dict[str, float]](dict)
    for name, value in change.items():
        if "." in name:
            side, field = name.split(".")
            links[side][field] = value
    sides = {side: replace(getattr(cluster.node, side), **fields) for side, fields in links.items()}
    return replace(engine, **traits), replace(cluster, node=replace(cluster.node, **sides))  # type: ignore[arg-type]


# ---- fitting ---------------------------------------------------------------------------------------------------------

# Regimes of the rows that constants are fitted to: without those of C, which their readers found to be sick.
FITTED = defaultdict(lambda: ("",), nanotron=("A", "B"))
SCALE = 0.03  # of the Cauchy loss: errors far above 3 % pull no more than this one


def constants(rows: Sequence[Measured], names: Sequence[str]) -> dict[str, float]:
    """Those that stand in the code and in the cluster files now."""
    engine, node = ENGINES[rows[0].engine], rows[0].cluster.node
    found = {}
    for name in names:
        side, _, field = name.rpartition(".")
        found[name] = float(getattr(getattr(node, side) if side else engine, field))
    return found


def fit(rows: Sequence[Measured], names: Sequence[str], *, rounds: int = 8, show: bool = True) -> dict[str, float]:
    """Constants with the least Cauchy loss of log throughput: damped Gauss-Newton steps on their logarithms."""
    basis = Planner()
    for row in rows:
        basis.predict(row, simulated=False)
    now = constants(rows, names)

    def errors(change: Mapping[str, float]) -> Vector:
        planner = Planner(change, basis)
        found = [planner.predict(row, simulated=False) for row in rows]
        return np.array([
            math.log(each.tokens_per_second / (each.row.tokens_per_second or 1)) if each else 0.0 for each in found
        ])  # fmt: skip

    def loss(error: Vector) -> float:
        return float(np.log1p((error / SCALE) ** 2).mean())

    error, damping = errors(now), 1e-2
    for turn in range(rounds):
        columns = [(errors({**now, name: now[name] * 1.02}) - error) / math.log(1.02) for name in names]
        jacobian, weights = np.stack(columns, axis=1), 1 / (1 + (error / SCALE) ** 2)
        normal, gradient = (jacobian.T * weights) @ jacobian, (jacobian.T * weights) @ error
        better = False
        while not better and damping < 1e4:
            step = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(names))), -gradient)
            tried = {
                name: min(
                    now[name] * math.exp(float(np.clip(by, -0.7, 0.7))),
                    1.0 if "fraction" in name or "overlaps" in name else math.inf,
                )
                for name, by in zip(names, step, strict=True)
            }
            other = errors(tried)
            better = loss(other) < loss(error) - 1e-6
            damping = damping / 4 if better else damping * 6
        if not better:
            break
        now, error = tried, other
        if show:
            print(f"{turn}: loss {loss(error):.4f}, median {np.median(np.abs(np.expm1(error))):.3%}", flush=True)
    return now


# ---- what is said of a source ----------------------------------------------------------------------------------------


def tau(truth: Sequence[float], said: Sequence[float]) -> float:
    """Kendall's tau-b."""
    first, second = (np.sign(np.subtract.outer(each, each)) for each in (np.array(truth), np.array(said)))
    scale = math.sqrt(float((first**2).sum()) * float((second**2).sum()))
    return float((first * second).sum()) / scale if scale else 1.0


@dataclass(frozen=True)
class Ranking:
    """Over sweeps of at least `LEAST` rows: Kendall's tau, and the part of the best measured throughput that is lost by
    the predicted best, and by the best of the predicted five."""

    sweeps: int
    tau: float
    least_tau: float
    lost: float
    most_lost: float
    lost_of_five: float


LEAST = 8


def ranking(found: Iterable[Predicted]) -> Ranking | None:
    sweeps = defaultdict[object, list[tuple[float, float]]](list)
    for each in found:
        sweeps[each.row.sweep].append((each.row.tokens_per_second or 0.0, each.tokens_per_second))
    taus, lost, of_five = [], [], []
    for pairs in sweeps.values():
        if len(pairs) < LEAST:
            continue
        truth, said = zip(*pairs, strict=True)
        order = sorted(pairs, key=lambda pair: -pair[1])
        best = max(truth)
        taus.append(tau(truth, said))
        lost.append(1 - order[0][0] / best)
        of_five.append(1 - max(pair[0] for pair in order[:5]) / best)
    if not taus:
        return None
    return Ranking(len(taus), float(np.mean(taus)), min(taus), float(np.mean(lost)), max(lost), float(np.mean(of_five)))


# ---- failures --------------------------------------------------------------------------------------------------------

SHAPED = 60.0  # GiB of the closed form from which a failure is taken to be one of memory, on a card of 80


def closed_form(row: Measured) -> float:
    """GiB by a formula of one line, apart from the planner: 18 bytes a weight, 12 of them sharded, and what a layer and
    the logits leave (Korthikanti et al., arXiv 2205.05198, with the sequence split over tp)."""
    shape, layout = row.shape, row.layout
    shards = layout.data_ranks if ENGINES[row.engine].over == "data" else layout.dp_shard
    weights = shape.parameters * 1e9 / (layout.tp * layout.pp) * (6 + 12 / shards)
    tokens = layout.micro_batch_size * row.workload.seq_length
    in_flight = min(layout.pp, layout.accumulation(row.workload.global_batch_size))
    layers = shape.layers / layout.pp * in_flight
    saved = tokens * shape.hidden / layout.tp * layers * (2 if layout.recompute == "full" else 34)
    logits = 8 * tokens * shape.vocabulary / layout.tp / (1 if layout.pp == 1 else in_flight)
    return (weights + saved + logits) / 2**30


@dataclass(frozen=True)
class Failures:
    """`recall`: of failures that look like memory, the part that the planner foretells; `false_alarms`: of runs that
    worked, the part that it would have refused; `others`: failures that do not look like memory."""

    shaped: int
    recall: float
    worked: int
    false_alarms: float
    others: int


def failures(found: Sequence[Predicted]) -> Failures | None:
    failed = [each for each in found if each.row.failed]
    if not failed:
        return None
    shaped = [each for each in failed if closed_form(each.row) > SHAPED]
    worked = [each for each in found if not each.row.failed]
    return Failures(
        len(shaped), 1 - sum(each.fits for each in shaped) / max(1, len(shaped)),
        len(worked), 1 - sum(each.fits for each in worked) / max(1, len(worked)), len(failed) - len(shaped),
    )  # fmt: skip


# ---- the tables ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Of a number of rows: median and 90th percentile of the absolute relative error, and its median with the sign."""

    rows: int
    median: float
    p90: float
    bias: float

    @staticmethod
    def of(values: Sequence[float]) -> "Errors | None":
        if not values:
            return None
        absolute = np.abs(values)
        return Errors(
            len(values), float(np.median(absolute)), float(np.quantile(absolute, 0.9)), float(np.median(values))
        )


def speed_error(each: Predicted) -> float:
    return each.tokens_per_second / (each.row.tokens_per_second or 1.0) - 1


def within(found: Sequence[Predicted], spread: float) -> float:
    """The part of the truths that an interval of this relative half-width, in logarithms, holds."""
    return float(np.mean([abs(math.log1p(speed_error(each))) <= spread for each in found]))


def tell(name: str, found: Sequence[Predicted], unmade: int) -> dict[str, Any]:
    """What is said of one source, printed and as a tree."""
    timed = [each for each in found if each.row.tokens_per_second]
    halves = {"fitted half": [], "reported half": []}  # type: dict[str, list[Predicted]]
    for each in timed:
        halves["reported half" if each.row.is_reported else "fitted half"].append(each)
    tree: dict[str, Any] = {"rows": len(found), "no stages": unmade}
    print(f"\n{name}: {len(found)} rows, and {unmade} that no stages can be made of")
    for half, rows in halves.items():
        if error := Errors.of([speed_error(each) for each in rows]):
            tree[half] = asdict(error)
            print(f"  tokens/s, {half:13} {error.rows:5} rows  {_errors(error)}")
    if error := Errors.of([each.memory_error for each in timed if each.row.memory_gb]):
        tree["memory"] = asdict(error)
        print(f"  memory                  {error.rows:5} rows  {_errors(error)}")
    few = [each.memory_error for each in timed if each.row.memory_gb and each.row.layout.tp <= 4]
    if (error := Errors.of(few)) and len(few) < len([each for each in timed if each.row.memory_gb]):
        tree["memory, tp <= 4"] = asdict(error)
        print(f"  memory, tp <= 4         {error.rows:5} rows  {_errors(error)}")
    if ranks := ranking(timed):
        tree["ranking"] = asdict(ranks)
        print(
            f"  {ranks.sweeps} sweeps: tau {ranks.tau:.3f} (least {ranks.least_tau:.2f}); lost by the best "
            f"{ranks.lost:.1%} (most {ranks.most_lost:.0%}), by the best of five {ranks.lost_of_five:.2%}"
        )
    if fails := failures(found):
        tree["failures"] = asdict(fails)
        print(
            f"  failures that look like memory: {fails.recall:.1%} of {fails.shaped} foretold; false alarms "
            f"{fails.false_alarms:.1%} of {fails.worked}; {fails.others} failures look otherwise"
        )
    if timed:
        tree["own intervals"] = {"held": float(np.mean([each.is_likely for each in timed]))}
        print(f"  the planner's own intervals of 80 % hold {tree['own intervals']['held']:.0%}")
    if len(halves["fitted half"]) > 9 and halves["reported half"]:
        spread = float(np.quantile([abs(math.log1p(speed_error(each))) for each in halves["fitted half"]], 0.8))
        held = within(halves["reported half"], spread)
        tree["intervals"] = {"half-width": spread, "held": held}
        print(f"  intervals of 80 %: +-{spread:.1%}, from the fitted half, hold {held:.0%} of the reported half")
    return tree


def _errors(error: Errors) -> str:
    return f"median {error.median:6.1%}  p90 {error.p90:6.1%}  bias {error.bias:+.1%}"


def groups(rows: Sequence[Measured]) -> dict[str, list[Measured]]:
    """By source; those with regimes apart, the sane ones first."""
    found = defaultdict[str, list[Measured]](list)
    for row in rows:
        found[row.source].append(row)
        if row.regime:
            found[f"{row.source}, regime {row.regime}"].append(row)
            if row.regime in "AB":
                found[f"{row.source}, regimes A and B"].append(row)
    return {name: found[name] for name in sorted(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--published", help="folder of the CSV files")
    parser.add_argument("--source", help="only sources whose name has this in it")
    parser.add_argument("--fit", choices=sorted(FREE), help="fit the constants of a trainer")
    options = parser.parse_args()
    rows, left = read(folder_of(options.published))
    rows = [row for row in rows if not options.source or options.source in row.source]
    if options.fit:
        own = [row for row in rows if row.engine == options.fit and not row.is_reported]
        own = [row for row in own if row.regime in FITTED[options.fit] and row.tokens_per_second]
        for name, value in fit(own, FREE[options.fit]).items():
            print(f"{name} = {value:.4g}")
        return
    planner, began = Planner(), time.process_time()
    predicted = {row.key: planner.predict(row) for row in rows}
    took = time.process_time() - began
    tree: dict[str, Any] = {}
    for name, own in groups(rows).items():
        found = [each for row in own if (each := predicted[row.key])]
        tree[name] = tell(name, found, len(own) - len(found))
    print(f"\n{len(rows)} rows in {took:.0f} s of one core; {sum(left.values())} left out:")
    for reason, count in left.most_common():
        print(f"  {count:5} {reason}")
    if not options.source:
        whole = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "left out": dict(left.most_common()), "sources": tree}
        RESULT.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
