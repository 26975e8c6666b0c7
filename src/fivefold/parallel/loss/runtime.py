"""The training loss in chunks, over a split vocabulary: full logits never exist, forward or backward.

Each chunk of hidden states goes through the model's *own* forward with its base swapped for a pass-through, so
that soft-capping, logit scales and biases of the head survive. The gradients of a chunk are computed on the spot
and only [tokens, D] and the head's own gradients are kept (the idea of Liger Kernel, arXiv:2410.10989, with the
head under tensor parallelism).

A task (`tasks.py`) asks for the sum over all chunks (`SummedLoss`), which asks for the losses of each (`ChunkLosses`).
Those of a softmax work on the logits with three functions, between which tp exchanges vectors. They run operator by
operator, or compiled (`Kernels`).

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
from fivefold.parallel.graphs.runtime import Compiled
from fivefold.parallel.state import LivePart, ParallelState
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


# ---- a loss, chunk by chunk ------------------------------------------------------------------------------------------


class ChunkLosses(Protocol):
    """Losses of a chunk from its logits [1, N, V]: [N], or those of its targets alone, fp32 or fp64. With `factor_N`
    also the gradient by the logits of their sum, each times its factor; `overwrite`: it may take the logits' memory."""

    def __call__(
        self, logits: Tensor, factor_N: Tensor | None, *, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Chunk:
    """Tokens whose logits exist together. `labels`: int64 [N]. `weights`: of their losses, fp64 [N] (None: 1)."""

    labels: Tensor
    weights: Tensor | None
    losses: ChunkLosses


class SummedLoss(torch.autograd.Function):
    """Sum of the losses of chunks of `hidden` [1, T, D], each times its weight, times `scale` (None: 1), fp64.

    The forward computes the gradients of `hidden` and the `parameters` of the head too, if `has_gradient`; the backward
    returns them. Without, nothing is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_of: Logits,
        chunks: Sequence[Chunk],
        scale: Tensor | None,
        has_gradient: bool,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        if not has_gradient:
            for losses_N, chunk in zip(losses_of(logits_of, hidden, chunks), chunks, strict=True):
                total += _total(losses_N, chunk.weights, scale)
            return total
        hidden_grad = torch.empty_like(hidden)
        sums: list[Tensor | None] = []  # None for a parameter that the logits do not depend on
        sizes = [len(chunk.labels) for chunk in chunks]
        parts = (torch.split(t, sizes, 1) for t in (hidden, hidden_grad))
        for h, grad, chunk in zip(*parts, chunks, strict=True):
            leaf = h.detach().requires_grad_()
            with torch.enable_grad():
                logits = logits_of(leaf)
            free = not saves_memory_of(logits)  # then their gradient takes their memory
            losses_N, logits_grad = chunk.losses(logits.detach(), _factor(chunk, scale), overwrite=free)
            chunk_grad, *grads = torch.autograd.grad(logits, [leaf, *parameters], logits_grad, allow_unused=True)
            total += _total(losses_N, chunk.weights, scale)
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
        return (None, None, None, None, hidden_grad * grads[0], *scaled)


def losses_of(logits_of: Logits, hidden: Tensor, chunks: Sequence[Chunk]) -> list[Tensor]:
    """Losses of each chunk of hidden states [1, T, D], fp32 or fp64, without gradient."""
    parts = torch.split(hidden, [len(chunk.labels) for chunk in chunks], 1)
    with torch.no_grad():
        return [chunk.losses(logits_of(h), None)[0] for h, chunk in zip(parts, chunks, strict=True)]


def _factor(chunk: Chunk, scale: Tensor | None) -> Tensor:
    """Factor of the gradient of each target's loss, [N]; 0 without a target."""
    has_target = chunk.labels != IGNORE
    factor = has_target if chunk.weights is None else torch.where(has_target, chunk.weights, 0.0)
    return factor if scale is None else factor * scale


def _total(losses_N: Tensor, weights_N: Tensor | None, scale: Tensor | None) -> Tensor:
    """Weighted sum, times `scale`, fp64."""
    total = losses_N.sum(dtype=torch.float64) if weights_N is None else losses_N.double().mul(weights_N).sum()
    return total if scale is None else total * scale


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


# ---- softmaxes over a split vocabulary -------------------------------------------------------------------------------


def softmax_chunks(
    labels_T: Tensor,
    weights_T: Tensor | None,
    soft: SoftTargets | None,
    sizes: tuple[int, ...],
    fold: TensorParallel,
    kernels: "Kernels",
) -> list[Chunk]:
    """Cut the targets of a cross entropy, and what a teacher says of them, into chunks of `sizes`."""
    parts = zip(
        torch.split(labels_T, list(sizes)),
        [None] * len(sizes) if weights_T is None else torch.split(weights_T.double(), list(sizes)),
        [None] * len(sizes) if soft is None else soft.split(sizes),
        strict=True,
    )
    return [
        Chunk(labels_N, weights_N, partial(softmax_losses, labels_N, soft_N, fold=fold, kernels=kernels))
        for labels_N, weights_N, soft_N in parts
    ]


def softmax_losses(
    labels_N: Tensor,
    soft: SoftTargets | None,
    logits: Tensor,
    factor_N: Tensor | None,
    *,
    fold: TensorParallel,
    kernels: "Kernels",
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of vocabulary-split logits, also with what a teacher says: see `ChunkLosses`.

    Over tp, two all-reduces of [N]-sized vectors: the maximum logit; then the sum of exponentials together with the
    targets' logits. Exactly one rank holds each target's logit.
    """
    precise, softmaxes = _accumulator(logits.dtype), _softmaxes(labels_N, soft)
    overwrite = overwrite and len(softmaxes) == 1
    losses: list[Tensor] = []
    gradient = None
    for softmax in softmaxes:
        heat = softmax.temperature
        own = [
            _held(tokens_NK, shares_NK.to(precise), logits.shape[-1], fold) for tokens_NK, shares_NK in softmax.targets
        ]
        highest_N, target_N = kernels.highest(logits[0], own, heat)
        fold.all_reduce(highest_N, dist.ReduceOp.MAX)
        sum_N, exponentials_NV = kernels.sums(logits[0], highest_N, heat, overwrite)
        both_2N = torch.stack([sum_N, target_N])
        fold.all_reduce(both_2N)
        sum_N, target_N = both_2N.unbind()
        losses.append(softmax.losses(highest_N + sum_N.log() - target_N))
        if factor_N is not None:
            each_N = factor_N.to(precise) * (softmax.weight / heat)
            one = kernels.gradient(exponentials_NV, logits[0], highest_N, sum_N, each_N, own, heat, overwrite)
            gradient = one if gradient is None else gradient.add_(one)
        del exponentials_NV  # or it would coexist with the next softmax's
    return sum(losses[1:], start=losses[0]), logits if gradient is None else gradient[None]


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

    def losses(self, nll_N: Tensor) -> Tensor:
        """Losses from minus the shared log-probabilities of the targets, [N]; 0 without a target."""
        has_target_N = torch.cat([shares_NK for _, shares_NK in self.targets], -1).any(-1)
        losses_N = torch.where(has_target_N, nll_N, 0.0)
        if self.entropies is not None:
            losses_N = losses_N + self.entropies.to(losses_N)
        return losses_N * self.weight


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


def _held(tokens_NK: Tensor, shares_NK: Tensor, columns: int, fold: TensorParallel) -> tuple[Tensor, Tensor]:
    """Locate tokens among the columns of this rank, with their shares: column 0 and share 0 for tokens of others."""
    at_NK = tokens_NK - fold.vocabulary[fold.rank][0]
    mine_NK = (at_NK >= 0) & (at_NK < columns)
    return torch.where(mine_NK, at_NK, 0), torch.where(mine_NK, shares_NK, 0.0)


# ---- functions of logits ---------------------------------------------------------------------------------------------

_Held = list[tuple[Tensor, Tensor]]  # columns and shares, [N, K] each


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
    return x if heat == 1 else x.div_(heat)


class Kernels(LivePart):
    """Functions of logits. Run operator by operator, they update one fp32 (fp64) buffer of [N, V] in place:
    exponentials, softmax, gradient. The logits themselves serve as the buffer if they may be overwritten. Functions
    that `compiled` makes each read the logits once. Exponentials are then not saved: the gradient recomputes them, and
    takes the memory of the logits if it may."""

    def __init__(self, compiled: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None) -> None:
        self._saves = compiled is None
        build = compiled or (lambda _, function: function)
        self._highest, self._sums, self._gradient, self._in_place = (
            build("the loss", function) for function in (_highest, _sums, _gradient_again, _gradient_in_place)
        )

    @classmethod
    def make(cls, state: ParallelState) -> "Kernels":
        compiled = state.live(Compiled)
        return cls(compiled.block if compiled.is_on else None)

    def highest(self, logits_NV: Tensor, own: _Held, heat: float) -> tuple[Tensor, Tensor]:
        """Maximum logit, and the targets' logits weighted by their shares: fp32 (fp64) [N] each."""
        return self._highest(logits_NV, own, heat)  # type: ignore[no-any-return]

    def sums(self, logits_NV: Tensor, highest_N: Tensor, heat: float, overwrite: bool) -> tuple[Tensor, Tensor | None]:
        """Sum of the exponentials, less the maximum, [N]; and the exponentials, if they are saved."""
        if not self._saves:
            return self._sums(logits_NV, highest_N, heat), None
        exponentials_NV = _exponentials(logits_NV, highest_N, heat, copy=not overwrite)
        return exponentials_NV.sum(dim=-1), exponentials_NV

    def gradient(
        self,
        exponentials_NV: Tensor | None,
        logits_NV: Tensor,
        highest_N: Tensor,
        sum_N: Tensor,
        factor_N: Tensor,
        own: _Held,
        heat: float,
        overwrite: bool,
    ) -> Tensor:
        """(softmax - shares) * factor, in the dtype of the logits."""
        if exponentials_NV is not None:
            return _gradient(exponentials_NV, sum_N, factor_N, own).to(logits_NV.dtype)
        if not overwrite:
            return self._gradient(logits_NV, highest_N, sum_N, factor_N, own, heat)  # type: ignore[no-any-return]
        self._in_place(logits_NV, highest_N, sum_N, factor_N, own, heat)
        return logits_NV


def top_log_probs(logits: Tensor, fold: TensorParallel, top_k: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Find the `top_k` likeliest of the first `vocabulary` tokens, int64 [N, K], and their log-probabilities, fp32 or
    fp64, from vocabulary-split logits [1, N, V]."""
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
    """Trained parameters outside the base model, each once: of the head, also if tied, and scales of the logits."""
    prefix = f"{anatomy.base}."
    named = model.named_parameters(remove_duplicate=False)
    return list(dict.fromkeys(p for name, p in named if p.requires_grad and not name.startswith(prefix)))
