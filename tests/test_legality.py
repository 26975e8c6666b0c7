"""What is legal is what can be built: the rules against brute force, over random layouts, models and batches."""

import random
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from fivefold.core.errors import Violation
from fivefold.core.model_limits import ModelLimits
from fivefold.core.schedule import SCHEDULES, SchedulePlan, Slot, balanced
from fivefold.parallel.context.keys import METHODS
from fivefold.parallel.layout import Layout
from fivefold.parallel.legality import violations
from fivefold.parallel.sharding import split_even

# ---- what can be built, without a rule -------------------------------------------------------------------------------


def can_run(layout: Layout, limits: ModelLimits, *, world: int, batch: int) -> bool:
    """Everything that a run would make of its layout is made, and is whole."""
    assert limits.query and limits.kv and limits.layers and limits.experts is not None
    if not (is_grid(layout, world) and rows_are_dealt(layout, batch)):
        return False
    micro_batches = batch // (layout.micro_batch_size * layout.data_ranks)
    return (
        heads_are_dealt(limits.query, limits.kv, layout.tp)
        and heads_stay_whole(layout, limits.query // layout.tp, max(1, limits.kv // layout.tp))
        and pipeline_runs(layout, micro_batches, limits.layers)
        and experts_are_dealt(layout, limits.experts)
    )


# What a name means, of `pp_virtual` 1 to 3; orders of others may exist, under another name.
MEANT = {"1f1b": [1], "gpipe": [1], "interleaved": [2, 3], "zb": [1, 2, 3], "zbv": [1, 2], "dualpipev": [1, 2]}


def is_grid(layout: Layout, world: int) -> bool:
    """The ranks fill the mesh, and those that experts are dealt to fill groups of `ep`."""
    try:
        mesh = np.arange(world).reshape(layout.shape)
        dealt = mesh[0, 0] if not layout.expert_tp else mesh[0, 0, :, :, 0]
        dealt.reshape(-1, layout.ep)
    except ValueError:
        return False
    return True


def rows_are_dealt(layout: Layout, batch: int) -> bool:
    """Every data rank has as many micro batches as the others, all of them full."""
    ranks: list[list[list[int]]] = [[] for _ in range(layout.data_ranks)]
    for row in range(batch):
        rank, place = row // layout.micro_batch_size % layout.data_ranks, row % layout.micro_batch_size
        ranks[rank] += [[]] if place == 0 else []
        ranks[rank][-1].append(row)
    sizes = {tuple(map(len, micro_batches)) for micro_batches in ranks}
    return len(sizes) == 1 and set(chain(*sizes)) == {layout.micro_batch_size}


def heads_are_dealt(query: int, kv: int, ranks: int) -> bool:
    """Every rank has as many query heads as the others, and each of its key/value heads serves as many of them.

    Query head q attends to key/value head q * kv // query: of 4 and 2 heads over 2 ranks, rank 0 has query heads 0, 1.
    """
    if query % kv or query % ranks:
        return False
    own = [Counter(q * kv // query for q in range(r * query // ranks, (r + 1) * query // ranks)) for r in range(ranks)]
    return len({tuple(served.values()) for served in own}) == 1 and all(len(set(s.values())) == 1 for s in own)


def heads_stay_whole(layout: Layout, query: int, kv: int) -> bool:
    """Those of a tp rank, where context parallelism deals heads out."""
    if layout.cp_method == "ulysses":
        return heads_are_dealt(query, kv, layout.cp)
    if "x" in layout.cp_method:
        ring, ulysses = map(int, layout.cp_method.split("x"))
        return ring * ulysses == layout.cp and heads_are_dealt(query, kv, ulysses)
    return True


def pipeline_runs(layout: Layout, micro_batches: int, layers: int) -> bool:
    """Every stage has a layer; each micro batch passes every stage once each way, and no rank waits for ever."""
    if layout.pp == 1:
        return layout.pp_virtual == 1
    if layout.pp_virtual not in MEANT[layout.pp_schedule]:
        return False
    virtual = 2 if SCHEDULES[layout.pp_schedule].is_v else layout.pp_virtual
    try:
        split = layout.split or balanced((1.0,) * layers, layout.pp * virtual)
    except KeyError:
        return False
    if len(split) != layout.pp * virtual or min(split) < 1 or sum(split) != layers:
        return False
    if layout.pp_schedule == "zb":
        virtual = max(2, virtual)  # its rounds are torch's, also with one stage a rank
    return is_whole(SchedulePlan(layout.pp_schedule, layout.pp, virtual, micro_batches))


def is_whole(plan: SchedulePlan) -> bool:
    try:
        slots = [each.slot for each in plan.simulate().slots]
    except (AssertionError, IndexError):
        return False
    counted = Counter(slot._replace(kind="W") if slot.kind == "B" else slot for slot in slots if slot.kind != "I")
    stages = [(stage, mb) for stage in range(plan.stages) for mb in range(plan.micro_batches)]
    return counted == Counter(Slot(stage, kind, mb) for stage, mb in stages for kind in ("F", "W"))  # type: ignore[arg-type]


def experts_are_dealt(layout: Layout, experts: int) -> bool:
    """Every rank has an expert; of a dense model none is asked for."""
    if experts == 0:
        return layout.ep == 1 and layout.etp == 1
    return all(start < stop for start, stop in split_even(experts, layout.ep))


# ---- the rules say the same ------------------------------------------------------------------------------------------


def a_case(draw: random.Random) -> tuple[Layout, ModelLimits, int, int]:
    """Small numbers, such that one in fifteen can run."""
    pp = draw.choice([1, 1, 2, 3, 4])
    name = draw.choice(list(SCHEDULES))
    virtual = draw.choice([1, 1, 2, 3])
    layout = Layout(
        dp_replicate=draw.choice([1, 1, 2]), dp_shard=draw.choice([1, 2, 3, 4]), cp=draw.choice([1, 1, 2, 4]),
        tp=draw.choice([1, 1, 2, 3, 4, 6]), pp=pp, ep=draw.choice([1, 1, 2, 3, 4]),
        expert_tp=draw.random() < 0.3, pp_schedule=name if pp > 1 else "1f1b", pp_virtual=virtual,
        pp_split=draw.choice(["auto", "auto", "auto", "2-3", "1-2-1-2", "1-0"]) if pp > 1 else "auto",
        cp_method=draw.choice([*METHODS, "2x2", "1x2"]), micro_batch_size=draw.choice([1, 1, 2, 3]),
    )  # fmt: skip
    kv = draw.choice([1, 2, 3, 4, 6])
    limits = ModelLimits(
        query=kv * draw.choice([1, 2, 3, 4]), kv=kv, layers=draw.choice([2, 4, 5, 6, 12]),
        experts=draw.choice([0, 1, 4, 8]),
    )  # fmt: skip
    world = layout.world * draw.choice([1, 1, 1, 1, 2])
    per_pass = layout.micro_batch_size * layout.data_ranks
    batch = per_pass * draw.choice([1, 2, 4, 5, 8, 9, 12, 16]) + draw.choice([0, 0, 0, 0, 1])
    return layout, limits, world, batch


@pytest.mark.parametrize("seed", range(8))
def test_a_layout_is_legal_exactly_when_it_can_be_built(seed: int) -> None:
    draw, legal = random.Random(seed), 0
    for _ in range(2000):
        layout, limits, world, batch = a_case(draw)
        found = violations(layout, limits, world=world, batch=batch)
        built = can_run(layout, limits, world=world, batch=batch)
        assert built == (not found), (str(layout), limits, world, batch, found)
        legal += not found
    assert legal > 80  # the rules are not met by refusing all


@pytest.mark.parametrize("seed", range(4))
def test_values_that_are_named_do_fit(seed: int) -> None:
    """Of the number that has to change, with all else as it is: that violation is gone."""
    draw, tried = random.Random(100 + seed), 0
    for _ in range(300):
        layout, limits, world, batch = a_case(draw)
        for each in violations(layout, limits, world=world, batch=batch):
            for value in each.legal:
                tried += 1
                assert not _again(each, layout, limits, world, batch, value), (str(layout), limits, each, value)
    assert tried > 100


def _again(each: Violation, layout: Layout, limits: ModelLimits, world: int, batch: int, value: int) -> bool:
    """Whether the same is wrong still: a violation about the same field that names other values, or none."""
    if each.about == "global_batch_size":
        found = violations(layout, limits, world=world, batch=value)
    else:
        changed: Any = {each.about: value}
        found = violations(replace(layout, **changed), limits, world=world, batch=batch)
    rule = each.what.split()[:2]
    return any((other.about, other.legal, other.what.split()[:2]) == (each.about, each.legal, rule) for other in found)


def test_a_fused_projection_and_a_refusal_of_sequence_parallelism_limit_tp() -> None:
    """A rank needs a key/value head of its own; without sequence parallelism the model is split."""
    limits = ModelLimits(query=4, kv=2, fused="qkv_proj").refusing({"sequence_parallel": "it adds to all tokens"})
    wrong = {text: violations(Layout.parse(text), limits) for text in ("tp2", "tp2+nosp", "tp4+nosp")}
    found = {text: [violation.about for violation in listed] for text, listed in wrong.items()}
    assert found == {"tp2": ["sequence_parallel"], "tp2+nosp": [], "tp4+nosp": ["tp"]}
    assert "+nosp" in str(wrong["tp2"][0].fix)  # a loop of one's own has no keys
    assert wrong["tp4+nosp"][0].legal == (1, 2)


def test_ulysses_deals_out_the_heads_that_attention_sees() -> None:
    """They may be others than those that tp deals out, and they may be known alone."""
    (found,) = violations(Layout.parse("cp4+ulysses"), ModelLimits(attended=(6, 6)))
    assert found.about == "cp_method" and "deals 6 query and 6 key/value heads of a rank out to 4" in found.what
    assert found.error.fix == "use auto, ring, or 4x1 or 2x2"
    assert not violations(Layout.parse("cp4+ulysses"), ModelLimits(query=6, kv=6, attended=(8, 8)))


def test_all_that_is_wrong_is_said_at_once() -> None:
    layout = Layout.parse("tp3.pp4+v2")
    found = violations(layout, ModelLimits(query=4, kv=2, layers=3), world=16, batch=7)
    assert [each.about for each in found] == ["pp_virtual", "dp_shard", "tp", "pp"]
    assert found[2].legal == (1, 2, 4) and found[2].error.fix == "try tp 1, 2, 4"
