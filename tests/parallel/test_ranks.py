"""The grid of ranks by arithmetic, against the same grid laid out in a tensor of the world."""

import time
from math import prod
from typing import Any

import pytest
import torch

from fivefold.parallel.layout import Layout
from fivefold.parallel.ranks import RankGrid, row_blocks

GRIDS: dict[str, dict[str, Any]] = {
    "single": {},
    "pp2.dp2.shard3.cp2.tp2": {},
    "pp4.dp2.shard2.cp8.tp8": {"kv_copies": 2, "embedding_ranks": (0, 3), "ulysses": 4},
    "dp2.shard8.tp4.ep16": {"has_experts": True},
    "pp2.dp2.shard4.cp2.tp4.ep4+etp": {"has_experts": True, "kv_copies": 4, "ulysses": 2},
    "tp4": {"has_experts": True, "kv_copies": 4},
}


def laid_out(grid: RankGrid) -> dict[str, list[list[int]]]:
    """The groups of every axis: the ranks that differ along some dimensions of the world alone."""
    layout = grid.layout
    world = torch.arange(layout.world).reshape(layout.shape)

    def along(ranks: torch.Tensor, *dims: int) -> list[list[int]]:
        others = [dim for dim in range(ranks.ndim) if dim not in dims]
        size = prod(ranks.shape[dim] for dim in dims)
        found: list[list[int]] = ranks.permute(*others, *dims).reshape(-1, size).tolist()
        return found

    experts = world.reshape(layout.pp, layout.dp_replicate, layout.expert_shards, layout.ep, layout.etp)
    rings = world.reshape(*layout.shape[:3], -1, grid.ulysses, layout.tp)
    ends = world[list(grid.embedding_ranks)].reshape(len(grid.embedding_ranks), -1) if grid.embedding_ranks else None
    return {
        "pp": along(world, 0), "dp_replicate": along(world, 1), "dp_shard": along(world, 2, 3), "cp": along(world, 3),
        "tp": along(world, 4), "ep_shard": along(experts, 2), "ep": along(experts, 3), "cp_ring": along(rings, 3),
        "cp_ulysses": along(rings, 4), "tp_kv": along(world.reshape(-1, grid.kv_copies), 1),
        "pp_ends": along(ends, 0) if ends is not None else [],
    }  # fmt: skip


@pytest.mark.parametrize("text", GRIDS)
def test_groups_are_those_of_a_tensor_of_the_world(text: str) -> None:
    grid = RankGrid(Layout.parse(text), **GRIDS[text])
    expected = laid_out(grid)
    for axis in grid.group_axes:
        assert sorted(map(list, grid.groups(axis))) == sorted(expected[axis]), axis
        for group in expected[axis]:
            assert all(list(grid.members(axis, rank)) == group for rank in group)
        assert grid.spans_world(axis) == (len(expected[axis][0]) == grid.world > 1 and axis not in ("tp_kv", "pp_ends"))


@pytest.mark.parametrize("text", GRIDS)
def test_coordinates_and_parts_are_places_in_that_tensor(text: str) -> None:
    grid = RankGrid(Layout.parse(text), **GRIDS[text])
    layout = grid.layout
    world = torch.arange(grid.world).reshape(layout.shape)
    inner = torch.arange(grid.world).reshape(-1, layout.dp_shard * layout.cp, layout.tp)
    experts = torch.arange(grid.world).reshape(-1, layout.expert_shards, layout.ep * layout.etp)
    for rank in range(grid.world):
        coords = grid.coords(rank)
        assert tuple(vars(coords).values()) == tuple((world == rank).nonzero()[0].tolist())
        _, fsdp, tp = (inner == rank).nonzero()[0].tolist()
        assert grid.shard_index(rank, "tp") == type(grid.shard_index(0, "tp"))(tp, fsdp, inner.shape[1])
        if grid.has_experts:
            _, row, part = (experts == rank).nonzero()[0].tolist()
            assert vars(grid.shard_index(rank, "ep")) == {
                "part": part,
                "fsdp_rank": row,
                "fsdp_size": experts.shape[1],
            }
            assert grid.fsdp_shards("ep") == experts.shape[1]


def test_tokens_of_all_ranks_are_the_row() -> None:
    grid = RankGrid(Layout.parse("shard2.cp2.tp2"))
    held = [grid.tokens(rank, 64, sequence_parallel=True) for rank in range(4)]
    assert sorted(t for blocks in held for start, stop in blocks for t in range(start, stop)) == list(range(64))
    assert grid.tokens(6, 64, sequence_parallel=False) == row_blocks(64, 2, 1)


def test_a_world_of_16384_ranks_costs_as_little_as_one_of_two() -> None:
    """A rank's groups, parts and place, in a hundredth of a second of the CPU; all groups of an axis in a second."""
    grid = RankGrid(Layout.parse("pp16.dp4.shard8.cp4.tp8.ep64"), has_experts=True, kv_copies=2)
    assert grid.world == 16384
    start = time.process_time()
    for axis in grid.group_axes:
        assert 9876 in grid.members(axis, 9876)
    assert grid.shard_index(9876, "ep").fsdp_size == grid.layout.expert_shards
    assert grid.coords(9876).pp == 9876 // 1024
    assert time.process_time() - start < 0.01
    assert sum(map(len, grid.groups("ep"))) == grid.world
    assert time.process_time() - start < 1
