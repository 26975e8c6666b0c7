"""FSDP's collectives in two levels (`+hierN`): within nodes, and between them."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.models.config_facts import facts_of_config
from fivefold.parallel import legality
from fivefold.parallel.features import calls
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.nodes.levels import Int8Wire, UnitGather, UnitReduce, WirePart, in_two_levels
from fivefold.parallel.ranks import RankGrid
from tests.pool import run_ranks
from tests.rehearsal import Rehearsal, rehearse
from tests.tiers import put_off
from tests.verification.cases import ProvedCase
from tests.verification.mutation import prove

MORE = {
    "shard32+hier8": (2 + 2 / 8, 4 + 4 / 4),
    "shard32+qgz": (0, 2 + 4),
    "shard32+hier8+qgz": (2 + 2 / 8, 4 + 4 / 4 + 2 / 8),
}


def gathered_and_reduced(rank: int, world: int) -> tuple[list[float], list[float], list[float]]:
    """What a rank of 2 nodes of 2 gathers of the numbers 10 rank and 10 rank + 1, over its node alone too; and what it
    gets of the sums of its numbers."""
    node = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    gather, reduce = UnitGather(world, in_two_levels(node, across), None), UnitReduce(node, across, None)
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


def summed_in_eight_bits() -> tuple[list[float], list[float]]:
    """What a rank gets of gradients in bf16, and the sum in fp32 of what both ranks send it."""
    wire, rank, group = Int8Wire([WirePart(64, 16)]), dist.get_rank(), dist.group.WORLD
    own = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(6)).bfloat16()  # of a sender, for a shard
    found, parts = torch.empty(64, dtype=torch.bfloat16), torch.empty(2, 64)
    assert group is not None
    UnitReduce(None, group, wire)(found, own[rank].flatten(), group, dist.ReduceOp.SUM)
    wire.decode(wire.encode(own[:, rank]), parts, torch.bfloat16)
    return found.tolist(), (parts[0] + parts[1]).bfloat16().tolist()


@pytest.mark.full
def test_gradients_in_eight_bits_are_summed_in_fp32() -> None:
    for found, expected in run_ranks(2, summed_in_eight_bits):
        assert found == expected


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


@pytest.mark.parametrize("key", ["hpz", "hierarchical"])
def test_the_ranks_of_a_node_are_the_next_ones_under_every_layout(key: str) -> None:
    """A key is refused if a node would hold a part of a group of `ep`, or all of FSDP's ranks, and for nothing else. Of
    a parameter that FSDP shards over some ranks, those on one node are a group, and those with one place in a node."""
    accepted = 0
    for shard, cp, tp, ep, is_cut, node in product((4, 6), (1, 2), (1, 2), (1, 2, 4), (False, True), (2, 3, 4)):
        plain = Layout(dp_replicate=2, dp_shard=shard, cp=cp, tp=tp, ep=ep, expert_tp=is_cut)
        if legality.violations(plain, world=plain.world):
            continue
        layout, ranks, together = replace(plain, **{key: node}), range(plain.world), ep * plain.etp
        at, devices = [rank // (node * tp) for rank in ranks], node * tp
        fits = devices < plain.world // 2 and (plain.world // 2) % devices == 0
        fits = fits and all(at[rank] == at[rank // together * together] for rank in ranks)
        assert (not legality.violations(layout, world=plain.world)) == fits, str(layout)
        grid, accepted = RankGrid(layout, has_experts=True), accepted + fits
        for over, rank in product(("tp", "ep"), ranks) if fits else ():
            shards = grid.axes[grid.fsdp_axis(over)].members(rank)
            near = tuple(other for other in shards if at[other] == at[rank])
            alike = tuple(other for other in shards if other % devices == rank % devices)
            expected = (near, alike if layout.hierarchical and len(near) > 1 else (rank,))
            axes = grid.node_axis(over), grid.across_axis(over)
            found = tuple(grid.members(axis, rank) if axis in grid.axes else (rank,) for axis in axes)
            assert found == expected, f"{layout}, rank {rank}, {over}"
    assert accepted > 25


def test_what_is_put_in_order_or_decoded_takes_memory_while_it_is_sent() -> None:
    """P + P/8 beside a gather of a layer in bf16, G + G/4 beside a reduction in fp32: of a layer, and at the end of a
    backward of the norm and the tied embedding, which are more. In eight bits a byte of each number is sent, one is
    received, and in one level all of these are decoded into fp32."""
    facts, layer, end = facts_of_config("llama-3.2-1b"), 60_821_504, 128_256 * 2048 + 2048
    plans = {text: lower(facts, Layout.parse(text), 0) for text in ("shard32", *MORE)}
    found = {text: step_bytes(plan, plan.step_shape(1, 512, 1)).moments for text, plan in plans.items()}
    for text, (of_gather, of_each) in MORE.items():
        for at, plain in found["shard32"].items():
            more = {kind: size - plain[kind] for kind, size in found[text][at].items() if size != plain[kind]}
            reduced = layer if " later" in at else end if at == "a backward ends" else 0
            gathered = of_gather * layer * (" begins" in at or " later" in at)
            expected = {"gathered parameters": gathered, "unreduced gradients": of_each * reduced}
            assert more == {kind: size for kind, size in expected.items() if size}, f"{text}, {at}"
