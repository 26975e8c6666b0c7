"""Compare on all ranks what each of them reads for itself, before anything is computed from it."""

import json
import socket
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

import torch.distributed as dist

from fivefold.core.alike import FIX, difference
from fivefold.core.errors import NodesDiffer, UserError
from fivefold.core.text import listed
from fivefold.parallel import plain


def check_alike(read: Callable[[], Mapping[str, Any]], *, fix: str = FIX, more: str | None = None) -> None:
    """Raise `NodesDiffer`, the same on every rank, for the first field of `read()` that differs from rank 0's; or the
    error of the first rank that cannot read. Every rank calls this. A field is named with its values, ranks and hosts.
    """
    mine: dict[str, Any] = {}
    failed: UserError | None = None
    if dist.get_world_size() == 1:
        return
    try:
        mine = json.loads(json.dumps(read()))
    except UserError as raised:
        failed = raised
    apart = difference(mine, plain.of_first(mine))
    every_rank = plain.everywhere([socket.gethostname(), failed and failed.to_json(), apart])
    hosts = [host for host, *_ in every_rank]
    for rank, (_, error_json, _) in enumerate(every_rank):
        if error_json:
            error = UserError.from_json(error_json)
            raise type(error)(f"{_place([rank], hosts)}: {error.what}", fix=error.fix, more=error.more)
    differences = {rank: each for rank, (*_, each) in enumerate(every_rank) if each}
    if differences:
        name, own, other = next(iter(differences.values()))
        ranks = [rank for rank, each in differences.items() if each[0] == name]
        what = f"{name} is {other} on {_place([0], hosts)}, and {own} on {_place(ranks, hosts)}"
        raise NodesDiffer(what, fix=fix, more=more)


def _place(ranks: list[int], hosts: list[str]) -> str:
    """The ranks with the names of their hosts."""
    return ", ".join(
        f"rank {listed(list(of_host), 8)} ({host})" for host, of_host in groupby(ranks, key=lambda rank: hosts[rank])
    )
