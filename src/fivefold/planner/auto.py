"""`layout: auto`: the planner chooses the layout of a run. No torch if the model's facts are known."""

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.units import GIB, many
from fivefold.hardware.cluster import Cluster
from fivefold.models.config_facts import facts_of_config
from fivefold.models.facts import ModelFacts
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.layout import KEYS, RESTS
from fivefold.parallel.recompute.policy import budget_bytes
from fivefold.planner.answers import answer
from fivefold.planner.estimate import Workload
from fivefold.planner.explain import too_large
from fivefold.planner.price import PriceList
from fivefold.planner.report import behind, faster, guessed, seconds_text
from fivefold.planner.search import Found
from fivefold.planner.space import PLACED

# Fields of the layout that a run file may set together with `layout: auto`; the search fixes all others.
OPEN = (*PLACED, "zero", "pp_schedule", "pp_virtual", "micro_batch_size", "recompute", "precision")
BYTE_VOCABULARY = 257  # of the built-in tokenizer


def chosen(config: RunConfig, cluster: Cluster) -> tuple[RunConfig, list[str]]:
    """Return the run with `layout: auto` replaced by the best layout that fits, and lines that say which one and why.

    Layout fields set in the run file are kept. Raises `UserError` if no layout can run or none fits.
    """
    prices = PriceList(facts_of_run(config), cluster, config.objective.is_own)
    workload = workload_of(config)
    found = answer(prices, workload, top=2, given=_given(config))
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
                more="docs/howto/plan.md",
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
