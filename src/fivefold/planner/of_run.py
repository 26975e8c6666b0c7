"""Answers of the planner to a run: its layout (`layout: auto`), the prediction in its report, and remedies when it runs
out of memory. No torch if the model's facts are known.

Remedies are changes to the keys of a run file. They come from the planner that chooses layouts: the nearest layouts
that fit, the longest rows (`explain.py`). If a run needed more than was planned for it, changes must fit
by as much more.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.units import GIB, many
from fivefold.hardware.chip import chip_of_device
from fivefold.hardware.cluster import Cluster, nodes_of
from fivefold.models.config_facts import facts_of_config
from fivefold.models.facts import ModelFacts
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.layout import KEYS, RESTS, Layout
from fivefold.parallel.memory import BETWEEN_STEPS, REST
from fivefold.parallel.recompute.policy import budget_bytes
from fivefold.planner.estimate import Estimate, PricedStep, Workload, estimate_layout
from fivefold.planner.explain import MOST_CURES, cures, longest_sequence, too_large
from fivefold.planner.price import PriceList
from fivefold.planner.rank_memory import OUTSIDE
from fivefold.planner.report import behind, faster, guessed, seconds_text
from fivefold.planner.search import Found, search
from fivefold.planner.space import PLACED
from fivefold.report.story import Expected

# Fields of the layout that a run file may set together with `layout: auto`; the search fixes all others.
OPEN = (*PLACED, "zero", "pp_schedule", "pp_virtual", "micro_batch_size", "recompute", "precision")
BYTE_VOCABULARY = 257  # of the built-in tokenizer


def chosen(config: RunConfig, cluster: Cluster) -> tuple[RunConfig, list[str]]:
    """Return the run with `layout: auto` replaced by the best layout that fits, and lines that say which one and why.

    Layout fields set in the run file are kept. Raises `UserError` if no layout can run or none fits.
    """
    prices = PriceList(facts_of_run(config), cluster, config.objective.is_own)
    workload = workload_of(config)
    found = search(prices, workload, top=2, given=_given(config))
    if not found.best:
        raise too_large(prices, workload, found.closest)
    return config.with_layout(found.best[0].layout), _words(found)


def facts_of_run(config: RunConfig, vocabulary: int | None = None) -> ModelFacts:
    """Facts of a run's model. `vocabulary`: tokens of its tokenizer, if known better than by its name."""
    kind, _, size = config.tokenizer.name_or_path.partition(":")
    if vocabulary is None and (kind == "byte" or size):
        vocabulary = int(size) if size else BYTE_VOCABULARY
    takes = config.model.init == "random" and config.tokenizer.name_or_path != "auto" and vocabulary is not None
    # The config's special tokens may be missing from the tokenizer, and `transformers` would warn.
    marks = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    of_text: Mapping[str, Any] = {"vocab_size": vocabulary, **marks} if takes else {}
    facts = facts_of_config(config.model.name_or_path, config.model.overrides, of_text=of_text)
    return adapted(facts, config.adapter.lora)


def workload_of(config: RunConfig) -> Workload:
    """Workload of a run's step, with full rows."""
    return Workload(config.data.seq_length, config.train.global_batch_size)


def _given(config: RunConfig) -> dict[str, Any]:
    """Layout fields that the run file sets. Raises `UserError` for a field that only goes with a complete layout."""
    given = {name: value for name, value in config.given.items() if name not in RESTS or value != -1}
    for name, value in given.items():
        key = KEYS[name]
        is_budget = name == "recompute" and budget_bytes(value) is not None
        if is_budget or (name not in OPEN and value != key.file_default):
            raise UserError(
                f"layout: auto does not go with {key.place} {value}",
                fix=f"leave {key.place} out, or write the whole layout",
                more="fivefold docs howto/plan",
            )
    return {name: value for name, value in given.items() if name in OPEN}


def _words(found: Found) -> list[str]:
    """Describe the choice in lines of at most 80 columns."""
    best, *others = found.best
    low, high = map(seconds_text, best.step_interval)
    expected = f"{seconds_text(best.step_seconds)} s a step ({low} to {high})"
    device = f"{best.reserved / GIB:.1f} of {best.cluster.chip.memory_gib:.1f} GiB a device"
    told = [f"the best of {many(found.fitting, 'layout')} that fit"]
    told += [f"next is {others[0].layout} ({behind(best, others[0])})"] if others else []
    told += [faster(found.faster, best)] if found.faster else []
    told += filter(None, [guessed(best.cluster.chip)])
    said = f"layout: auto: {best.layout}, about {expected}, {device}: {'; '.join(told)}"
    return wrap(said, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


# ---- the prediction of a run that was trained ------------------------------------------------------------------------

RESIDENT = "planned memory counts tensors; measured memory is the whole process, since its start"


def expected(config: RunConfig, layout: str, device: str, about: Mapping[str, Any]) -> Expected:
    """Predict a step of a run under `layout`. `device`: cpu or cuda:0; `about`: the history's record of its last start.

    Raises `UserError` if the planner cannot price it.
    """
    own = Layout.parse(layout)
    cluster = cluster_of(own.world, device, about, config.hardware)
    facts = facts_of_run(config, vocabulary_of(about))
    found = estimate_layout(PriceList(facts, cluster, config.objective.is_own), own, workload_of(config))
    told = filter(None, (cluster.text, guessed(cluster.chip), RESIDENT if device == "cpu" else ""))
    return Expected(found.step_seconds, found.memory_gib, "; ".join(told), found.step_interval)


def cluster_of(world: int, device: str, about: Mapping[str, Any], hardware: str = "") -> Cluster:
    """Devices that a start ran on. A start without its nodes on record (an earlier version, damage) was on one."""
    said = about.get("devices_per_node")
    size = nodes_of(world, said if isinstance(said, int) and 1 <= said <= world else world)
    if hardware or device == "cpu":
        return Cluster.parse(hardware or "1xcpu", size)
    known = chip_of_device(str(about.get("device")), fix="name a file of fivefold calibrate: layout.hardware")
    return Cluster.parse(f"1x{known.name}", size)


def vocabulary_of(about: Mapping[str, Any]) -> int | None:
    """Tokens of a run's tokenizer, as recorded at its newest start; None if they are not."""
    found = (about.get("data") or {}).get("vocabulary")
    return found if isinstance(found, int) else None


# ---- remedies --------------------------------------------------------------------------------------------------------

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
            length = longest_sequence(lean, workload, layout).workload.seq_length
            if length < workload.seq_length:
                found.append((f"data.seq_length={length}", layout, replace(workload, seq_length=length)))
    changes = (Change(text, PricedStep(prices, layout, of).estimate()) for text, layout, of in found)
    items = step.memory_of(rank // (cluster.world // layout.pp))
    return Relief(own, items, tuple(changes))


def planned(config: RunConfig, cluster: Cluster, facts: ModelFacts) -> PricedStep:
    """The step of a run on a cluster. Raises `UserError` if the planner cannot price it."""
    prices = PriceList(facts, cluster, config.objective.is_own, compiled=config.train.compile is not False)
    return PricedStep(prices, config.layout.resolve(cluster.world), workload_of(config))


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
