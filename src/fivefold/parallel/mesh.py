"""The device mesh of a layout and the process groups its folds use. Private `DeviceMesh` surfaces stay in this file."""

from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fivefold.layout import MESH_AXES, Layout
from fivefold.parallel.sharding import Cut, Over, Place


@dataclass(frozen=True)
class Mesh:
    """The mesh of a layout seen from this rank: the axes of `MESH_AXES` of more than one rank, outermost first, and
    `dp_shard` always. (An axis of one rank would cost a process group per rank of the world.)

    `fsdp` is the mesh that `fully_shard` takes: (shard,) or, for HSDP, (replicate, shard); shard = dp_shard x cp.
    `experts` is the mesh that it takes for experts, over what `ep` leaves of dp_shard, cp and tp (of dp_shard and cp
    where tp splits each expert): `fsdp` itself where that is all the same; `ep_group` the ranks that the experts are
    dealt to (None for one). `kv_replicas` is the group of tp ranks that hold the same key/value heads (None when every
    rank has its own), `ends` that of the two pipeline ranks that hold a tied embedding (None when one does, and on the
    ranks between them).
    """

    layout: Layout
    device: DeviceMesh
    fsdp: DeviceMesh
    kv_replicas: dist.ProcessGroup | None
    experts: DeviceMesh
    ep_group: dist.ProcessGroup | None = None
    ends: dist.ProcessGroup | None = None
    cp_parts: dict[str, dist.ProcessGroup] = field(default_factory=dict)  # groups within cp, by their axis

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.device.get_group("pp")

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return self.device.get_group("cp")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.device.get_group("tp")

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """The ranks that hold copies of this rank's part, over dp_replicate."""
        return self.device.get_group("dp_replicate")

    @property
    def pp_rank(self) -> int:
        return self._rank("pp")

    @property
    def cp_rank(self) -> int:
        return self._rank("cp")

    @property
    def tp_rank(self) -> int:
        return self._rank("tp")

    @property
    def fsdp_rank(self) -> int:
        return self.fsdp.get_local_rank(self.fsdp.ndim - 1)

    @property
    def fsdp_size(self) -> int:
        return self.layout.dp_shard * self.layout.cp

    def place(self, rank: int) -> Place:
        """Where `rank` of the world stands: the mesh is the ranks in order, the last axis of `MESH_AXES` innermost."""
        rest, tp = divmod(rank, self.layout.tp)
        rest, fsdp = divmod(rest, self.fsdp_size)
        return Place(*divmod(rest, self.layout.dp_replicate), fsdp, tp)

    def cut(self, place: Place, over: Over) -> Cut:
        """The part that a rank has of a parameter whose blocks go to the ranks of `over`. Those of `ep` are taken
        innermost first from dp_shard, cp and tp, and FSDP shards over what is left of these. Where tp splits each
        expert, its ranks are the innermost parts."""
        if over == "tp":
            return Cut(place.tp, place.fsdp, self.fsdp_size)
        parts = self.layout.ep * self.layout.expert_parts
        row, part = divmod(place.fsdp * self.layout.tp + place.tp, parts)
        return Cut(part, row, self.rows("ep"))

    def part(self, over: Over) -> int:
        """The part that this rank has of such a parameter."""
        return self.cut(self.place(dist.get_rank()), over).part

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
        return self._rank("dp_replicate") * self.layout.dp_shard + self._rank("dp_shard")

    @property
    def is_first_of_row(self) -> bool:
        """True on the one rank that stands for all that share its rows: what a row has is counted there."""
        return self.pp_rank == self.cp_rank == self.tp_rank == 0

    @property
    def is_first_copy(self) -> bool:
        """True on the ranks that stand for all copies over `dp_replicate`."""
        return self._rank("dp_replicate") == 0

    def split_cp(self, neighbours: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """This rank's ring through cp in steps of `neighbours`, and its neighbours; every rank calls it."""
        layout, rank = self.layout, dist.get_rank()
        for first in range(0, layout.world, layout.cp * layout.tp):
            for tp in range(layout.tp):
                ranks = [first + cp * layout.tp + tp for cp in range(layout.cp)]
                rings = [("cp_ring", ranks[at::neighbours]) for at in range(neighbours)]
                beside = [("cp_ulysses", ranks[at : at + neighbours]) for at in range(0, layout.cp, neighbours)]
                for axis, members in (*rings, *beside):
                    group = dist.new_group(members)
                    if rank in members:
                        self.cp_parts[axis] = group
        return self.cp_parts["cp_ring"], self.cp_parts["cp_ulysses"]

    def _rank(self, axis: str) -> int:
        return self.device.get_local_rank(axis) if axis in self._axes else 0

    @property
    def _axes(self) -> tuple[str, ...]:
        return self.device.mesh_dim_names or ()

    @property
    def spanning_axes(self) -> set[str]:
        """Axes of several ranks whose group is the whole world: torch gives them the world's own group."""
        layout = self.layout
        sizes = {axis: getattr(layout, axis) for axis in MESH_AXES} | {"dp_shard": self.fsdp_size}
        sizes |= {"ep": layout.ep, "ep_shard": self.rows("ep")}
        return {axis for axis, size in sizes.items() if size == layout.world > 1}

    def axis_of(self, group_name: str) -> str:
        """The mesh axis whose process group has this name: how recorded collectives are told apart."""
        named: dict[str, str] = {self.device.get_group(axis).group_name: axis for axis in reversed(self._axes)}
        named[self.fsdp.get_group(self.fsdp.ndim - 1).group_name] = "dp_shard"
        if self.experts is not self.fsdp:
            shard = self.experts.ndim - 1
            named.update({self.experts.get_group(0).group_name: "dp_replicate"} if shard else {})
            named[self.experts.get_group(shard).group_name] = "ep_shard"
        if self.ep_group is not None:
            named[self.ep_group.group_name] = "ep"
        if self.kv_replicas is not None:
            named[self.kv_replicas.group_name] = "tp_kv"
        named |= {group.group_name: axis for axis, group in self.cp_parts.items()}
        if self.ends is not None:
            named[self.ends.group_name] = "pp_ends"
        named[dist.distributed_c10d._get_default_group().group_name] = "world"
        return named.get(group_name, group_name)


def build_mesh(
    layout: Layout, device_type: str, *, kv_copies: int = 1, experts: bool = False, tied_ends: tuple[int, ...] = ()
) -> Mesh:
    """Build the mesh over the current world; every rank calls it.

    `kv_copies`: how many neighbouring tp ranks share the same key/value heads; `experts`: the model has some;
    `tied_ends`: the pipeline ranks that hold a tied embedding.
    """
    sizes = {axis: size for axis, size in zip(MESH_AXES, layout.shape, strict=True) if size > 1 or axis == "dp_shard"}
    device = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if layout.cp == 1:
        fsdp = device["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else device["dp_shard"]
    else:
        fsdp = device["dp_shard", "cp"]._flatten("fsdp")
        if layout.dp_replicate > 1:
            fsdp = DeviceMesh._concatenate([device["dp_replicate"], fsdp])
    kv_group, ends = _kv_group(layout, kv_copies), _ends_group(layout, tied_ends)
    if not experts or (layout.ep == 1 and layout.expert_parts == layout.tp):
        return Mesh(layout, device, fsdp, kv_group, fsdp, ends=ends)
    return Mesh(layout, device, fsdp, kv_group, *_expert_meshes(layout, device_type), ends)


def _expert_meshes(layout: Layout, device_type: str) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """What experts are sharded over, and the group that they are dealt to: the same ranks in another shape, the one in
    which `Mesh.cut` counts them."""
    shape = {
        "pp": layout.pp, "dp_replicate": layout.dp_replicate, "ep_shard": layout.expert_shards, "ep": layout.ep,
        "expert_parts": layout.expert_parts,
    }  # fmt: skip
    sizes = {axis: size for axis, size in shape.items() if size > 1 or axis == "ep_shard"}
    device = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    fsdp = device[("dp_replicate", "ep_shard")] if layout.dp_replicate > 1 else device["ep_shard"]
    return fsdp, device.get_group("ep") if layout.ep > 1 else None


def _kv_group(layout: Layout, copies: int) -> dist.ProcessGroup | None:
    """tp is innermost, so neighbours are consecutive ranks."""
    if copies == 1:
        return None
    return _own_group([list(range(first, first + copies)) for first in range(0, layout.world, copies)])


def _ends_group(layout: Layout, pipeline_ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """pp is outermost: the ranks of a pipeline are a fixed distance apart."""
    if len(pipeline_ranks) < 2:
        return None
    size = layout.world // layout.pp
    return _own_group([[at * size + place for at in pipeline_ranks] for place in range(size)])


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """The group that this rank is in; every rank makes all of them."""
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
