"""The process groups of a layout, the device meshes that FSDP takes, and a record of what a run sends over the groups.

`RankGrid` says which ranks form a group. An axis that spans the world uses the world's own group. NCCL makes all groups
of an axis by one split of the world's communicator, if that is bound to a device. Other backends make them one by one.
On a CPU, the ranks of a group that are all on one machine share memory (`ops/cpu`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from fivefold.ops.cpu import shared_memory
from fivefold.parallel.collectives import Collective
from fivefold.parallel.layout import Layout
from fivefold.parallel.ranks import APART, RankGrid
from fivefold.torch_internals import Dispatch, can_split_world, group_among, timeout_of_world


@dataclass(frozen=True)
class Mesh:
    """This rank's process groups by axis (`RankGrid.axes`). `dp_shard`, over which FSDP shards, always exists. The
    others exist if they have several ranks: `tp_kv` if these share key/value heads, and `pp_ends` on the two ends of a
    pipeline that hold the tied embedding.

    `meshes` are those of FSDP, by axis. `dp_shard` and `ep_shard`, for experts that are sharded over other ranks, are
    for `fully_shard`: (shard,), or (replicate, shard) for HSDP. `node` and `ep_node` are those of secondary copies:
    (copies, ranks of a copy).
    """

    grid: RankGrid
    groups: dict[str, dist.ProcessGroup]
    meshes: dict[str, DeviceMesh]

    @property
    def layout(self) -> Layout:
        return self.grid.layout

    def axis_of(self, group_name: str) -> str:
        """Mesh axis of the process group with this name, to identify recorded collectives."""
        named: dict[str, str] = {group.group_name: axis for axis, group in self.groups.items()}
        if dist.group.WORLD:
            named[dist.group.WORLD.group_name] = "world"
        return named.get(group_name, group_name)


def build_mesh(grid: RankGrid, device_type: str) -> Mesh:
    """Make the groups of `grid` over the current world. Every rank calls this."""
    found = {
        axis: _own_group([list(ranks) for ranks in grid.groups(axis)], axis, device_type) for axis in grid.group_axes
    }
    groups = {axis: group for axis, group in found.items() if group is not None}
    connect([dist.group.WORLD, *groups.values()])
    sharded = ("dp_shard", "ep_shard") if grid.experts_apart else ("dp_shard",)
    shared = {"node": "dp_shard", "ep_node": "ep_shard"} if grid.layout.hpz else {}
    meshes = {axis: _device_mesh(grid, groups, axis, device_type) for axis in sharded}
    meshes |= {axis: _node_mesh(grid, groups, axis, of, device_type) for axis, of in shared.items() if axis in groups}
    return Mesh(grid, groups, meshes)


def connect(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Let the ranks of each group share memory if they can. Every rank calls this."""
    for group in filter(None, groups):
        shared_memory.connect(group)


def _device_mesh(grid: RankGrid, groups: dict[str, dist.ProcessGroup], axis: str, device_type: str) -> DeviceMesh:
    """Device mesh (axis,), or (dp_replicate, axis) of replicas that sum every gradient."""
    if grid.layout.dp_replicate == grid.layout.copies_apart:
        return DeviceMesh.from_group(groups[axis], device_type, mesh_dim_names=(axis,))
    copies = grid.members("dp_replicate", dist.get_rank())
    ranks = torch.tensor([grid.members(axis, rank) for rank in copies], device="cpu")
    both = [groups["dp_replicate"], groups[axis]]
    return DeviceMesh.from_group(both, device_type, ranks, mesh_dim_names=("dp_replicate", axis))


def _node_mesh(
    grid: RankGrid, groups: dict[str, dist.ProcessGroup], axis: str, of: str, device_type: str
) -> DeviceMesh:
    """Device mesh (copies, ranks of a copy) over the ranks of `of`. FSDP communicates over the inner
    dimension only, so the outer one reuses the group of all ranks."""
    ranks = torch.tensor(grid.members(of, dist.get_rank()), device="cpu").view(-1, grid.size(axis))
    return DeviceMesh.from_group([groups[of], groups[axis]], device_type, ranks, mesh_dim_names=("copies", axis))


def _own_group(groups: Sequence[list[int]], axis: str, device_type: str) -> dist.ProcessGroup | None:
    """Make all groups of an axis, on every rank, and return this rank's. A group that spans the world is the world's
    own group, unless its axis is in `APART`. New groups get the timeout of the world's group."""
    if len(groups[0]) == dist.get_world_size() and axis not in APART:
        return dist.group.WORLD
    timeout = timeout_of_world(device_type)
    if can_split_world():
        made = dist.split_group(split_ranks=list(groups), timeout=timeout, group_desc=axis)
        return made if isinstance(made, dist.ProcessGroup) else None  # an int on ranks outside of all groups
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout, group_desc=axis)
        if dist.get_rank() in ranks:
            mine = group
    return mine


# ---- what a run sends: every collective that this rank issues, noted at the dispatcher -------------------------------

# Operator name (namespaces c10d and _c10d_functional) -> (kind, which buffer is the larger one).
_KINDS = {
    "_allgather_base_": ("all_gather", "first"),
    "all_gather_into_tensor": ("all_gather", "result"),
    "_reduce_scatter_base_": ("reduce_scatter", "second"),
    "reduce_scatter_tensor": ("reduce_scatter", "first"),
    "allreduce_": ("all_reduce", "first"),
    "all_reduce": ("all_reduce", "first"),
    "all_reduce_": ("all_reduce", "first"),
    "broadcast_": ("broadcast", "first"),
    "alltoall_base_": ("all_to_all", "second"),
    "all_to_all_single": ("all_to_all", "first"),
    "send": ("send", "first"),
    "recv_": ("recv", "first"),
}


@contextmanager
def record(mesh: Mesh) -> Iterator[list[Collective]]:
    """Collect every collective that this rank issues inside the block (groups of one rank left out)."""
    found: list[Collective] = []

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operator(*args, **kwargs)
        name = operator.overloadpacket.__name__
        if operator.namespace in ("c10d", "_c10d_functional") and name in _KINDS:
            kind, which = _KINDS[name]
            group_name, size = group_among(args)
            if size > 1:
                buffer = result if which == "result" else args[which == "second"]
                volume = sum(tensor.nbytes for tensor in tree_leaves(buffer) if isinstance(tensor, torch.Tensor))
                found.append(Collective(mesh.axis_of(group_name), kind, 1, volume))
        return result

    with Dispatch(run):
        yield found
