"""Collectives with gradients: the pairs of tensor parallelism, forward beside backward (Megatron's f and g).

Legend: B rows, T tokens, D hidden size, F features, V vocabulary, n tp ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel import ops
from fivefold.parallel.sharding import Block


class GatherFromSequence(torch.autograd.Function):
    """[B, T/n, D] -> [B, T, D]; backward sums and scatters (each rank's gradient covers its own features only)."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return ops.gather(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ops.scatter_sum(grads[0], ctx.group), None


class ReduceScatterToSequence(torch.autograd.Function):
    """Partial sums [B, T, D] -> [B, T/n, D]; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return ops.scatter_sum(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ops.gather(grads[0], ctx.group), None


class CopyToTensorParallel(torch.autograd.Function):
    """Identity; backward sums the gradients of the ranks' own features."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ops.sum_all(grads[0], ctx.group), None


class ReduceFromTensorParallel(torch.autograd.Function):
    """Partial sums -> their sum on every rank; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return ops.sum_all(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class GatherVocabulary(torch.autograd.Function):
    """[..., V_local] -> [..., V] over unequal shards; backward keeps this rank's columns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup, blocks: tuple[Block, ...]) -> Tensor:
        ctx.block = blocks[dist.get_rank(group)]
        longest = max(stop - start for start, stop in blocks)
        padded = F.pad(logits, (0, longest - logits.shape[-1])).unsqueeze(1)
        parts = ops.gather(padded, group).unbind(1)
        return torch.cat([part[..., : stop - start] for part, (start, stop) in zip(parts, blocks, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][..., slice(*ctx.block)].contiguous(), None, None


class GatherFeatures(torch.autograd.Function):
    """[B, T, F_local] -> [B, T, F] in the global order; backward sums over ranks and keeps this rank's features.

    Ranks that hold copies of the same features each get their share of the gradient: it is summed over them later.
    """

    @staticmethod
    def forward(ctx: Any, x_BTF: Tensor, group: dist.ProcessGroup, blocks: tuple[tuple[Block, ...], ...]) -> Tensor:
        mine = blocks[dist.get_rank(group)]
        ctx.group, ctx.mine, ctx.copies = group, feature_indices(mine).to(x_BTF.device), blocks.count(mine)
        longest = max(width(each) for each in blocks)
        parts = ops.gather(F.pad(x_BTF, (0, longest - x_BTF.shape[-1])).unsqueeze(1), group).unbind(1)
        out = x_BTF.new_empty(*x_BTF.shape[:-1], max(stop for each in blocks for _, stop in each))
        for part, each in zip(parts, blocks, strict=True):
            out[..., feature_indices(each).to(x_BTF.device)] = part[..., : width(each)]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ops.sum_all(grads[0], ctx.group)[..., ctx.mine] / ctx.copies, None, None


def feature_indices(blocks: tuple[Block, ...]) -> Tensor:
    """The features of these blocks, in order."""
    return torch.cat([torch.arange(start, stop) for start, stop in blocks])


def width(blocks: tuple[Block, ...]) -> int:
    """How many features these blocks hold."""
    return sum(stop - start for start, stop in blocks)
