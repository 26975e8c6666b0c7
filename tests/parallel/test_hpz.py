"""A secondary copy of the weights on the ranks of a node (`+hpzN`) changes what is sent, and no number."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fivefold.hardware.cluster import Cluster
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.collectives import Call
from fivefold.parallel.features import calls, edits
from fivefold.parallel.fsdp.spec import FsdpPlan, KeepCopy
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.plan import ParallelPlan
from fivefold.planner.estimate import PricedStep, Workload
from fivefold.planner.price import PriceList
from fivefold.planner.rank_memory import resting_bytes
from tests.parity import Case, on_rank
from tests.planner.priced_calls import priced_calls
from tests.pool import run_ranks
from tests.rehearsal import Rehearsal, rehearse
from tests.tiers import put_off
from tests.verification.cases import ProvedCase
from tests.verification.mutation import prove

MODEL, GATHER = "llama-3.2-1b", "all_gather"
COPIES = 2 * 16 * 60_821_504 // 8  # bytes: an eighth of the layers of Llama 3.2 1B in bf16


def plan(layout: str) -> ParallelPlan:
    return lower(facts_of_config(MODEL), Layout.parse(layout), 0)


def trained(case: Case) -> list[dict[str, Any]]:
    per_rank = run_ranks(case.parsed.world, on_rank, case)
    assert all(result["ran"] == result["declared"] for result in per_rank)
    return per_rank


@pytest.mark.full
@pytest.mark.parametrize(("layout", "hpz"), [("shard4+mb2+fp32", 2)])
def test_no_number_changes(layout: str, hpz: int) -> None:
    """Losses, norms and weights of ZeRO-3 to the last bit: backward computes with the bits that forward gathered."""
    plain = trained(Case(layout))
    copied = trained(Case(str(replace(Layout.parse(layout), hpz=hpz))))
    for before, after in zip(plain, copied, strict=True):
        assert after["losses"] == before["losses"] and after["norms"] == before["norms"]
        np.testing.assert_equal(after["weights"], before["weights"])
    assert any(sent.axis == "node" for sent in copied[0]["ran"])


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [*map(put_off, ("step shard4.ep2+hpz2 mixtral", "step shard4+hpz2+full llama", "step shard4.tp2+hpz2 llama"))],
)
def test_a_layout_is_proved_with_it(line: str, tmp_path: Any) -> None:
    """Under ep2 two ranks have all experts between them, so each keeps its own."""
    case = ProvedCase.parse(line)
    proved = prove(case.kind, case.model, case.layout, tmp_path, steps=1)
    assert proved.found.rows and not proved.is_killed, proved.row or proved.found.refused


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("shard4.cp2.tp2.ep4+hpz4+etp", "mixtral"), put_off("pp2.shard4+interleaved+v2+hpz2", "llama"),
        put_off("dp2.shard4.tp2+hpz2", "llama"), put_off("pp2.shard4+hpz2", "llama"),
        put_off("pp2.shard4+zbv+hpz2", "llama"),
    ],
)  # fmt: skip
def test_what_is_done_and_sent_is_what_the_plan_lists(layout: str, family: str) -> None:
    overrides = (("num_hidden_layers", 4),)
    assert not rehearse(Rehearsal(layout, -1, family, overrides)).unlike


def test_the_slow_link_carries_a_gather_less() -> None:
    """16 GPUs on two nodes: each layer is gathered over all once in a step, and over its node ever after. An eighth of
    the weights of the layers stays, in bf16."""
    plain, copied = plan("shard16"), plan("shard16+hpz8")
    before, after = (calls(each, each.step_shape(1, 4096, 3)) for each in (plain, copied))
    layer = plain.anatomy.layers[0]

    def gathers(sent: Iterable[Call]) -> set[tuple[str, str, int]]:
        return {(call.axis, call.phase, call.times) for call in sent if (call.layer, call.kind) == (layer, GATHER)}

    assert gathers(before) == {("dp_shard", "forward", 3), ("dp_shard", "backward", 3)}
    assert gathers(after) == {("dp_shard", "forward", 1), ("node", "forward", 2), ("node", "backward", 3)}
    others = [[call for call in sent if call.kind != GATHER] for sent in (before, after)]
    assert others[0] == others[1]
    kept = [edit.unit for edit in edits(copied) if isinstance(edit, KeepCopy)]
    assert not any(isinstance(edit, KeepCopy) for edit in edits(plain))
    assert layer in {unit.name for unit in kept}
    assert sum(map(copied.feature(FsdpPlan).copy_bytes, kept)) == COPIES


def test_a_plan_has_its_time_and_its_memory() -> None:
    """Over 2 GB/s a step is what the network carries: two gathers in bf16, and gradients in fp32, which are as much. Of
    these four parts of a layer three are left. It needs the bytes of the copies more."""
    facts, work = facts_of_config(MODEL), Workload(512, 16)
    cluster = Cluster.parse("2x8xH100")
    slow = replace(cluster.node, between=replace(cluster.node.between, gbs=2.0))
    priced = PriceList(facts, replace(cluster, node=slow))
    plain, copied = (PricedStep(priced, Layout.parse(text), work) for text in ("shard16", "shard16+hpz8"))
    assert 0.75 < copied.seconds / plain.seconds < 0.82
    moments = [
        resting_bytes(priced, step.shards, step.content, 3, waits=False, goes_on=False) for step in (plain, copied)
    ]
    more = {at: sum(moments[1][at].values()) - sum(moments[0][at].values()) for at in moments[0]}
    assert more == {at: COPIES * (at not in ("a backward ends", "the update")) for at in moments[0]}
    before, after = (step_bytes(each, each.step_shape(1, 512, 1)) for each in (plan("shard16"), plan("shard16+hpz8")))
    assert {at: sum(after.moments[at].values()) - sum(before.moments[at].values()) for at in more} == more
    near = sum(call.times for call in priced_calls(copied, 0) if call.axis == "node")
    assert near == 16 and not any(call.axis == "node" for call in priced_calls(plain, 0))
