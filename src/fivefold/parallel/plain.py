"""Exchange plain data between ranks, as JSON; and compare on all what each of them reads for itself.

The object collectives of torch send pickles, which run code when they are read, and a rank's socket may receive from
somebody else. Tuples arrive as lists, and the keys of a dict are strings, because JSON has no others. Every rank of the
group calls these.
"""

import json
import socket
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.alike import FIX, difference
from fivefold.core.errors import NodesDiffer, UserError
from fivefold.core.text import listed


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


# ---- the same on all ranks -------------------------------------------------------------------------------------------

Read = TypeVar("Read")


def check_alike(read: Callable[[], Mapping[str, Any]], *, fix: str = FIX, more: str | None = None) -> None:
    """Raise `NodesDiffer`, the same on every rank, for the first field of `read()` that differs from rank 0's; or the
    error of the first rank that cannot read. Every rank calls this. A field is named with its values, ranks and hosts.
    """
    if dist.get_world_size() == 1:
        return
    mine = json.loads(json.dumps(on_every_rank(read)))
    every_rank = everywhere([socket.gethostname(), difference(mine, of_first(mine))])
    hosts = [host for host, _ in every_rank]
    differences = {rank: each for rank, (_, each) in enumerate(every_rank) if each}
    if differences:
        name, own, other = next(iter(differences.values()))
        ranks = [rank for rank, each in differences.items() if each[0] == name]
        what = f"{name} is {other} on {_place([0], hosts)}, and {own} on {_place(ranks, hosts)}"
        raise NodesDiffer(what, fix=fix, more=more)


def on_every_rank(read: Callable[[], Read]) -> Read:
    """The result of `read` on this rank. Every rank calls this; the `UserError` of one is raised on all.

    Otherwise a rank that cannot go on would leave the others waiting for it.
    """
    found, error = tried(read)
    raise_any(error)
    return found  # type: ignore[return-value]


def tried(read: Callable[[], Read]) -> tuple[Read | None, UserError | None]:
    try:
        return read(), None
    except UserError as error:
        return None, error


def raise_any(error: UserError | None) -> None:
    """Raise the first error of a rank, the same on every rank, with its rank and host if there are several."""
    if error is not None and dist.get_world_size() == 1:
        raise error
    for rank, (host, told) in enumerate(everywhere([socket.gethostname(), error and error.to_json()])):
        if told:
            first = UserError.from_json(told)
            raise type(first)(f"rank {rank} ({host}): {first.what}", fix=first.fix, more=first.more)


def _place(ranks: list[int], hosts: list[str]) -> str:
    return ", ".join(
        f"rank {listed(list(of_host), 8)} ({host})" for host, of_host in groupby(ranks, key=lambda rank: hosts[rank])
    )
