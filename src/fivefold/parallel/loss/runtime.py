"""The training loss in chunks, over a split vocabulary: full logits never exist, forward or backward.

Each chunk of hidden states goes through the model's *own* forward with its base swapped for a pass-through, so
that soft-capping, logit scales and biases of the head survive. The gradients of a chunk are computed on the spot
and only [tokens, D] and the head's own gradients are kept (the idea of Liger Kernel, arXiv:2410.10989, with the
head under tensor parallelism).

Three functions work on the logits of a chunk, and tp exchanges vectors between them. They run operator by operator, or
compiled (`Kernels`).

Legend: N tokens of a chunk, D hidden size, V vocabulary rows of this tp rank, K tokens that a teacher finds likeliest.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.data.batch import IGNORE
from fivefold.models.anatomy import Anatomy
from fivefold.parallel.tensor.runtime import TensorParallel
from fivefold.torch_internals import saves_memory_of

Logits = Callable[[Tensor], Tensor]  # hidden states [1, N, D] -> logits [1, N, V]


@dataclass(frozen=True)
class SoftTargets:
    """A teacher's prediction: its K likeliest tokens and their log-probabilities, [B, T, K] each.

    The loss of a position becomes (1 - alpha) * cross entropy of its target + alpha * temperature^2 * KL(p, q): p is
    the teacher's softmax over these K tokens, q the model's over the vocabulary, both of logits / temperature
    (https://arxiv.org/abs/1503.02531)."""

    tokens: Tensor
    log_probs: Tensor
    temperature: float
    alpha: float

    def cut(self, cut: Callable[[Tensor], Tensor]) -> "SoftTargets":
        """Cut the targets to the tokens that `cut` leaves of [B, T, ...]."""
        return SoftTargets(cut(self.tokens), cut(self.log_probs), self.temperature, self.alpha)

    def split(self, sizes: Sequence[int]) -> Iterator["SoftTargets"]:
        """Yield the targets of each chunk, [N, K]."""
        flat = (torch.split(tensor.flatten(0, -2), list(sizes)) for tensor in (self.tokens, self.log_probs))
        for tokens, log_probs in zip(*flat, strict=True):
            yield SoftTargets(tokens, log_probs, self.temperature, self.alpha)


def chunked_loss(
    logits_of: Logits,
    hidden_BTD: Tensor,
    labels_BT: Tensor,
    head_parameters: list[Tensor],
    sizes: tuple[int, ...],
    fold: TensorParallel,
    scale: Tensor | None = None,
    weights_BT: Tensor | None = None,
    soft: SoftTargets | None = None,
    kernels: "Kernels | None" = None,
) -> Tensor:
    """Sum the cross entropy over the targets of [B, T], each times its weight (None: 1), times `scale` (fp32 scalar).
    With `soft` it also follows a teacher at these positions. `kernels`: None for operator by operator.

    The gradients reach `hidden_BTD` and `head_parameters`. Without gradients enabled, nothing is saved.
    """
    hidden, labels = hidden_BTD.reshape(1, -1, hidden_BTD.shape[-1]), labels_BT.reshape(-1)
    weights = None if weights_BT is None else weights_BT.reshape(-1).double()
    if not torch.is_grad_enabled():
        total = _total(-target_log_probs(logits_of, hidden_BTD, labels_BT, sizes, fold, kernels), weights)
        return total if scale is None else total * scale
    weight_parts = [None] * len(sizes) if weights is None else torch.split(weights, list(sizes))
    soft_parts = [None] * len(sizes) if soft is None else soft.split(sizes)
    parts = zip(torch.split(labels, list(sizes)), weight_parts, soft_parts, strict=True)
    chunks = [partial(_softmax_chunk, *part, scale=scale, fold=fold, kernels=kernels or EAGER) for part in parts]
    return summed_chunks(logits_of, hidden, head_parameters, sizes, chunks)


def summed_chunks(
    logits_of: Logits, hidden: Tensor, head_parameters: list[Tensor], sizes: tuple[int, ...],
    chunks: Sequence["ChunkLoss"],
) -> Tensor:  # fmt: skip
    """Sum the losses of chunks of hidden states [1, T, D], fp64. The gradients reach `hidden` and `head_parameters`."""
    return _ChunkedLoss.apply(logits_of, sizes, chunks, hidden, *head_parameters)  # type: ignore[no-any-return,no-untyped-call]


def target_log_probs(
    logits_of: Logits, hidden_BTD: Tensor, labels_BT: Tensor, sizes: tuple[int, ...], fold: TensorParallel,
    kernels: "Kernels | None" = None,
) -> Tensor:  # fmt: skip
    """Log-probability of the target of every position [B * T], fp32 or fp64, without gradient; 0 without a target."""
    hidden, labels = hidden_BTD.reshape(1, -1, hidden_BTD.shape[-1]), labels_BT.reshape(-1)
    parts = zip(torch.split(hidden, list(sizes), 1), torch.split(labels, list(sizes)), strict=True)
    with torch.no_grad():
        found = [_loss_and_gradient(logits_of(h), _softmaxes(y), fold, kernels=kernels or EAGER)[0] for h, y in parts]
        return -torch.cat(found)


def top_log_probs(
    logits_of: Logits, hidden_BTD: Tensor, sizes: tuple[int, ...], fold: TensorParallel, *, top_k: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Find the `top_k` likeliest of the first `vocabulary` tokens at every position, int64 [B * T, K], and their
    log-probabilities, fp32 or fp64, without gradient."""
    hidden = hidden_BTD.reshape(1, -1, hidden_BTD.shape[-1])
    with torch.no_grad():
        found = [_top(logits_of(h), fold, top_k, vocabulary) for h in torch.split(hidden, list(sizes), 1)]
    return torch.cat([tokens for tokens, _ in found]), torch.cat([values for _, values in found])


def _total(nll_N: Tensor, weights_N: Tensor | None) -> Tensor:
    """Weighted sum, fp64."""
    return nll_N.sum(dtype=torch.float64) if weights_N is None else nll_N.double().mul(weights_N).sum()


class ChunkLoss(Protocol):
    """Compute the loss of a chunk from its logits [1, N, V]: its sum, fp64, and the gradient of the sum by the logits.
    `overwrite`: the gradient may take the memory of the logits."""

    def __call__(self, logits: Tensor, *, overwrite: bool) -> tuple[Tensor, Tensor]: ...


def _softmax_chunk(
    labels_N: Tensor, weights_N: Tensor | None, soft: SoftTargets | None, logits: Tensor, *, overwrite: bool,
    scale: Tensor | None, fold: TensorParallel, kernels: "Kernels",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cross entropy of a chunk, also after a teacher. See `ChunkLoss`."""
    factor_N = _factor(labels_N, weights_N, scale)
    nll_N, logits_grad = _loss_and_gradient(
        logits, _softmaxes(labels_N, soft), fold, factor_N, overwrite=overwrite, kernels=kernels
    )
    loss = _total(nll_N, weights_N)
    return loss if scale is None else loss * scale, logits_grad


class _ChunkedLoss(torch.autograd.Function):
    """Loss whose forward computes the gradients too; backward returns them."""

    @staticmethod
    def forward(
        ctx: Any, logits_of: Logits, sizes: tuple[int, ...], chunks: Sequence[ChunkLoss], hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        hidden_grad = torch.empty_like(hidden)
        sums: list[Tensor | None] = []  # None for a parameter that the logits do not depend on
        parts = (torch.split(t, list(sizes), 1) for t in (hidden, hidden_grad))
        for h, grad, loss_of in zip(*parts, chunks, strict=True):
            leaf = h.detach().requires_grad_()
            with torch.enable_grad():
                logits = logits_of(leaf)
            free = not saves_memory_of(logits)  # then their gradient takes their memory
            loss, logits_grad = loss_of(logits.detach(), overwrite=free)
            chunk_grad, *grads = torch.autograd.grad(logits, [leaf, *parameters], logits_grad, allow_unused=True)
            total += loss
            grad.copy_(chunk_grad)
            sums = [*grads] if len(sizes) == 1 else _accumulate(sums, grads)
            del logits, logits_grad, chunk_grad, grads  # or they would coexist with the next chunk's
        typed = (s if s is None else s.to(p.dtype) for s, p in zip(sums, parameters, strict=True))
        ctx.save_for_backward(hidden_grad, *typed)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden_grad, *sums = ctx.saved_tensors
        scaled = (s if s is None else s * grads[0] for s in sums)
        return (None, None, None, hidden_grad * grads[0], *scaled)


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
    """Factor of the gradient of each target's cross entropy, [N]; 0 without a target."""
    has_target = labels_N != IGNORE
    factor = has_target if weights_N is None else torch.where(has_target, weights_N, 0.0)
    return factor if scale is None else factor * scale


# ---- softmaxes over a split vocabulary -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Softmax:
    """A softmax over the vocabulary, of logits / `temperature`, and its loss: the sum over `targets` of share * (log of
    the share, if `entropies` has it, - log-probability of the token), times `weight`.

    `targets`: tokens and their shares, [N, K] each; tokens of the text have K 1 and share 1. The shares of a position
    add up to 1, or to 0 if it has no target."""

    targets: tuple[tuple[Tensor, Tensor], ...]
    entropies: Tensor | None = None  # [N]
    temperature: float = 1.0
    weight: float = 1.0


def _softmaxes(labels_N: Tensor, soft: SoftTargets | None = None) -> tuple[_Softmax, ...]:
    """Make one softmax for the text, or for it and a teacher; a teacher with a temperature has one of its own."""
    has_target_N1 = (labels_N != IGNORE).unsqueeze(-1)
    of_text = labels_N.unsqueeze(-1), has_target_N1.double()
    if soft is None:
        return (_Softmax((of_text,)),)
    logs_NK = (soft.log_probs.double() / soft.temperature).log_softmax(-1)
    shares_NK = torch.where(has_target_N1, logs_NK.exp(), 0.0)
    of_teacher, entropies_N = (soft.tokens, shares_NK), (shares_NK * logs_NK).sum(-1)
    alpha, own = soft.alpha, (of_text[0], of_text[1] * (1 - soft.alpha))
    if soft.temperature == 1:
        return (_Softmax((own, (soft.tokens, shares_NK * alpha)), entropies_N * alpha),)
    teacher = _Softmax((of_teacher,), entropies_N, soft.temperature, alpha * soft.temperature**2)
    return (teacher,) if alpha == 1 else (_Softmax((of_text,), weight=1 - alpha), teacher)


def _loss_and_gradient(
    logits: Tensor, softmaxes: Sequence[_Softmax], fold: TensorParallel, factor_N: Tensor | None = None,
    *, kernels: "Kernels", overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sum `softmaxes` over logits [1, N, V] to [N], fp32 or fp64; also the gradient of its sum times `factor_N`."""
    alone = overwrite and len(softmaxes) == 1
    nll_N, grad = _cross_entropy(logits, softmaxes[0], fold, factor_N, overwrite=alone, kernels=kernels)
    for asked in softmaxes[1:]:
        nll, more = _cross_entropy(logits, asked, fold, factor_N, kernels=kernels)
        nll_N = nll_N + nll
        grad = grad if factor_N is None else grad.add_(more)
    return nll_N, grad


def _cross_entropy(
    logits: Tensor, asked: _Softmax, fold: TensorParallel, factor_N: Tensor | None = None,
    *, kernels: "Kernels", overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss `asked` of vocabulary-split logits [1, N, V], [N] in fp32 or fp64; with `factor_N` also the gradient of its
    sum with these factors (shape and dtype of the logits, and their memory if `overwrite`).

    Over tp, two all-reduces of [N]-sized vectors: the maximum logit; then the sum of exponentials together with the
    targets' logits. Exactly one rank holds each target's logit.
    """
    precise, heat = _accumulator(logits.dtype), asked.temperature
    own = [_held(tokens_NK, shares_NK.to(precise), logits.shape[-1], fold) for tokens_NK, shares_NK in asked.targets]
    highest_N, target_N = kernels.highest(logits[0], own, heat)
    fold.all_reduce(highest_N, dist.ReduceOp.MAX)
    sum_N, exponentials_NV = kernels.sums(logits[0], highest_N, heat, overwrite)
    both_2N = torch.stack([sum_N, target_N])
    fold.all_reduce(both_2N)
    sum_N, target_N = both_2N.unbind()
    has_target_N = torch.cat([shares_NK for _, shares_NK in asked.targets], -1).any(-1)
    nll_N = torch.where(has_target_N, highest_N + sum_N.log() - target_N, 0.0)
    if asked.entropies is not None:
        nll_N = nll_N + asked.entropies.to(nll_N)
    nll_N = nll_N * asked.weight
    if factor_N is None:
        return nll_N, logits
    factor_N = factor_N.to(precise) * (asked.weight / heat)
    return nll_N, kernels.gradient(exponentials_NV, logits[0], highest_N, sum_N, factor_N, own, heat, overwrite)[None]


def _held(tokens_NK: Tensor, shares_NK: Tensor, columns: int, fold: TensorParallel) -> tuple[Tensor, Tensor]:
    """Locate tokens among the columns of this rank, with their shares: column 0 and share 0 for tokens of others."""
    at_NK = tokens_NK - fold.vocabulary[fold.rank][0]
    mine_NK = (at_NK >= 0) & (at_NK < columns)
    return torch.where(mine_NK, at_NK, 0), torch.where(mine_NK, shares_NK, 0.0)


# ---- functions of logits ---------------------------------------------------------------------------------------------

_Held = list[tuple[Tensor, Tensor]]  # columns and shares, [N, K] each


class Kernels:
    """Functions run operator by operator. One fp32 (fp64) buffer of [N, V] is updated in place: exponentials, softmax,
    gradient. The logits themselves serve as the buffer if they may be overwritten."""

    def highest(self, logits_NV: Tensor, own: _Held, heat: float) -> tuple[Tensor, Tensor]:
        """Maximum logit, and the targets' logits weighted by their shares: fp32 (fp64) [N] each."""
        return _highest(logits_NV, own, heat)

    def sums(self, logits_NV: Tensor, highest_N: Tensor, heat: float, overwrite: bool) -> tuple[Tensor, Tensor | None]:
        """Sum of the exponentials, less the maximum, [N]; and the exponentials, if they are kept."""
        exponentials_NV = _exponentials(logits_NV, highest_N, heat, copy=not overwrite)
        return exponentials_NV.sum(dim=-1), exponentials_NV

    def gradient(
        self, exponentials_NV: Tensor | None, logits_NV: Tensor, highest_N: Tensor, sum_N: Tensor, factor_N: Tensor,
        own: _Held, heat: float, overwrite: bool,
    ) -> Tensor:  # fmt: skip
        """(softmax - shares) * factor, in the dtype of the logits."""
        assert exponentials_NV is not None
        return _gradient(exponentials_NV, sum_N, factor_N, own).to(logits_NV.dtype)


class CompiledKernels(Kernels):
    """Compiled functions, which each read the logits once. Exponentials are not saved: the gradient recomputes them,
    and takes the memory of the logits if it may."""

    def __init__(self, compiled: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._highest, self._sums, self._gradient, self._in_place = (
            compiled("the loss", function) for function in (_highest, _sums, _gradient_again, _gradient_in_place)
        )

    def highest(self, logits_NV: Tensor, own: _Held, heat: float) -> tuple[Tensor, Tensor]:
        return self._highest(logits_NV, own, heat)  # type: ignore[no-any-return]

    def sums(self, logits_NV: Tensor, highest_N: Tensor, heat: float, overwrite: bool) -> tuple[Tensor, Tensor | None]:
        return self._sums(logits_NV, highest_N, heat), None

    def gradient(
        self, exponentials_NV: Tensor | None, logits_NV: Tensor, highest_N: Tensor, sum_N: Tensor, factor_N: Tensor,
        own: _Held, heat: float, overwrite: bool,
    ) -> Tensor:  # fmt: skip
        if not overwrite:
            return self._gradient(logits_NV, highest_N, sum_N, factor_N, own, heat)  # type: ignore[no-any-return]
        self._in_place(logits_NV, highest_N, sum_N, factor_N, own, heat)
        return logits_NV


EAGER = Kernels()


def _highest(logits_NV: Tensor, own: _Held, heat: float) -> tuple[Tensor, Tensor]:
    precise = _accumulator(logits_NV.dtype)
    of_targets = [
        torch.where(shares_NK != 0, _over(logits_NV.gather(-1, at_NK).to(precise), heat) * shares_NK, 0.0)
        for at_NK, shares_NK in own
    ]
    return _over(logits_NV.amax(dim=-1).to(precise), heat), torch.cat(of_targets, -1).sum(-1)


def _exponentials(logits_NV: Tensor, highest_N: Tensor, heat: float, *, copy: bool = True) -> Tensor:
    x_NV = logits_NV.to(highest_N.dtype, copy=copy)
    return _over(x_NV, heat).sub_(highest_N.unsqueeze(-1)).exp_()


def _sums(logits_NV: Tensor, highest_N: Tensor, heat: float) -> Tensor:
    return _exponentials(logits_NV, highest_N, heat).sum(dim=-1)


def _gradient(x_NV: Tensor, sum_N: Tensor, factor_N: Tensor, own: _Held) -> Tensor:
    """Turn exponentials into the gradient, in place."""
    x_NV.mul_((factor_N / sum_N).unsqueeze(-1))
    for at_NK, shares_NK in own:
        given_NK = -factor_N.unsqueeze(-1) * shares_NK
        if torch.compiler.is_compiling() and at_NK.shape[-1] == 1:  # saves a separate write at the target
            columns_V = torch.arange(x_NV.shape[-1], device=x_NV.device)
            x_NV = x_NV + torch.where(columns_V == at_NK, given_NK, 0.0)
        else:
            x_NV.scatter_add_(-1, at_NK, given_NK)
    return x_NV


def _gradient_again(
    logits_NV: Tensor, highest_N: Tensor, sum_N: Tensor, factor_N: Tensor, own: _Held, heat: float
) -> Tensor:
    return _gradient(_exponentials(logits_NV, highest_N, heat), sum_N, factor_N, own).to(logits_NV.dtype)


def _gradient_in_place(logits_NV: Tensor, *rest: Any) -> None:
    logits_NV.copy_(_gradient_again(logits_NV, *rest))


def _over(x: Tensor, heat: float) -> Tensor:
    """Divide in place."""
    return x if heat == 1 else x.div_(heat)


def _top(logits: Tensor, fold: TensorParallel, top_k: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Find the likeliest tokens and log-probabilities [N, K] of vocabulary-split logits [1, N, V]."""
    x_NV = logits[0].to(_accumulator(logits.dtype))
    highest_N = x_NV.amax(dim=-1)
    fold.all_reduce(highest_N, dist.ReduceOp.MAX)
    sum_N = (x_NV - highest_N.unsqueeze(-1)).exp_().sum(dim=-1)
    fold.all_reduce(sum_N)
    first = fold.vocabulary[fold.rank][0]
    own = x_NV[:, : max(0, vocabulary - first)]
    values, at = own.topk(min(top_k, own.shape[-1]), dim=-1)
    missing = top_k - values.shape[-1]
    values = nn.functional.pad(values - (highest_N + sum_N.log()).unsqueeze(-1), (0, missing), value=float("-inf"))
    tokens = nn.functional.pad(at + first, (0, missing))
    if fold.group is None:
        return tokens, values
    values, tokens = fold.all_gather(values), fold.all_gather(tokens)
    values, at = values.topk(top_k, dim=-1)
    return tokens.gather(-1, at), values


# ---- parameters ------------------------------------------------------------------------------------------------------


def parameters_after_base(model: nn.Module, anatomy: Anatomy) -> list[Tensor]:
    """Trained parameters outside the base model, each once: those of the head, also if tied, and scales of the
    logits."""
    prefix = f"{anatomy.base}."
    named = model.named_parameters(remove_duplicate=False)
    return list(dict.fromkeys(p for name, p in named if p.requires_grad and not name.startswith(prefix)))
