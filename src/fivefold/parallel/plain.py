"""Exchange plain data between ranks, as JSON.

The object collectives of torch send pickles, which run code when they are read, and a rank's socket may receive from
somebody else. Tuples arrive as lists, and the keys of a dict are strings, because JSON has no others. Every rank of the
group calls these.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def everywhere(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather `value` of every rank, in rank order."""
    mine = _encoded(value, group)
    sizes = _sizes(mine, group)
    padded = _padded(mine, max(sizes))
    gathered = list(padded.repeat(len(sizes), 1))  # own values, because a backend of one process sends nothing
    dist.all_gather(gathered, padded, group=group)
    return [_decoded(data, size) for data, size in zip(gathered, sizes, strict=True)]


def on_first(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Gather `value` of every rank of a group that spans the world, in rank order, on rank 0; None on the others. Each
    is sent in its own size: one rank may say a thousand times more than the others."""
    mine = _encoded(value, group)
    sizes = _sizes(mine, group)
    if dist.get_rank():
        dist.send(mine, dst=0, group=group)
        return None
    found = [_decoded(mine, len(mine))]
    for rank, size in enumerate(sizes[1:], start=1):
        dist.recv(sent := mine.new_empty(size), src=rank, group=group)
        found.append(_decoded(sent, size))
    return found


def of_first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast `value` of rank 0 of a group that spans the world to every rank."""
    mine = _encoded(value if dist.get_rank() == 0 else None, group)
    size = torch.tensor([len(mine)], device=mine.device)
    dist.broadcast(size, src=0, group=group)
    sent = _padded(mine, int(size))
    dist.broadcast(sent, src=0, group=group)
    return _decoded(sent, int(size))


def _encoded(value: Any, group: dist.ProcessGroup | None) -> Tensor:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return torch.tensor(bytearray(json.dumps(value).encode()), dtype=torch.uint8, device=device)


def _decoded(values: Tensor, size: int) -> Any:
    return json.loads(bytes(values[:size].tolist()))


def _sizes(mine: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    size = torch.tensor([len(mine)], device=mine.device)
    sizes = list(size.repeat(dist.get_world_size(group), 1))
    dist.all_gather(sizes, size, group=group)
    return [int(size) for size in sizes]


def _padded(values: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(values[:size], (0, max(0, size - len(values))))
