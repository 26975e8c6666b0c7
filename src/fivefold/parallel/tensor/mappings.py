"""The collectives of tensor, context and expert parallelism as functions, and as mappings: collectives with gradients.

They return new tensors ("functional" operators), so that `torch.compile` traces through them. A mapping is a pair of
functions, forward beside backward: where one gathers, its gradient is scattered (Megatron's f and g).

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


def max_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest of the group's ranks, number by number, on every rank."""
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "max", group.group_name))  # type: ignore[no-any-return]


def exchange(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of dimension 0 to every rank, `sent[r]` of them to rank r, in order; `received[r]` come from it."""
    return collectives.wait_tensor(  # type: ignore[no-any-return]
        collectives.all_to_all_single(rows.contiguous(), received, sent, group.group_name)
    )


# ---- mappings --------------------------------------------------------------------------------------------------------


def mapping(
    there: Callable[..., Tensor], back: Callable[..., Tensor], *, is_kept: bool = False
) -> Callable[..., Tensor]:
    """A function of a tensor that computes `there(x, *args)`, and whose gradient is `back(gradient, *args)`.

    `is_kept`: selective recompute keeps its result. What gathers tokens is not kept: it is as many times as large as
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
    """`x` as it is."""
    return x.view_as(x)


# [B, T/n, D] -> [B, T, D]. Each rank's gradient covers its own features only, so it is summed while it is scattered.
gather_from_sequence = mapping(gather, scatter_sum)
# Partial sums [B, T, D] -> their sum [B, T/n, D].
reduce_scatter_to_sequence = mapping(scatter_sum, gather, is_kept=True)
# Into column-parallel linears: [B, T, D] on every rank, whose gradients are those of the ranks' own features.
copy_to_tensor_parallel = mapping(identity, sum_all)
# Out of row-parallel linears: partial sums -> their sum on every rank.
reduce_from_tensor_parallel = mapping(sum_all, identity, is_kept=True)


def gather_columns(logits: Tensor, group: dist.ProcessGroup, blocks: tuple[Block, ...]) -> Tensor:
    """[..., V_local] -> [..., V] over unequal shards."""
    longest = max(stop - start for start, stop in blocks)
    parts = gather(F.pad(logits, (0, longest - logits.shape[-1])).unsqueeze(1), group).unbind(1)
    return torch.cat([part[..., : stop - start] for part, (start, stop) in zip(parts, blocks, strict=True)], dim=-1)


def own_columns(grad: Tensor, group: dist.ProcessGroup, blocks: tuple[Block, ...]) -> Tensor:
    """[..., V] -> this rank's [..., V_local]."""
    return grad[..., slice(*blocks[dist.get_rank(group)])].contiguous()


gather_vocabulary = mapping(gather_columns, own_columns)


def gather_blocks(x_BTF: Tensor, group: dist.ProcessGroup, blocks: tuple[tuple[Block, ...], ...]) -> Tensor:
    """[B, T, F_local] -> [B, T, F] in the global order."""
    longest = max(width(each) for each in blocks)
    parts = gather(F.pad(x_BTF, (0, longest - x_BTF.shape[-1])).unsqueeze(1), group).unbind(1)
    out = x_BTF.new_empty(*x_BTF.shape[:-1], max(stop for each in blocks for _, stop in each))
    for part, each in zip(parts, blocks, strict=True):
        out[..., feature_indices(each).to(x_BTF.device)] = part[..., : width(each)]
    return out


def sum_own_blocks(grad: Tensor, group: dist.ProcessGroup, blocks: tuple[tuple[Block, ...], ...]) -> Tensor:
    """[B, T, F] -> this rank's features of the sum over ranks. Ranks that hold copies of the same features each get
    their share of the gradient: it is summed over them later."""
    own = blocks[dist.get_rank(group)]
    return sum_all(grad, group)[..., feature_indices(own).to(grad.device)] / blocks.count(own)


gather_features = mapping(gather_blocks, sum_own_blocks)


def feature_indices(blocks: tuple[Block, ...]) -> Tensor:
    """The features of these blocks, in order."""
    return torch.cat([torch.arange(start, stop) for start, stop in blocks])


def width(blocks: tuple[Block, ...]) -> int:
    """How many features these blocks hold."""
    return sum(stop - start for start, stop in blocks)
