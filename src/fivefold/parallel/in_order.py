"""Sums over ranks in the order of these, whatever a backend's all-reduce does: the same bits on every rank, and for a
number alone as for many."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def sum_in_order(parts: Iterable[Tensor], out: Tensor) -> None:
    """Add `parts` one after the other into `out`. (`torch.sum` adds in an order that follows from the shape.)"""
    for at, part in enumerate(parts):
        out.copy_(part) if at == 0 else out.add_(part)


def mean_in_order(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean of `values`, one-dimensional, over the ranks of a group. Each rank sums a part of them, and all gather
    these: the bytes of an all-reduce."""
    ranks = group.size()
    sent = torch.nn.functional.pad(values, (0, -len(values) % ranks))
    received, mean = torch.empty_like(sent), sent.new_empty(len(sent) // ranks)
    dist.all_to_all_single(received, sent, group=group)
    sum_in_order(received.view(ranks, -1), mean)
    mean /= ranks
    dist.all_gather_into_tensor(received, mean, group=group)
    return received[: len(values)]
