"""`plan` and `estimate`, as the command and the Python API call them. No torch if the model's facts are known."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from shlex import quote
from typing import Any

from fivefold.core.errors import UserError
from fivefold.core.files import expanded, put
from fivefold.core.shapes import read_model_config, shape_folder
from fivefold.core.units import GIB, many
from fivefold.hardware.cluster import Cluster
from fivefold.models.config_facts import facts_of_config
from fivefold.models.facts import ModelFacts
from fivefold.parallel.layout import DEGREES, Layout
from fivefold.planner import report
from fivefold.planner.estimate import Estimate, PricedStep, Workload, estimate_layout
from fivefold.planner.explain import (
    cost_per_million_tokens,
    cures,
    fewest_devices,
    longest_sequence,
    proposal,
    too_large,
)
from fivefold.planner.failures import failures
from fivefold.planner.price import PriceList
from fivefold.planner.rank_memory import SAVED
from fivefold.planner.report import BEST
from fivefold.planner.search import Found, search

Model = str | Path | Mapping[str, Any]  # a name, a folder or file, or the values of a config.json


def price_list(model: Model, cluster: Cluster | str) -> PriceList:
    """Prices of a model on a cluster. Raises `UserError` for an unknown model or cluster."""
    _check(cluster, (Cluster, str), "cluster", 'write its text, such as "8xH100"')
    where = cluster if isinstance(cluster, Cluster) else Cluster.parse(cluster)
    return PriceList(_facts(model), where)


def plan(
    model: Model, cluster: Cluster | str, workload: Workload | Mapping[str, int], *, top: int = 10
) -> list[Estimate]:
    """The best layouts, best first: see `search`. Raises `UserError` if none fits."""
    _check(top, int, "top", "write how many layouts you want")
    if top < 1:
        raise UserError(f"top {top} asks for no layout", fix="top is 1 or more")
    prices, asked = price_list(model, cluster), as_workload(workload)
    found = search(prices, asked, top=top)
    if not found.best:
        raise too_large(prices, asked, found.closest)
    return list(found.best)


def estimate(
    model: Model, cluster: Cluster | str, workload: Workload | Mapping[str, int],
    layout: Layout | str | Mapping[str, Any], *, engine: str = "fivefold",
) -> Estimate:  # fmt: skip
    """Estimate a step of one layout, given as its text or its fields. Raises `UserError` if it cannot run.

    `engine`: `fivefold`. Other trainers are priced by `estimate` of `benchmarks/planner_accuracy.py`.
    """
    if engine != "fivefold":
        raise UserError(
            f"engine {engine!r} is not known",
            fix="leave it out; engines of other trainers are in benchmarks/planner_accuracy.py",
        )
    return estimate_layout(price_list(model, cluster), as_layout(layout), as_workload(workload))


def planned(
    model: Model,
    cluster: Cluster | str,
    workload: Workload,
    *,
    layout: str | None = None,
    top: int = 10,
) -> report.PlanReport:
    """Report of `fivefold plan`. A `layout` that is given comes first, before the best ones."""
    prices = price_list(model, cluster)
    asked = None if layout is None else estimate_layout(prices, Layout.parse(layout), workload)
    try:
        found = search(prices, workload, top=top)
    except UserError as error:  # the search omits some layouts; one that is named may still run
        if asked is None:
            raise
        found, can_run = Found(best=(), legal=0, fitting=0), f"{error.what}, of those that are searched"
    else:
        fit = f"{many(found.legal, 'layout')} can run, {found.fitting:,} of them fit in memory"
        can_run = f"{fit}; of each set of degrees the best"
    if not found.best and asked is None:
        raise too_large(prices, workload, found.closest)
    others = [ranked for ranked in found.best if asked is None or ranked.layout != asked.layout]
    estimates = (*([asked] if asked else []), *others)
    best = found.best[0] if found.best else None
    notes, cured = [can_run, *_positions_told(model, workload.seq_length)], tuple[Estimate, ...]()
    if found.faster:
        notes.append(report.faster(found.faster, found.best[0]))
    if asked:
        notes.insert(0, report.judged(asked, best))
        cured = cures(prices, asked) if asked.verdict != "fits" else ()
    spent = next((row.why for row in asked.rows if row.item == SAVED), "") if asked else ""
    notes += [spent] * bool(spent)
    if found.fastest and (budget := proposal(found.best, prices, found.fastest.step_seconds)) is not None:
        notes.append(report.proposed(budget, found.fastest))
    if asked and not asked.fits and not cured:
        none = too_large(prices, workload, found.closest) if found.closest else None
        notes.insert(1, f"{none.what}: {none.fix}" if none else "no small change of it fits")
    goes_on = best or (asked if asked and asked.fits else None)
    first = goes_on or estimates[0]
    return report.PlanReport(
        title=report.title(_named(model, prices), prices.cluster, workload),
        rows=tuple(report.ranked(ranked, first) for ranked in estimates),
        ok=asked.fits if asked else True,
        estimates=estimates,
        notes=tuple(notes),
        cures=tuple(report.ranked(ranked, first) for ranked in cured),
        closing=f"\n{report.assumptions(first)}" + (f"\nnext: {_command(model, goes_on)}" if goes_on else ""),
        details=report.details(estimates),
        timeline=_timeline(PricedStep(prices, estimates[0].layout, workload)),
    )


def longest(model: Model, cluster: str, workload: Workload, *, layout: str | None = None) -> report.PlanReport:
    """Report of `fivefold plan --max-seq-length`: the longest rows that fit, of `layout` or of any.

    A step keeps about the tokens of `workload`. Raises `UserError` if not even 1,024 tokens fit.
    """
    prices = price_list(model, cluster)
    best = longest_sequence(prices, workload, None if layout is None else Layout.parse(layout))
    length = best.workload.seq_length
    notes = [f"the longest rows that fit have {length:,} tokens", *_positions_told(model, length)]
    return report.PlanReport(
        title=report.title(_named(model, prices), prices.cluster, best.workload),
        rows=(report.ranked(best, best),),
        ok=True,
        estimates=(best,),
        notes=tuple(notes),
        closing=f"\n{report.assumptions(best)}\nnext: {_command(model, best)}",
        details=report.details((best,)),
        timeline=_timeline(PricedStep(prices, best.layout, best.workload)),
    )


def fewest(model: Model, cluster: str, workload: Workload, *, top: int = 10) -> report.PlanReport:
    """Report of `fivefold plan --fewest-devices`: the ranking on the fewest devices of the cluster that train the
    model, a part of a node or whole nodes. Raises `UserError` if all of them are too few."""
    prices = price_list(model, cluster)
    smallest = fewest_devices(prices, workload).cluster
    devices = f"{many(smallest.world, 'device')}, {smallest.text}"
    found = planned(model, smallest, workload, top=top)
    return replace(found, notes=(f"the fewest of {prices.cluster.text} that train it are {devices}", *found.notes))


def priced(found: report.PlanReport, per_device_hour: float) -> report.PlanReport:
    """Add the cost of a million tokens, in the currency of `per_device_hour`: of the best layout in a sentence, and of
    each layout, with its 80 % interval, in JSON."""
    costs = {
        str(ranked.layout): [cost_per_million_tokens(ranked, per_device_hour, seconds) for seconds in
                           (ranked.step_seconds, *ranked.step_interval)]
        for ranked in found.estimates
    }  # fmt: skip
    best = next((row for row in found.rows if row.behind == BEST), found.rows[0])
    cost, low, high = (f"{cost:.3g}" for cost in costs[best.layout])
    said = f"at {per_device_hour:g} a device-hour, a million tokens cost {cost} ({low} to {high}) with {best.layout}"
    return replace(found, notes=(*found.notes, said), details={**found.details, "cost_per_million_tokens": costs})


def with_failures(found: report.PlanReport, model: Model, mtbf_hours: float) -> report.PlanReport:
    """Add the cost of failures to each layout that fits, and the interval of checkpoints to the next command. The
    ranking stays. `mtbf_hours`: mean time between failures of one device."""
    fitting = [ranked for ranked in found.estimates if ranked.fits]
    if not fitting:
        return found
    prices = price_list(model, fitting[0].cluster)
    costs = {ranked.layout: failures(prices, ranked, mtbf_hours) for ranked in fitting}
    told = {str(layout): cost.to_json() for layout, cost in costs.items()}
    details = {**found.details, "mtbf_hours": mtbf_hours, "failures": told}
    closing = found.closing
    for ranked in fitting:
        command = _command(model, ranked)
        closing = closing.replace(command, f"{command} checkpoint.every={costs[ranked.layout].every}")
    return replace(found, failures=costs, details=details, closing=closing)


def _named(model: Model, prices: PriceList) -> str:
    return model if isinstance(model, str) else prices.facts.model_class


def _timeline(step: PricedStep) -> Mapping[str, Any] | None:
    """Timeline of the layout's pipeline, with as few micro batches as show its pattern."""
    if step.layout.pp == 1:
        return None
    drawn = min(step.micro_batches, 3 * step.layout.pp)
    return step.timeline(drawn).to_json() | {"drawn": drawn, "micro_batches": step.micro_batches}


def run_file(model: str, best: Estimate, name: str, every: int | None = None) -> str:
    """Run file for `fivefold train` with the layout and its batch; the user adds data and steps. `name`: of the run, so
    that runs of two plans do not share a folder. `every`: steps between checkpoints."""
    layout, workload, start, wanted = best.layout, best.workload, "", ""
    if _is_longer(model, best):
        start = f", overrides: {{max_position_embeddings: {workload.seq_length}}}"
    if not has_weights(model):
        start += ", init: random"
    if lacks_tokenizer(model):
        wanted = "# tokenizer: {name_or_path: a folder or hub id, or train:32k for one of your own text}\n"
    random = "" if has_weights(model) else WEIGHTS
    saved = "" if every is None else f"checkpoint: {{every: {every}}}\n"
    return (
        f"# {best.cluster.text}: expected {best.step_seconds:.3g} s a step, {best.reserved / GIB:.1f} GiB a device\n"
        f"model: {{name_or_path: {json.dumps(model)}{start}}}\n{random}{wanted}"
        f"data:\n  seq_length: {workload.seq_length}\n"
        "  # train: texts/*.jsonl   # your own: nothing is trained before this line names it\n"
        f"train: {{global_batch_size: {workload.global_batch_size}}}\n"
        f"layout: {layout}\n"
        f"{saved}"
        f"run: {{name: {json.dumps(name)}}}\n"
    )


def has_weights(model: str) -> bool:
    """True if training can start from a model's own weights; a hub id is assumed to have some."""
    path = shape_folder(model) or expanded(model)
    return not path.exists() or any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))


def lacks_tokenizer(model: str) -> bool:
    path = shape_folder(model) or expanded(model)
    return path.exists() and not any(path.glob("tokenizer*"))


WEIGHTS = (
    "# ^ the weights are random: for real ones, init: pretrained, and name_or_path: a folder or hub id that has them\n"
)


def to_add(model: str) -> str:
    return f"add your data{' and a tokenizer' * lacks_tokenizer(model)}"


def without_weights(model: str, file: str) -> str:
    """Say that a run file starts from random weights, and how it gets others; "" if the model has its own."""
    if has_weights(model):
        return ""
    return (
        f"weights: {model} has none here, so {file} starts from RANDOM ones (model.init: random). To train real ones: "
        f"fivefold train {quote(file)} model.init=pretrained model.name_or_path=FOLDER_OR_HUB_ID"
    )


def write_run_file(path: str, model: str, best: Estimate, every: int | None = None) -> None:
    """Write `run_file`. Raises `UserError` if the file exists."""
    if Path(path).exists():
        raise UserError(f"{path} is there already", fix="name another file: --write FILE")
    content = run_file(model, best, Path(path).stem, every)
    put(Path(path), content.encode(), instead="name another file: --write FILE")


def _command(model: Model, best: Estimate) -> str:
    workload = best.workload
    batch = f"data.seq_length={workload.seq_length} train.global_batch_size={workload.global_batch_size}"
    longer = f" model.overrides.max_position_embeddings={workload.seq_length}" if _is_longer(model, best) else ""
    return f"fivefold train RUN.yaml layout={best.layout} {batch}{longer}"


def _positions_told(model: Model, length: int) -> Iterator[str]:
    """Note that rows are longer than the model's positions, if they are."""
    if (positions := _positions(model)) and length > positions:
        yield f"the model has positions for {positions:,} (max_position_embeddings)"


def _is_longer(model: Model, best: Estimate) -> bool:
    return any(_positions_told(model, best.workload.seq_length))


def _positions(model: Model) -> int | None:
    """Number of positions of a model; None if its config does not say."""
    values = model if isinstance(model, Mapping) else read_model_config(model)
    found = (values.get("text_config") or values).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _check(value: object, kinds: type | tuple[type, ...], name: str, fix: str) -> None:
    """Raise `UserError` for a value of another type, which a caller in Python may pass."""
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise UserError(f"{name} is no {type(value).__name__}", fix=fix)


def _facts(model: Model) -> ModelFacts:
    _check(model, (str, Path, Mapping), "model", "write a name, a folder, or the values of a config: config.to_dict()")
    if not isinstance(model, Mapping):
        if str(model).endswith((".yaml", ".yml")):
            raise UserError(
                f"{model} is a run file, and plan takes a model",
                fix="name its model.name_or_path; with layout: auto in it, fivefold train plans for the run itself",
            )
        return facts_of_config(model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(dict(model)), encoding="utf-8")
        return facts_of_config(file)


def as_workload(workload: Workload | Mapping[str, int]) -> Workload:
    """A workload, given as itself or as its fields. Raises `UserError` for other fields or values."""
    known = {field.name for field in fields(Workload)}
    if isinstance(workload, Workload):
        return workload
    _check(workload, Mapping, "workload", "write dict(seq_length=8192, global_batch_size=64)")
    if wrong := set(workload) ^ known:
        raise UserError(
            f"a workload has {', '.join(sorted(known))}, and {', '.join(sorted(wrong))} is missing or unknown"
        )
    for name, value in workload.items():
        _check(value, int, name, "write a whole number")
    return Workload(**workload)


def as_layout(layout: Layout | str | Mapping[str, Any]) -> Layout:
    """A layout, given as itself, its text or its fields. Raises `UserError` for other fields or values."""
    if isinstance(layout, Mapping):
        known = {field.name for field in fields(Layout)}
        if wrong := [name for name in layout if name not in known]:
            raise UserError(f"{wrong[0]!r} is no field of a layout", fix=f"degrees are {', '.join(DEGREES.values())}")
        for name, value in layout.items():
            if name in DEGREES.values():
                _check(value, int, name, "write a whole number")
        return Layout(**layout)
    _check(layout, (Layout, str), "layout", "write its text, such as shard8.tp8, or its fields")
    return layout if isinstance(layout, Layout) else Layout.parse(layout)
