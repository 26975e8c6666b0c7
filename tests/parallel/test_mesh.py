"""The groups of a layout: who is in them, how many calls they take, and how long they wait."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fivefold.parallel import mesh as meshes
from fivefold.parallel.layout import Layout
from fivefold.parallel.mesh import Mesh, build_mesh
from fivefold.parallel.ranks import RankGrid
from tests.pool import TIMEOUT_SECONDS, run_ranks
from tests.rehearsal import fake_world, on_stage
from tests.tiers import put_off

pytestmark = pytest.mark.full

WORLD = 1024
WORLDS = timedelta(seconds=77)  # the timeout of the world's group
LAYOUTS = {
    "pp4.dp2.shard2.cp8.tp8": {"kv_copies": 2, "embedding_ranks": (0, 3)},
    "dp2.shard64.tp8.ep16": {"has_experts": True},
    "pp2.dp2.shard16.cp2.tp8.ep8+etp": {"has_experts": True, "kv_copies": 4},
}


def described(
    text: str, rank: int, splits: bool, options: dict[str, Any]
) -> tuple[list[str], dict[str, list[int]], int]:
    """(the axes that were split, the ranks of this rank's groups by axis, groups made one by one) of a fake world."""
    split, made, members, real = [], [], dict[str, list[int]](), dist.new_group

    def one(ranks: Sequence[int], **named: Any) -> Any:
        assert named["timeout"] is WORLDS
        made.append(ranks)
        if rank in ranks:
            members[named["group_desc"]] = list(ranks)
        return real([rank]) if rank in ranks else None

    def all_at_once(split_ranks: list[list[int]], group_desc: str, timeout: Any) -> Any:
        assert timeout is WORLDS
        split.append(group_desc)
        assert len({each for ranks in split_ranks for each in ranks}) == sum(map(len, split_ranks)), "ranks are in one"
        mine = [ranks for ranks in split_ranks if rank in ranks]
        if mine:
            members[group_desc] = mine[0]
        return real([rank]) if mine else dist.GroupMember.NON_GROUP_MEMBER  # a number, where `new_group` has None too

    layout = Layout.parse(text)
    with (
        fake_world(layout.world, rank),
        patch.object(meshes, "can_split_world", lambda: splits),
        patch.object(meshes, "timeout_of_world", lambda device_type: WORLDS),
        patch.object(meshes.dist, "split_group", all_at_once),
        patch.object(meshes.dist, "new_group", one),
        patch.object(meshes, "_device_mesh", lambda *_: _Listed()),
    ):
        mesh = build_mesh(RankGrid(layout, ulysses=2 if layout.cp > 2 else 1, **options), "cpu")
        assert all(isinstance(group, dist.ProcessGroup) for group in mesh.groups.values())
        return split, members, len(made)


class _Listed:
    """In place of a mesh."""


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("rank", [put_off(0), 517, put_off(1023)])
def test_a_thousand_ranks_make_the_groups_of_an_axis_in_one_call(text: str, rank: int) -> None:
    split, members, made = on_stage(described, text, rank, True, LAYOUTS[text])
    assert made == 0
    assert len(split) == len(set(split)) <= 9
    layout = Layout.parse(text)
    assert layout.world == WORLD
    own = layout.coordinates(rank)
    for axis in ("pp", "dp_replicate", "cp", "tp"):
        if getattr(layout, axis) > 1:
            alike = [other for other in range(WORLD) if {**layout.coordinates(other), axis: 0} == {**own, axis: 0}]
            assert members[axis] == alike
    assert len(members["dp_shard"]) == layout.dp_shard * layout.cp
    if "has_experts" in LAYOUTS[text]:
        blocks, parts = layout.ep * layout.etp, layout.etp  # the ranks of a copy of all experts; of one expert
        assert members["ep"] == [r for r in range(WORLD) if r // blocks == rank // blocks and r % parts == rank % parts]
        model = WORLD // (layout.pp * layout.dp_replicate)
        same = [r for r in range(WORLD) if r // model == rank // model and r % blocks == rank % blocks]
        assert members["ep_shard"] == same
    if copies := LAYOUTS[text].get("kv_copies"):
        assert members["tp_kv"] == [r for r in range(WORLD) if r // copies == rank // copies]
    if ends := LAYOUTS[text].get("embedding_ranks"):
        alike = [r for r in range(WORLD) if {**layout.coordinates(r), "pp": 0} == {**own, "pp": 0}]
        assert members.get("pp_ends") == ([alike[0], alike[-1]] if own["pp"] in ends else None)


def test_where_groups_are_made_one_by_one_none_is_made_twice() -> None:
    """As many as the axes have, and those of the copies and of the pipeline once, with experts too."""
    _, _, made = on_stage(described, "pp2.dp2.shard2.tp2.ep2", 3, False, {"has_experts": True})
    assert made == 5 * 8 + 8, "pp, dp_replicate, dp_shard, tp and ep_shard in pairs, and ep"


def waiting(text: str) -> set[float]:
    """Seconds that the groups of a layout wait, on this rank."""
    mesh: Mesh = build_mesh(RankGrid(Layout.parse(text), kv_copies=2), "cpu")
    return {
        group._get_backend(meshes.torch.device("cpu")).options._timeout.total_seconds()
        for group in mesh.groups.values()
    }


def test_every_group_waits_as_long_as_the_world_s() -> None:
    """Not ten minutes, NCCL's default, nor gloo's half hour."""
    assert run_ranks(2, waiting, "tp2") == [{TIMEOUT_SECONDS}] * 2
