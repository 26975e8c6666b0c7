"""The devices of a run as the planner knows them, for `layout: auto`."""

from dataclasses import replace

from fivefold.core.errors import UserError
from fivefold.launch.memory import GIB, room
from fivefold.planner.chips import chip_of_device
from fivefold.planner.cluster import Cluster


def cluster_here(kind: str, size: int, local_size: int) -> Cluster:
    """`size` workers, `local_size` of them on this machine; `kind`: cpu or cuda. Machines are taken to be alike.

    Memory is what this machine has: a GPU's, or for workers on a CPU their part of all. Raises `UserError` for a GPU
    that the planner does not know.
    """
    # Where the last machine has fewer workers, each is taken for a node of its own: links are then too slow, never
    # too fast.
    nodes, devices = (size // local_size, local_size) if size % local_size == 0 else (size, 1)
    name, memory = _gpu() if kind == "cuda" else ("cpu", _part_of_memory(local_size))
    cluster = Cluster.parse(f"{nodes}x{devices}x{name}")
    return cluster if memory is None else replace(cluster, chip=replace(cluster.chip, memory_gib=memory))


def _part_of_memory(workers: int) -> float | None:
    there = room()
    return None if there is None else there.total / workers / GIB


def _gpu() -> tuple[str, float]:
    """The chip's name and GiB. Its properties are read without a context on it, which would take memory of the run."""
    import torch

    found = torch.cuda.get_device_properties(0)
    chip = chip_of_device(found.name)
    if chip is None:
        raise UserError(
            f"layout: auto: the planner does not know {found.name}",
            fix="write a layout, such as layout.dp_shard: -1; fivefold plan takes the numbers of a device in a file",
            more="docs/planner.md",
        )
    return chip.name, found.total_memory / GIB
