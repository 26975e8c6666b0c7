"""The devices of a run in the planner's terms, for `layout: auto`."""

from dataclasses import replace

from fivefold.core.errors import UserError
from fivefold.core.units import GIB
from fivefold.hardware.chip import chip_of_device
from fivefold.hardware.cluster import Cluster, nodes_of
from fivefold.launch.memory import room

OWN_LAYOUT = "write a layout, such as layout.dp_shard: -1, or name a file of fivefold calibrate: layout.hardware"


def cluster_here(kind: str, size: int, local_size: int, hardware: str = "") -> Cluster:
    """`size` workers, `local_size` of them on this machine; `kind`: cpu or cuda. All machines are assumed alike.

    `hardware`: a file with their speeds, in place of the planner's tables. Memory is measured on this machine: a GPU's,
    or for CPU workers their share of all. Raises `UserError` for a GPU that the planner does not know, and for a file
    of other devices.
    """
    name, memory = _gpu() if kind == "cuda" else ("cpu", _part_of_memory(local_size))
    here = hardware or f"1x{'cpu' if kind == 'cpu' else chip_of_device(name, fix=OWN_LAYOUT).name}"
    cluster = Cluster.parse(here, nodes_of(size, local_size))
    if cluster.chip.is_host != (kind == "cpu"):
        raise UserError(
            f"layout.hardware {hardware} is of {cluster.chip.name}, and this run is on {name}",
            fix="name the file that fivefold calibrate writes here, or leave layout.hardware out",
        )
    return cluster if memory is None else replace(cluster, chip=replace(cluster.chip, memory_gib=memory))


def _part_of_memory(workers: int) -> float | None:
    there = room()
    return None if there is None else there.total / workers / GIB


def _gpu() -> tuple[str, float]:
    """The GPU's name and GiB. Its properties are read without a context, which would take memory from the run."""
    import torch

    found = torch.cuda.get_device_properties(0)
    return found.name, found.total_memory / GIB
