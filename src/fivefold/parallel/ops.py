"""The collectives that tensor parallelism (over dimension 1) and expert parallelism (rows) are made of, as functional
operators.

Functional (they return new tensors) so that `torch.compile` traces through them.
"""

import torch.distributed as dist
from torch import Tensor

from fivefold.torch_internals import collectives


def gather(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, T/n, ...] on each of n ranks -> [B, T, ...], rank order along dimension 1."""
    size = group.size()
    stacked = collectives.wait_tensor(collectives.all_gather_into_tensor(x_BTD.contiguous(), size, group.group_name))
    return stacked.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)  # type: ignore[no-any-return]


def scatter_sum(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, T, ...] on each of n ranks -> this rank's [B, T/n, ...] of their sum."""
    size = group.size()
    stacked = x_BTD.unflatten(1, (size, -1)).transpose(0, 1).contiguous().flatten(0, 1)  # type: ignore[no-untyped-call]
    return collectives.wait_tensor(  # type: ignore[no-any-return]
        collectives.reduce_scatter_tensor(stacked, "sum", size, group.group_name)
    )


def sum_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group's ranks, on every rank."""
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group.group_name))  # type: ignore[no-any-return]


def exchange(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of dimension 0 to every rank, `sent[r]` of them to rank r, in order; `received[r]` come from it."""
    return collectives.wait_tensor(  # type: ignore[no-any-return]
        collectives.all_to_all_single(rows.contiguous(), received, sent, group.group_name)
    )
