"""The training loss in chunks, split by vocabulary: full logits never exist, forward or backward.

Each chunk of hidden states goes through the model's *own* forward with its base swapped for a pass-through, so
that soft-capping, logit scales and biases of the head survive. The gradients of a chunk are computed on the spot
and only [tokens, D] and the head's own gradients are kept (the idea of Liger Kernel, arXiv:2410.10989, with the
head under tensor parallelism).

Legend: N tokens of a chunk, D hidden size, V vocabulary rows of this tp rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.data.batch import IGNORE
from fivefold.models.anatomy import Anatomy
from fivefold.parallel.tensor import TensorParallel
from fivefold.torch_internals import saves_memory_of

Logits = Callable[[Tensor], Tensor]  # hidden states [1, N, D] -> logits [1, N, V]


def chunked_loss(
    logits_of: Logits,
    hidden_BTD: Tensor,
    labels_BT: Tensor,
    head_parameters: list[Tensor],
    sizes: tuple[int, ...],
    fold: TensorParallel,
    scale: Tensor | None = None,
    weights_BT: Tensor | None = None,
) -> Tensor:
    """Cross entropy summed over the targets of [B, T], each times its weight (None: 1), times `scale` (fp32 scalar).

    The gradients reach `hidden_BTD` and `head_parameters`. Without gradients enabled, nothing is kept.
    """
    hidden, labels = hidden_BTD.reshape(1, -1, hidden_BTD.shape[-1]), labels_BT.reshape(-1)
    weights = None if weights_BT is None else weights_BT.reshape(-1).double()
    if not torch.is_grad_enabled():
        total = _total(-target_log_probs(logits_of, hidden_BTD, labels_BT, sizes, fold), weights)
        return total if scale is None else total * scale
    return _ChunkedLoss.apply(logits_of, hidden, labels, sizes, fold, scale, weights, *head_parameters)  # type: ignore[no-any-return,no-untyped-call]


def target_log_probs(
    logits_of: Logits, hidden_BTD: Tensor, labels_BT: Tensor, sizes: tuple[int, ...], fold: TensorParallel
) -> Tensor:
    """Log-probability of the target of every position [B * T], fp32 or fp64, without gradient; 0 without a target."""
    hidden, labels = hidden_BTD.reshape(1, -1, hidden_BTD.shape[-1]), labels_BT.reshape(-1)
    parts = zip(torch.split(hidden, list(sizes), 1), torch.split(labels, list(sizes)), strict=True)
    with torch.no_grad():
        return -torch.cat([_cross_entropy(logits_of(h), y, fold)[0] for h, y in parts])


def _total(nll_N: Tensor, weights_N: Tensor | None) -> Tensor:
    """The weighted sum, fp64."""
    return nll_N.sum(dtype=torch.float64) if weights_N is None else nll_N.double().mul(weights_N).sum()


class _ChunkedLoss(torch.autograd.Function):
    """Forward computes the gradients too; backward hands them out."""

    @staticmethod
    def forward(
        ctx: Any, logits_of: Logits, hidden: Tensor, labels: Tensor, sizes: tuple[int, ...],
        fold: TensorParallel, scale: Tensor | None, weights: Tensor | None, *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        hidden_grad = torch.empty_like(hidden)
        sums: list[Tensor | None] = []  # None: of a parameter that the logits do not depend on
        parts = (torch.split(t, list(sizes), d) for t, d in ((hidden, 1), (labels, 0), (hidden_grad, 1)))
        weight_parts = [None] * len(sizes) if weights is None else torch.split(weights, list(sizes))
        for h, y, grad, weight in zip(*parts, weight_parts, strict=True):
            leaf = h.detach().requires_grad_()
            with torch.enable_grad():
                logits = logits_of(leaf)
            free = not saves_memory_of(logits)  # then their memory becomes that of their gradient
            nll, logits_grad = _cross_entropy(logits.detach(), y, fold, _factor(y, weight, scale), overwrite=free)
            loss = _total(nll, weight)
            chunk_grad, *grads = torch.autograd.grad(logits, [leaf, *parameters], logits_grad, allow_unused=True)
            total += loss if scale is None else loss * scale
            grad.copy_(chunk_grad)
            sums = [*grads] if len(sizes) == 1 else _accumulate(sums, grads)
        typed = (s if s is None else s.to(p.dtype) for s, p in zip(sums, parameters, strict=True))
        ctx.save_for_backward(hidden_grad, *typed)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden_grad, *sums = ctx.saved_tensors
        scaled = (s if s is None else s * grads[0] for s in sums)
        return (None, hidden_grad * grads[0], None, None, None, None, None, *scaled)


def _accumulate(sums: list[Tensor | None], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add a chunk's parameter gradients in fp32 or fp64. In bf16 a sum over many chunks would lose small gradients."""
    if not sums:
        return [g if g is None else g.to(_accumulator(g.dtype)) for g in grads]
    for s, g in zip(sums, grads, strict=True):
        if s is not None and g is not None:
            s += g
    return sums


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _factor(labels_N: Tensor, weights_N: Tensor | None, scale: Tensor | None) -> Tensor:
    """What the gradient of each target's cross entropy is multiplied by, [N]; 0 without a target."""
    has_target = labels_N != IGNORE
    factor = has_target if weights_N is None else torch.where(has_target, weights_N, 0.0)
    return factor if scale is None else factor * scale


def _cross_entropy(
    logits: Tensor, labels_N: Tensor, fold: TensorParallel, factor_N: Tensor | None = None, *, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """Cross entropy [N] of vocabulary-split logits [1, N, V], fp32 or fp64; with `factor_N` also the gradient of its
    sum with these factors (shape and dtype of the logits).

    One fp32 (fp64) buffer of [N, V], that of the logits themselves if they may be overwritten, is worked on in place:
    exponentials, softmax, gradient. Over tp, two all-reduces of [N]-sized vectors: the maximum logit; then the sum of
    exponentials together with the target's logit, which exactly one rank holds.
    """
    x_NV = logits[0].to(_accumulator(logits.dtype), copy=not overwrite)
    has_target = labels_N != IGNORE
    index_N = labels_N - fold.vocabulary[fold.rank][0]
    mine_N = has_target & (index_N >= 0) & (index_N < x_NV.shape[-1])
    index_N1 = torch.where(mine_N, index_N, 0).unsqueeze(-1)
    target_N = torch.where(mine_N, x_NV.gather(-1, index_N1).squeeze(-1), 0.0)
    highest_N = x_NV.amax(dim=-1)
    fold.all_reduce(highest_N, dist.ReduceOp.MAX)
    both_2N = torch.stack([x_NV.sub_(highest_N.unsqueeze(-1)).exp_().sum(dim=-1), target_N])
    fold.all_reduce(both_2N)
    sum_N, target_N = both_2N.unbind()
    nll_N = torch.where(has_target, highest_N + sum_N.log() - target_N, 0.0)
    if factor_N is None:
        return nll_N, logits
    factor_N = factor_N.to(x_NV.dtype)
    x_NV.mul_((factor_N / sum_N).unsqueeze(-1))
    x_NV.scatter_add_(-1, index_N1, (-factor_N * mine_N).unsqueeze(-1))
    return nll_N, x_NV.to(logits.dtype).unsqueeze(0)


def parameters_after_base(model: nn.Module, anatomy: Anatomy) -> list[Tensor]:
    """Trained parameters outside the base model, each once: those of the head, also if tied, and scales of the
    logits."""
    prefix = f"{anatomy.base}."
    named = model.named_parameters(remove_duplicate=False)
    return list(dict.fromkeys(p for name, p in named if p.requires_grad and not name.startswith(prefix)))
