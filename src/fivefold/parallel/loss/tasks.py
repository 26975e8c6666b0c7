"""Head tasks: a loss, or log-probabilities, from the hidden states behind the last layer of a micro batch.

`passes.run_stage` calls the task of a micro batch on the last stage. Labels and answers are those of whole rows; each
task cuts them to this rank's tokens.

Legend: B rows, T tokens of a row, N tokens of this rank, D hidden size, A answers of a micro batch, K likeliest tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.collectives import chunk_sizes
from fivefold.parallel.context.runtime import ContextParallel
from fivefold.parallel.loss.own import LossRow, TokenLoss
from fivefold.parallel.loss.runtime import (
    Chunk,
    Kernels,
    Logits,
    SoftTargets,
    SummedLoss,
    losses_of,
    softmax_chunks,
    top_log_probs,
)
from fivefold.parallel.tensor.runtime import TensorParallel


@dataclass(frozen=True)
class Head:
    """The head of a model on this rank, and the last hidden states [B, N / B, D] of a micro batch.

    `parameters`: trained ones behind the base. `vocabulary`: logits of a token on this rank. `chunks`: of the loss;
    None: chosen by size.
    """

    logits_of: Logits
    hidden: Tensor
    parameters: list[Tensor]
    vocabulary: int
    chunks: int | None
    tensor: TensorParallel
    context: ContextParallel
    kernels: Kernels

    @property
    def in_one_row(self) -> Tensor:
        """Hidden states [1, N, D]."""
        return self.hidden.reshape(1, -1, self.hidden.shape[-1])

    def sizes(self, vocabulary: int) -> tuple[int, ...]:
        """Tokens of each chunk, for logits of `vocabulary` numbers a token."""
        rows, length, features = self.hidden.shape
        return chunk_sizes(rows * length, vocabulary, features, self.chunks)

    def softmax_chunks(
        self, labels: Tensor, weights: Tensor | None = None, teacher: SoftTargets | None = None
    ) -> list[Chunk]:
        """Chunks of the cross entropy of this rank's tokens [B, N / B]."""
        weights_N = None if weights is None else weights.reshape(-1)
        sizes = self.sizes(self.vocabulary)
        return softmax_chunks(labels.reshape(-1), weights_N, teacher, sizes, self.tensor, self.kernels)

    def own_chunks(self, loss: TokenLoss, labels: Tensor, row: LossRow) -> list[Chunk]:
        """Chunks of a loss by a function of the user's own, which takes the logits of the whole vocabulary."""
        sizes = self.sizes(self.tensor.vocabulary[-1][1])
        parts = zip(torch.split(labels.reshape(-1), list(sizes)), row.split(sizes), strict=True)
        return [Chunk(part[0], None, partial(loss.of_chunk, *part, fold=self.tensor)) for part in parts]


# A result from the head of the last stage. `labels` of tasks are shifted already, int64 [B, T], -100 without a target;
# `scale`, an fp32 scalar, multiplies a summed loss (None: 1).
Task = Callable[[Head], Tensor]


class SummedTask:
    """A summed loss of this rank's tokens, fp64 scalar: each says of which chunks."""

    scale: Tensor | None

    def chunks(self, head: Head) -> list[Chunk]:
        raise NotImplementedError

    def __call__(self, head: Head) -> Tensor:
        return SummedLoss.apply(  # type: ignore[no-any-return, no-untyped-call]
            head.logits_of, self.chunks(head), self.scale, torch.is_grad_enabled(), head.in_one_row, *head.parameters
        )


@dataclass
class CrossEntropy(SummedTask):
    """Summed cross entropy. `weights`: of each target, fp64 [B, T] (None: 1). `teacher`: followed at every position
    that is trained."""

    labels: Tensor
    scale: Tensor | None = None
    weights: Tensor | None = None
    teacher: SoftTargets | None = None

    def chunks(self, head: Head) -> list[Chunk]:
        cut = head.context.cut
        weights = None if self.weights is None else cut(self.weights)
        teacher = self.teacher.cut(cut) if self.teacher and torch.is_grad_enabled() else None
        return head.softmax_chunks(cut(self.labels), weights, teacher)


@dataclass
class OwnLoss(SummedTask):
    """Summed losses by a function of the user's own. `row`: beside the labels, [B, T] each."""

    loss: TokenLoss
    labels: Tensor
    row: LossRow
    scale: Tensor | None = None

    def chunks(self, head: Head) -> list[Chunk]:
        cut = head.context.cut
        return head.own_chunks(self.loss, cut(self.labels), self.row.cut(cut))


@dataclass
class AnswerLogProbs:
    """Summed log-probabilities of the targets of each of `count` answers, fp64 [A], without gradient. `answers`: the
    answer of each target, int64 [B, T], -1 for none."""

    labels: Tensor
    answers: Tensor
    count: int

    def __call__(self, head: Head) -> Tensor:
        chunks = head.softmax_chunks(head.context.cut(self.labels))
        losses_N = torch.cat(losses_of(head.logits_of, head.in_one_row, chunks))
        return _of_answers(-losses_N, head.context.cut(self.answers), self.count, head.context.row_groups)


@dataclass
class PreferenceLoss(SummedTask):
    """Summed cross entropy, each target weighted by what its answer is worth. `weigh`: summed log-probabilities of the
    answers, fp64 [A] -> their weights, fp64 [A]."""

    log_probs: AnswerLogProbs
    weigh: Callable[[Tensor], Tensor]
    scale: Tensor | None = None

    def chunks(self, head: Head) -> list[Chunk]:
        weights_A = self.weigh(self.log_probs(head))
        weights = _of_targets(weights_A, head.context.cut(self.log_probs.answers))
        return head.softmax_chunks(head.context.cut(self.log_probs.labels), weights)


@dataclass
class TopLogProbs:
    """The `top_k` likeliest next tokens of the first `vocabulary`, and their log-probabilities: fp64 [B, T, K, 2]
    (token, log-probability), without gradient."""

    top_k: int
    vocabulary: int

    def __call__(self, head: Head) -> Tensor:
        with torch.no_grad():
            tops = [
                top_log_probs(head.logits_of(h), head.tensor, self.top_k, self.vocabulary)
                for h in torch.split(head.in_one_row, list(head.sizes(head.vocabulary)), 1)
            ]
        found_NK2 = torch.cat([torch.stack([tokens.double(), values.double()], -1) for tokens, values in tops])
        rows, length = len(head.hidden), head.hidden.shape[1] * head.context.size
        return _of_whole_rows(found_NK2, head.context, rows, length)


def _of_answers(found_N: Tensor, answers_BT: Tensor, count: int, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Sum over the targets of each answer, fp64 [count]; `groups` hold the rest of its tokens. The order is fixed,
    unlike that of `index_add` on a GPU: copies of a parameter must get the same gradient on every rank."""
    is_of = answers_BT.reshape(1, -1) == torch.arange(count, device=found_N.device).unsqueeze(-1)
    sums = torch.where(is_of, found_N.double(), 0.0).sum(-1)
    for group in groups:
        dist.all_reduce(sums, group=group)
    return sums


def _of_targets(weights_A: Tensor, answers_BT: Tensor) -> Tensor:
    """Weight of the answer of each target [B, T], 0 without one."""
    return torch.where(answers_BT >= 0, weights_A[answers_BT.clamp(min=0)], 0.0)


def _of_whole_rows(found_N: Tensor, context: ContextParallel, rows: int, length: int) -> Tensor:
    """Assemble [B, T, ...] from the results of each cp rank for its own tokens, [N, ...]."""
    places_BT = torch.arange(length, device=found_N.device).expand(rows, length)
    whole = found_N.new_zeros(rows, length, *found_N.shape[1:])
    whole[:, context.cut(places_BT)[0]] = found_N.view(rows, -1, *found_N.shape[1:])
    for group in context.row_groups:
        dist.all_reduce(whole, group=group)
    return whole
