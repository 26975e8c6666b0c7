"""`fivefold calibrate --from RUN`: correct a hardware file by the measured steps of a finished run. No torch.

A run measures one number, the seconds of a step, the sum of several of the planner's terms. Each term is known up to a
factor, with its doubt as uncertainty. The fit takes the likeliest factors that explain the measured step: a term has a
part of the correction by its share of the step and the square of its doubt (a Gaussian of their logarithms, given their
weighted sum). A term that is small in the step, or well known, hardly moves, and its doubt stays.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import median
from typing import Any

from fivefold.config import RunConfig, load_config
from fivefold.core import history, json_lines
from fivefold.core.errors import UserError
from fivefold.core.files import expanded
from fivefold.hardware.cluster import Cluster, to_toml
from fivefold.parallel.layout import Layout
from fivefold.planner import timing
from fivefold.planner.estimate import Estimate, estimate_layout
from fivefold.planner.of_run import cluster_of, facts_of_run, vocabulary_of, workload_of
from fivefold.planner.price import PriceList
from fivefold.planner.timing import LIKELY, terms
from fivefold.report.findings import Report

Table = dict[str, Any]

# The doubt of each term. A user's network is less certain than those of clusters with published measurements.
DOUBTS = {**timing.DOUBTS, "links": 0.4}
LEAST_NOISE = 0.02  # of a run's median step, as a doubt
ROUNDS = 5  # of fitting: prices are only nearly sums of their terms
STEP = "perf/step_seconds"
LEAST, MOST = 1e-6, 1e6  # seconds of a step, and GiB
SETTLED = 2  # first steps of a start, left out: they set up, and time slots


@dataclass(frozen=True)
class Corrected:
    """A corrected term: its planned seconds of a step, its factor, the 80 % interval of the factor, and the part of the
    doubt that is gone."""

    term: str
    planned: str
    scaled: str
    likely: str
    learned: str


@dataclass(frozen=True)
class StepMeasurement:
    """Measurements of a run. `noise`: standard deviation of the logarithm of `seconds`. `memory`: GiB, with what the
    allocator keeps; None if not measured."""

    seconds: float
    noise: float
    memory: float | None


@dataclass(frozen=True)
class Factors:
    """Logarithm of the factor of each term's seconds, and its doubt."""

    logs: Mapping[str, float]
    doubts: Mapping[str, float]


def learn(run: Path, *, base: str | None = None) -> tuple[str, Report[Corrected]]:
    """Correct a hardware file by a run; return its text and a report of the corrections. `base`: the cluster or the
    hardware file to correct; by default the planner's tables for the run's devices. Raises `UserError`."""
    config, seen, (layout, device, about) = load_config(run), seen_in(run), _start(run)
    tree = _tree(base) if base else {"cluster": cluster_of(layout.world, device, about).text}
    facts = facts_of_run(config, vocabulary_of(about))

    def planned(tables: Mapping[str, Any]) -> Estimate:
        cluster = Cluster.of_toml(to_toml(tables))
        if cluster.world != layout.world:
            what = f"{cluster.text} has {cluster.world} devices, and the run used {layout.world}"
            raise UserError(what, fix="name the cluster that it ran on: --cluster")
        prices = PriceList(facts, cluster, config.objective.is_own)
        return estimate_layout(prices, layout, workload_of(config))

    before = planned(tree)
    factors = Factors(dict.fromkeys(DOUBTS, 0.0), DOUBTS)
    for _ in range(ROUNDS):
        factors = explained(planned(corrected(tree, factors.logs)), seen, factors.logs)
    tables = corrected(tree, factors.logs)
    if seen.memory is not None:
        tables["chip"]["slack"] = round(max(1.0, seen.memory / before.memory_gib), 3)
    about_it = f"Corrected by fivefold calibrate from the run {config.run.name}."
    return to_toml(tables, about_it), _report(config, before, planned(tables), seen, factors)


def explained(of: Estimate, seen: StepMeasurement, logs: Mapping[str, float]) -> Factors:
    """The likeliest factors. `logs`: the factors that the prices already include."""
    total = of.step_seconds
    shares = {term: seconds / total for term, seconds in terms(of.seconds).items()}
    missing = log(seen.seconds / total) + sum(shares[term] * logs[term] for term in DOUBTS)
    pull = {term: doubt**2 * shares[term] for term, doubt in DOUBTS.items()}
    spread = sum(pull[term] * shares[term] for term in DOUBTS) + seen.noise**2
    return Factors(
        {term: pull[term] * missing / spread for term in DOUBTS},
        {term: sqrt(max(0.0, doubt**2 - pull[term] ** 2 / spread)) for term, doubt in DOUBTS.items()},
    )


def corrected(tree: Mapping[str, Any], logs: Mapping[str, float]) -> Table:
    """Tables of a hardware file whose terms take `exp(logs)` as long."""
    alone = {**tree, "node": {**tree.get("node", {}), "cores": 0}}  # speeds of a single device
    cluster = Cluster.of_toml(to_toml(alone))
    chip, slower = cluster.chip, {term: exp(logarithm) for term, logarithm in logs.items()}

    def part(dtype: str) -> float:
        """Fraction of the peak; above 1 if the peak is too low."""
        return chip.matmul_fraction[dtype] / slower["matmuls"]

    fields: Table = {
        **tree.get("chip", {}),
        "peak_tflops": {dtype: peak * max(1.0, _short(part(dtype))) for dtype, peak in chip.peak_tflops.items()},
        "matmul_fraction": {dtype: min(1.0, _short(part(dtype))) for dtype in chip.peak_tflops},
        "attention_fraction": min(1.0, _short(chip.attention_fraction * slower["matmuls"] / slower["attention"])),
        "memory_bandwidth_gbs": _short(chip.memory_bandwidth_gbs / slower["memory traffic"]),
        "host_scale": _short(chip.host_scale * slower["host"]),
    }
    node: Table = dict(tree.get("node", {}))
    for side in ("inside", "between"):
        link = getattr(cluster.node, side)
        waits = {key: _short(getattr(link, key) * slower["links"]) for key in ("latency_us", "meet_us")}
        own = {"gbs": _short(link.gbs / slower["links"]), **waits}
        node[side] = {**node.get(side, {}), **own}
    return {"cluster": tree["cluster"], "chip": fields, "node": node}


def seen_in(run: Path) -> StepMeasurement:
    """Measurements of the newest start that made steps. Raises `UserError` if there are too few."""
    past, rows = history.load(run), json_lines.needed(run / "metrics.jsonl").rows
    first = next((first for _, first, last in reversed(list(past.spans())) if last is None or last > first), 0)
    steps = [row[STEP] for row in rows if row["step"] > first + SETTLED and _is_measured(row.get(STEP))]
    if len(steps) < 3:
        what = f"{run} has too few steps that say their seconds: {len(steps)} after the first {SETTLED}"
        raise UserError(what, fix="train a few steps more")
    middle = median(steps)
    spread = median(abs(log(step / middle)) for step in steps) * 1.48 / sqrt(len(steps))
    names = ("memory/peak_reserved_gib", "memory/peak_gib")
    peaks = [row[name] for name in names for row in rows if _is_measured(row.get(name)) and row["step"] > first]
    return StepMeasurement(middle, max(LEAST_NOISE, spread), max(peaks, default=None))


def _is_measured(number: Any) -> bool:
    """True for a number that a machine can have measured: the file may be damaged."""
    return isinstance(number, int | float) and LEAST <= number <= MOST


def _start(run: Path) -> tuple[Layout, str, Mapping[str, Any]]:
    """The layout of the newest start, its kind of device, and the history's record of it."""
    starts = history.load(run).starts
    if not starts or "layout" not in starts[-1].about:
        raise UserError(f"{run} does not say where it ran", fix="name the folder of a run, such as runs/demo")
    about = starts[-1].about
    kind = "cpu" if "cores" in str(about.get("device")) else "cuda"
    return Layout.parse(str(about["layout"])), kind, about


def _tree(base: str) -> Table:
    """Contents of a hardware file, or the text of a cluster."""
    Cluster.parse(base)  # raises its own error for what cannot be read
    return tomllib.loads(expanded(base).read_text(encoding="utf-8")) if base.endswith(".toml") else {"cluster": base}


def _report(
    config: RunConfig, before: Estimate, after: Estimate, seen: StepMeasurement, factors: Factors
) -> Report[Corrected]:
    rows = tuple(_rows(before, factors))
    lines = [
        f"a step took {seen.seconds:.3g} s; planned were {before.step_seconds:.3g}, now {after.step_seconds:.3g}",
        "one run cannot tell its terms apart: correct this file by runs of other layouts, with --cluster",
    ]
    if seen.memory is not None:
        lines.insert(1, f"{seen.memory:.3g} GiB were taken; tensors were planned to have {before.memory_gib:.3g}")
    title = f"fivefold calibrate: from {config.run.name}, {before.layout} on {before.cluster.text}"
    return Report(title=title, rows=rows, ok=True, closing="\n".join(lines))


def _rows(before: Estimate, factors: Factors) -> Iterator[Corrected]:
    for term, planned in terms(before.seconds).items():
        own, left = factors.logs[term], factors.doubts[term]
        low, high = exp(own - LIKELY * left), exp(own + LIKELY * left)
        learned = 1 - left / DOUBTS[term]
        yield Corrected(term, f"{planned:.3g} s", f"x {exp(own):.2f}", f"{low:.2f} to {high:.2f}", f"{learned:.0%}")


def _short(number: float) -> float:
    return float(f"{number:.3g}")
