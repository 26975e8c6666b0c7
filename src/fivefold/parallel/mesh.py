"""The process groups of a layout, and the meshes of them that FSDP takes.

The world is a grid of ranks with the axes of `MESH_AXES`, the last one innermost. An axis has a group on every rank; a
group that spans the world is the world's own. NCCL makes all groups of an axis in one split of the world's
communicator, where that is bound to a device; other backends make one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fivefold.core.layout import MESH_AXES, Layout
from fivefold.parallel.sharding import Cut, Over, Place
from fivefold.torch_internals import can_split_world, timeout_of_world


@dataclass(frozen=True)
class Mesh:
    """The groups of a layout on this rank, by axis: those of `MESH_AXES` of more than one rank, and `dp_shard` always,
    which is dp_shard x cp here, what FSDP shards over.

    Others, where there are any: `ep`, the ranks that experts are dealt to; `ep_shard`, those that FSDP shards experts
    over, which is what `ep` leaves of dp_shard, cp and tp (of dp_shard and cp where tp splits each expert); `tp_kv`,
    the tp ranks with the same key/value heads; `pp_ends`, the two pipeline ranks that hold a tied embedding; `cp_ring`
    and `cp_ulysses` within cp. `fsdp` and `experts` are the meshes that `fully_shard` takes: (shard,) or, for HSDP,
    (replicate, shard); the same where experts are sharded as all else is.
    """

    layout: Layout
    groups: dict[str, dist.ProcessGroup]
    fsdp: DeviceMesh
    experts: DeviceMesh

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.groups["pp"]

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return self.groups["cp"]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.groups["tp"]

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """The ranks that hold copies of this rank's part, over dp_replicate."""
        return self.groups["dp_replicate"]

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """None where no experts are dealt to ranks."""
        return self.groups.get("ep")

    @property
    def kv_replicas(self) -> dist.ProcessGroup | None:
        """None where every rank has key/value heads of its own."""
        return self.groups.get("tp_kv")

    @property
    def embedding_group(self) -> dist.ProcessGroup | None:
        """None where one rank holds the tied embedding, and on the ranks between the two that do."""
        return self.groups.get("pp_ends")

    @property
    def pp_rank(self) -> int:
        return self._own.pp

    @property
    def cp_rank(self) -> int:
        return self._own.fsdp % self.layout.cp

    @property
    def tp_rank(self) -> int:
        return self._own.tp

    @property
    def fsdp_rank(self) -> int:
        return self._own.fsdp

    @property
    def fsdp_size(self) -> int:
        return self.layout.dp_shard * self.layout.cp

    @property
    def _own(self) -> Place:
        return self.place(dist.get_rank())

    def place(self, rank: int) -> Place:
        """Where `rank` of the world stands: the mesh is the ranks in order, the last axis of `MESH_AXES` innermost."""
        return place(self.layout, rank)

    def cut(self, place: Place, over: Over) -> Cut:
        """The part that a rank has of a parameter whose blocks go to the ranks of `over`. Those of `ep` are taken
        innermost first from dp_shard, cp and tp, and FSDP shards over what is left of these. Where tp splits each
        expert, its ranks are the innermost parts."""
        if over == "tp":
            return Cut(place.tp, place.fsdp, self.fsdp_size)
        parts = self.layout.ep * self.layout.etp
        row, part = divmod(place.fsdp * self.layout.tp + place.tp, parts)
        return Cut(part, row, self.rows("ep"))

    def part(self, over: Over) -> int:
        """The part that this rank has of such a parameter."""
        return self.cut(self._own, over).part

    def rows(self, over: Over) -> int:
        """How many ranks FSDP shards a parameter over whose blocks go to the ranks of `over`."""
        return self.fsdp_size if over == "tp" else self.layout.expert_shards

    def fsdp_mesh(self, over: Over) -> DeviceMesh:
        """The mesh that `fully_shard` takes for such a parameter."""
        return self.fsdp if over == "tp" else self.experts

    def fsdp_axis(self, over: Over) -> str:
        """The name of the axis that it shards over."""
        return "dp_shard" if self.fsdp_mesh(over) is self.fsdp else "ep_shard"

    @property
    def data_rank(self) -> int:
        """This rank's place among the `layout.data_ranks` that read different rows."""
        return self._own.replica * self.layout.dp_shard + self._own.fsdp // self.layout.cp

    @property
    def is_first_of_row(self) -> bool:
        """True on the one rank that stands for all that share its rows: what a row has is counted there."""
        return self.pp_rank == self.cp_rank == self.tp_rank == 0

    @property
    def is_first_copy(self) -> bool:
        """True on the ranks that stand for all copies over `dp_replicate`."""
        return self._own.replica == 0

    def split_cp(self, neighbours: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """This rank's ring through cp in steps of `neighbours`, and its neighbours; every rank calls it."""
        grid = _grid(self.layout)
        split = grid.reshape(*grid.shape[:3], -1, neighbours, grid.shape[-1])  # cp as ring x neighbours
        for axis, dim in (("cp_ring", 3), ("cp_ulysses", 4)):
            group = _own_group(_along(split, dim), axis, self.fsdp.device_type)
            assert group is not None
            self.groups[axis] = group
        return self.groups["cp_ring"], self.groups["cp_ulysses"]

    @property
    def spanning_axes(self) -> set[str]:
        """Axes of several ranks whose group is the whole world: theirs is the world's own group."""
        world = dist.group.WORLD
        return {axis for axis, group in self.groups.items() if group is world and self.layout.world > 1}

    def axis_of(self, group_name: str) -> str:
        """The mesh axis whose process group has this name: how recorded collectives are told apart."""
        named: dict[str, str] = {group.group_name: axis for axis, group in self.groups.items()}
        if dist.group.WORLD:
            named[dist.group.WORLD.group_name] = "world"
        return named.get(group_name, group_name)


def place(layout: Layout, rank: int) -> Place:
    """Where `rank` of the world stands in a layout."""
    rest, tp = divmod(rank, layout.tp)
    rest, fsdp = divmod(rest, layout.dp_shard * layout.cp)
    return Place(*divmod(rest, layout.dp_replicate), fsdp, tp)


def build_mesh(
    layout: Layout,
    device_type: str,
    *,
    kv_copies: int = 1,
    experts: bool = False,
    embedding_ranks: tuple[int, ...] = (),
) -> Mesh:
    """Build the mesh over the current world; every rank calls it.

    `kv_copies`: how many neighbouring tp ranks share the same key/value heads; `experts`: the model has some;
    `embedding_ranks`: the pipeline ranks that hold a tied embedding.
    """
    grid, own = _grid(layout), place(layout, dist.get_rank())
    dims = {axis: [dim] for dim, axis in enumerate(MESH_AXES) if grid.shape[dim] > 1}
    dims["dp_shard"] = [2, 3]  # and cp
    found = {axis: _own_group(_along(grid, *of_axis), axis, device_type) for axis, of_axis in dims.items()}
    if kv_copies > 1:
        found["tp_kv"] = _own_group(_along(grid.reshape(-1, kv_copies), 1), "tp_kv", device_type, is_apart=True)
    if len(embedding_ranks) > 1:
        embedding_group = grid[list(embedding_ranks)].reshape(len(embedding_ranks), -1)
        found["pp_ends"] = _own_group(_along(embedding_group, 0), "pp_ends", device_type, is_apart=True)
    apart = experts and (layout.ep > 1 or layout.etp != layout.tp)
    dealt = grid.reshape(layout.pp, layout.dp_replicate, layout.expert_shards, layout.ep, layout.etp)
    if apart:
        found["ep_shard"] = _own_group(_along(dealt, 2), "ep_shard", device_type)
    if apart and layout.ep > 1:
        found["ep"] = _own_group(_along(dealt, 3), "ep", device_type)
    groups = {axis: group for axis, group in found.items() if group is not None}
    shards = grid[own.pp, ..., own.tp].reshape(layout.dp_replicate, -1)
    fsdp = _device_mesh(layout, groups, "dp_shard", shards, device_type)
    if not apart:
        return Mesh(layout, groups, fsdp, fsdp)
    _, _, _, ep, part = (int(at) for at in (dealt == dist.get_rank()).nonzero()[0])
    shards = dealt[own.pp, :, :, ep, part]
    return Mesh(layout, groups, fsdp, _device_mesh(layout, groups, "ep_shard", shards, device_type))


def _grid(layout: Layout) -> Tensor:
    """The ranks of the world, with the axes of `MESH_AXES`."""
    return torch.arange(layout.world, device="cpu").reshape(layout.shape)


def _along(grid: Tensor, *dims: int) -> list[list[int]]:
    """The ranks that differ in `dims` alone."""
    others = [dim for dim in range(grid.ndim) if dim not in dims]
    size = prod(grid.shape[dim] for dim in dims)
    ranks: list[list[int]] = grid.permute(*others, *dims).reshape(-1, size).tolist()
    return ranks


def _device_mesh(
    layout: Layout, groups: dict[str, dist.ProcessGroup], axis: str, ranks: Tensor, device_type: str
) -> DeviceMesh:
    """(axis,), or (dp_replicate, axis). `ranks`: of the second."""
    if layout.dp_replicate == 1:
        return DeviceMesh.from_group(groups[axis], device_type, mesh_dim_names=(axis,))
    both = [groups["dp_replicate"], groups[axis]]
    return DeviceMesh.from_group(both, device_type, ranks, mesh_dim_names=("dp_replicate", axis))


def _own_group(
    groups: Sequence[list[int]], axis: str, device_type: str, *, is_apart: bool = False
) -> dist.ProcessGroup | None:
    """The group that this rank is in; every rank makes all of them. One that spans the world is the world's own group,
    if it need not be `is_apart`. All have the timeout of the world's."""
    if len(groups[0]) == dist.get_world_size() and not is_apart:
        return dist.group.WORLD
    timeout = timeout_of_world(device_type)
    if can_split_world():
        return dist.split_group(split_ranks=list(groups), timeout=timeout, group_desc=axis)
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout, group_desc=axis)
        if dist.get_rank() in ranks:
            mine = group
    return mine
