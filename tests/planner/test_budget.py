"""A budget of recompute, planned: beside the plan that a run spends it by, and proposed where there is room."""

from dataclasses import replace
from math import inf

import pytest

from fivefold.config import load_config
from fivefold.core.errors import UserError
from fivefold.core.units import GIB
from fivefold.hardware.cluster import Cluster
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.recompute.budget import within_budget
from fivefold.planner.estimate import TIGHT, PricedStep, Workload
from fivefold.planner.explain import budgeted, cures
from fivefold.planner.of_run import chosen
from fivefold.planner.plan import planned
from fivefold.planner.price import PriceList
from fivefold.planner.rank_memory import MATMULS, OUTSIDE


def step(model: str, cluster: str, layout: str, workload: Workload) -> PricedStep:
    found = Cluster.parse(cluster)
    of = PriceList(facts_of_config(model), found)
    return PricedStep(of, Layout.parse(layout).resolve(found.world), workload)


@pytest.mark.parametrize(
    ("model", "cluster", "layout"),
    [
        ("llama-3.1-8b", "8xH100", "shard8+keep12GiB"),
        ("llama-3.1-8b", "8xH100", "shard8+keep999GiB"),  # all that there is
        ("llama-3.1-8b", "2x8xH100", "shard2.tp2.pp4+mb2+keep30GiB"),
        ("llama-3.1-8b", "8xH100", "shard2.pp4+interleaved+v2+keep9.5GiB"),
        ("llama-3.1-8b", "8xH100", "shard4.cp2+keep8GiB+offload"),
        ("mixtral-8x7b", "8xH100", "shard8.ep8+keep20GiB"),
        ("gemma-2-9b", "8xH100", "shard4.tp2+keep20GiB"),  # two kinds of layers
        ("llama-3.2-1b", "2xH100", "shard2+keep3GiB+fp8_rowwise"),
    ],
)
def test_a_budget_is_planned_as_a_run_spends_it(model: str, cluster: str, layout: str) -> None:
    """On every pipeline rank the same layers, and the same bytes."""
    of = step(model, cluster, layout, Workload(8192, 64))
    for pp_rank in range(of.layout.pp):
        plan = lower(of.price_list.facts, of.layout, pp_rank * (of.layout.world // of.layout.pp), compiled=True)
        plan = within_budget(plan, (of.tokens, of.micro_batches))
        shape = plan.step_shape(of.layout.micro_batch_size, of.tokens, of.micro_batches)
        own = of.parts.spent[pp_rank]
        assert (str(own), dict(own.by_layer)) == (str(plan.recompute), dict(plan.recompute.by_layer))
        tensors = sum(size for item, size in of.memory_of(pp_rank).items() if item not in (*OUTSIDE, MATMULS))
        assert tensors == step_bytes(plan, shape).total


@pytest.mark.parametrize("rank", [0, 2])
def test_a_budget_is_planned_on_every_rank_of_a_pipeline_whose_layers_run_as_they_are(rank: int) -> None:
    """A rank knows how its own layers are recomputed, and no others."""
    plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse("pp2.shard2+keep3GiB"), rank)
    plan = within_budget(plan, (8192, 4))
    kept = step_bytes(plan, plan.step_shape(1, 8192, 4)).saved
    micro_batches, edges = (2, 8192 * 2048 * 2) if rank == 0 else (1, 0)
    assert plan.recompute.kept == sum(kept.values()) - micro_batches * edges <= 3 * GIB


@pytest.mark.parametrize("layout", ["shard8", "shard2.pp4"])
def test_a_larger_budget_is_faster_and_takes_more(layout: str) -> None:
    texts = ["+full", *(f"+keep{size}GiB" for size in (5, 12, 24)), ""]
    steps = [step("llama-3.1-8b", "8xH100", layout + text, Workload(8192, 64)) for text in texts]
    assert sorted(steps, key=lambda each: each.needs) == steps
    assert sorted(steps, key=lambda each: -each.seconds) == steps
    assert len({each.seconds for each in steps}) == len(steps)


def test_a_budget_that_cannot_be_kept_fits_nowhere_and_says_the_least() -> None:
    small = step("llama-3.1-8b", "8xH100", "shard8+keep0.6GiB", Workload(8192, 64))
    assert small.needs == inf
    with pytest.raises(UserError, match="still keep 2 GiB"):
        small.estimate()


def test_the_largest_budget_that_leaves_room_is_proposed() -> None:
    """70B on 64 devices, all states sharded: full recompute leaves a third of each."""
    full = step("llama-3.1-70b", "8x8xH100", "shard64+full", Workload(8192, 256))
    most = TIGHT * full.cluster.chip.memory_bytes
    found = budgeted(full, most)
    assert found is not None and found.seconds < 0.95 * full.seconds and found.needs <= most
    size = float(found.layout.recompute.removesuffix("GiB"))
    assert replace(found, layout=replace(found.layout, recompute=f"{size + 0.5:g}GiB")).needs > most
    assert budgeted(replace(full, layout=replace(full.layout, recompute="none")), most) is None


def test_what_would_make_a_layout_fit_keeps_as_much_as_there_is_room_for() -> None:
    whole = step("llama-3.1-8b", "8xH100", "shard8", Workload(20480, 64))
    budget = next(each for each in cures(whole.price_list, whole.estimate()) if each.layout.recompute != "none")
    assert budget.layout.recompute.endswith("GiB") and budget.layout.dp_shard == 8
    assert budget.verdict == "fits" and budget.reserved / GIB > 70


def test_the_command_says_what_a_budget_is_spent_for_and_proposes_one() -> None:
    of = Workload(8192, 256)
    asked = planned("llama-3.1-70b", "8x8xH100", of, layout="shard64+keep20GiB")
    assert asked.ok and any(note.startswith("recompute: ") and "of 20 GiB" in note for note in asked.notes)


def test_the_search_for_a_layout_takes_no_budget() -> None:
    config = load_config(None, ["layout=auto", "memory.recompute=1 GiB", "layout.hardware=2xcpu"])
    with pytest.raises(UserError, match=r"layout: auto does not go with memory\.recompute 1 GiB"):
        chosen(config, Cluster.parse("2xcpu"))


def test_a_budget_that_beats_all_that_are_shown_is_named() -> None:
    """On one device nothing but recompute makes rows of 16,384 tokens fit."""
    found = planned("llama-3.2-3b", "1xH100", Workload(16384, 16))
    (said,) = [note for note in found.notes if "keeps as much as there is room for" in note]
    named = step("llama-3.2-3b", "1xH100", said.split(",")[0], Workload(16384, 16))
    assert named.layout.recompute.endswith("GiB") and named.needs <= TIGHT * named.cluster.chip.memory_bytes
    assert named.seconds < 0.98 * min(row.step_seconds for row in found.estimates)
