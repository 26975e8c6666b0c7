"""Collectives of tensor, context and expert parallelism, as functions and as mappings: collectives with gradients.

They return new tensors ("functional" operators), so that `torch.compile` traces through them. A mapping is a pair of
functions, forward and backward: if one gathers, its gradient is scattered (Megatron's f and g).

Legend: B rows, T tokens, D hidden size, F features, V vocabulary, n ranks of a group.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.ops.keep import kept
from fivefold.parallel.sharding import Block
from fivefold.torch_internals import collectives

# ---- collectives -----------------------------------------------------------------------------------------------------


def gather(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [B, T/n, ...] on each of n ranks into [B, T, ...], in rank order along dimension 1."""
    size = group.size()
    stacked = collectives.wait_tensor(collectives.all_gather_into_tensor(x_BTD.contiguous(), size, group.group_name))
    return stacked.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)  # type: ignore[no-any-return]


def scatter_sum(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter [B, T, ...] on each of n ranks to this rank's [B, T/n, ...] of their sum."""
    size = group.size()
    stacked = x_BTD.unflatten(1, (size, -1)).transpose(0, 1).contiguous().flatten(0, 1)  # type: ignore[no-untyped-call]
    return collectives.wait_tensor(  # type: ignore[no-any-return]
        collectives.reduce_scatter_tensor(stacked, "sum", size, group.group_name)
    )


def sum_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group.group_name))  # type: ignore[no-any-return]


def max_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "max", group.group_name))  # type: ignore[no-any-return]


def exchange(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows of dimension 0 to every rank, `sent[r]` to rank r, in order, and receive `received[r]` from it."""
    return collectives.wait_tensor(  # type: ignore[no-any-return]
        collectives.all_to_all_single(rows.contiguous(), received, sent, group.group_name)
    )


# ---- mappings --------------------------------------------------------------------------------------------------------


def mapping(
    there: Callable[..., Tensor], back: Callable[..., Tensor], *, is_kept: bool = False
) -> Callable[..., Tensor]:
    """Make a function of a tensor that computes `there(x, *args)`, with the gradient `back(gradient, *args)`.

    `is_kept`: selective recompute saves its result. Gathered tokens are not saved: they are as many times as large as
    there are ranks.
    """

    class Mapping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
            ctx.args = args
            return kept(lambda: there(x, *args)) if is_kept else there(x, *args)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            return (back(grads[0], *ctx.args), *[None] * len(ctx.args))

    return Mapping.apply


def identity(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


# [B, T/n, D] -> [B, T, D]. Each rank's gradient covers its own features only, so it is summed while it is scattered.
gather_from_sequence = mapping(gather, scatter_sum)
# Partial sums [B, T, D] -> their sum [B, T/n, D].
reduce_scatter_to_sequence = mapping(scatter_sum, gather, is_kept=True)
# Into column-parallel linears: [B, T, D] on every rank; backward sums the gradients of the ranks' own features.
copy_to_tensor_parallel = mapping(identity, sum_all)
# Out of row-parallel linears: partial sums -> their sum on every rank.
reduce_from_tensor_parallel = mapping(sum_all, identity, is_kept=True)


def gather_columns(logits: Tensor, group: dist.ProcessGroup, blocks: tuple[Block, ...]) -> Tensor:
    """Gather [..., V_local] into [..., V] over unequal shards."""
    longest = max(stop - start for start, stop in blocks)
    parts = gather(F.pad(logits, (0, longest - logits.shape[-1])).unsqueeze(1), group).unbind(1)
    return torch.cat([part[..., : stop - start] for part, (start, stop) in zip(parts, blocks, strict=True)], dim=-1)


def own_columns(grad: Tensor, group: dist.ProcessGroup, blocks: tuple[Block, ...]) -> Tensor:
    """Take this rank's [..., V_local] of [..., V]."""
    return grad[..., slice(*blocks[dist.get_rank(group)])].contiguous()


gather_vocabulary = mapping(gather_columns, own_columns)


def gather_blocks(x_BTF: Tensor, group: dist.ProcessGroup, blocks: tuple[tuple[Block, ...], ...]) -> Tensor:
    """Gather [B, T, F_local] into [B, T, F] in the global order."""
    longest = max(width(block) for block in blocks)
    parts = gather(F.pad(x_BTF, (0, longest - x_BTF.shape[-1])).unsqueeze(1), group).unbind(1)
    out = x_BTF.new_empty(*x_BTF.shape[:-1], max(stop for block in blocks for _, stop in block))
    for part, block in zip(parts, blocks, strict=True):
        out[..., feature_indices(block).to(x_BTF.device)] = part[..., : width(block)]
    return out


def sum_own_blocks(grad: Tensor, group: dist.ProcessGroup, blocks: tuple[tuple[Block, ...], ...]) -> Tensor:
    """Reduce [B, T, F] to this rank's features of the sum over ranks. Ranks with copies of the same features each get
    their share of the gradient, which is summed over them later."""
    own = blocks[dist.get_rank(group)]
    return sum_all(grad, group)[..., feature_indices(own).to(grad.device)] / blocks.count(own)


gather_features = mapping(gather_blocks, sum_own_blocks)


def feature_indices(blocks: tuple[Block, ...]) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in blocks])


def width(blocks: tuple[Block, ...]) -> int:
    return sum(stop - start for start, stop in blocks)
