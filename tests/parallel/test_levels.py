"""FSDP's collectives in two levels (`+hierN`): within nodes, and between them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.calls import calls
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.nodes.levels import Gather, Reduce, in_two_levels
from tests.pool import run_ranks
from tests.rehearsal import Rehearsal, rehearse
from tests.tiers import put_off
from tests.verification.cases import ProvedCase
from tests.verification.mutation import prove


def gathered_and_reduced(rank: int, world: int) -> tuple[list[float], list[float], list[float]]:
    """What a rank of 2 nodes of 2 gathers of the numbers 10 rank and 10 rank + 1, over its node alone too; and what it
    gets of the sums of its numbers."""
    node = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    gather, reduce = Gather(world, in_two_levels(node, across), None), Reduce(node, across, None)
    own, whole, near, part = (
        torch.tensor([10.0 * rank, 10.0 * rank + 1]),
        torch.zeros(8),
        torch.zeros(4),
        torch.zeros(2),
    )
    assert dist.group.WORLD is not None
    gather(whole, own, dist.group.WORLD, False)
    gather(near, own, node, False)
    reduce(part, torch.arange(8.0) * 10**rank, dist.group.WORLD, dist.ReduceOp.SUM)
    return whole.tolist(), near.tolist(), part.tolist()


@pytest.mark.full
def test_every_rank_gets_what_it_would_in_one_level() -> None:
    for rank, (whole, near, part) in enumerate(run_ranks(4, with_rank)):
        assert whole == [0, 1, 10, 11, 20, 21, 30, 31]
        assert near == whole[rank // 2 * 4 :][:4]
        assert part == [1111 * 2 * rank, 1111 * (2 * rank + 1)]


def with_rank() -> tuple[list[float], list[float], list[float]]:
    return gathered_and_reduced(dist.get_rank(), dist.get_world_size())


@pytest.mark.full
def test_a_layout_is_proved_with_it(tmp_path: Any) -> None:
    case = ProvedCase.parse("step shard4+hpz2+hier2 llama")
    proved = prove(case.kind, case.model, case.layout, tmp_path, steps=1)
    assert proved.found.rows and not proved.is_killed, proved.row or proved.found.refused


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("dp2.shard4.tp2+zero1+hier2", "llama"), put_off("shard4.cp2.tp2.ep2+hier4+hpz4", "mixtral"),
        put_off("pp2.shard4+interleaved+v2+hier2+zero2", "llama"), put_off("shard8.ep2+hier2", "mixtral"),
    ],
)  # fmt: skip
def test_what_is_done_and_sent_is_what_the_plan_lists(layout: str, family: str) -> None:
    overrides = (("num_hidden_layers", 4),)
    assert not rehearse(Rehearsal(layout, -1, family, overrides)).unlike


def test_a_node_sends_each_byte_once() -> None:
    """4 nodes of 8: a rank's place has an eighth of what is gathered and reduced. The rest stays inside."""
    plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse("shard32+hier8"), 0)
    layer, size = plan.anatomy.layers[0], 60_821_504
    sent = {
        (call.axis, call.kind, call.phase, call.bytes)
        for call in calls(plan, plan.step_shape(1, 4096, 1)) if call.layer == layer
    }  # fmt: skip
    gathers = {("nodes", "all_gather", 2 * size // 8), ("node", "all_gather", 2 * size)}
    assert sent == {
        *((axis, kind, phase, bytes) for axis, kind, bytes in gathers for phase in ("forward", "backward")),
        ("node", "reduce_scatter", "backward", 4 * size), ("nodes", "all_to_all", "backward", 4 * size // 8),
    }  # fmt: skip
