"""Compare on all ranks what each of them reads for itself, before anything is computed from it."""

import json
import socket
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, TypeVar

import torch.distributed as dist

from fivefold.core.alike import FIX, difference
from fivefold.core.errors import NodesDiffer, UserError
from fivefold.core.text import listed
from fivefold.parallel import plain

Read = TypeVar("Read")


def check_alike(read: Callable[[], Mapping[str, Any]], *, fix: str = FIX, more: str | None = None) -> None:
    """Raise `NodesDiffer`, the same on every rank, for the first field of `read()` that differs from rank 0's; or the
    error of the first rank that cannot read. Every rank calls this. A field is named with its values, ranks and hosts.
    """
    if dist.get_world_size() == 1:
        return
    mine = json.loads(json.dumps(on_every_rank(read)))
    every_rank = plain.everywhere([socket.gethostname(), difference(mine, plain.of_first(mine))])
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
    """The result of `read`, or the `UserError` that it raised."""
    try:
        return read(), None
    except UserError as error:
        return None, error


def raise_any(error: UserError | None) -> None:
    """Raise the first error of a rank, the same on every rank, with its rank and host if there are several."""
    if error is not None and dist.get_world_size() == 1:
        raise error
    for rank, (host, told) in enumerate(plain.everywhere([socket.gethostname(), error and error.to_json()])):
        if told:
            first = UserError.from_json(told)
            raise type(first)(f"rank {rank} ({host}): {first.what}", fix=first.fix, more=first.more)


def _place(ranks: list[int], hosts: list[str]) -> str:
    """The ranks with the names of their hosts."""
    return ", ".join(
        f"rank {listed(list(of_host), 8)} ({host})" for host, of_host in groupby(ranks, key=lambda rank: hosts[rank])
    )
