"""Head tasks: a loss, or log-probabilities, from the hidden states behind the last layer of a micro batch.

`passes.run_stage` calls the task of a micro batch on the last stage. Labels and answers are those of whole rows; each
task cuts them to this rank's tokens.

Legend: B rows, T tokens of a row, N tokens of this rank, D hidden size, A answers of a micro batch, K likeliest tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.collectives import chunk_sizes
from fivefold.parallel.context.runtime import ContextParallel
from fivefold.parallel.loss import runtime as losses
from fivefold.parallel.loss.own import LossRow, TokenLoss
from fivefold.parallel.tensor.runtime import TensorParallel


@dataclass(frozen=True)
class Head:
    """The head of a model on this rank, and the last hidden states [B, N / B, D] of a micro batch.

    `parameters`: trained ones behind the base. `vocabulary`: logits of a token on this rank. `chunks`: of the loss;
    None: chosen by size.
    """

    logits_of: losses.Logits
    hidden: Tensor
    parameters: list[Tensor]
    vocabulary: int
    chunks: int | None
    tensor: TensorParallel
    context: ContextParallel
    kernels: losses.Kernels

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each chunk."""
        return self._sizes(self.vocabulary)

    def _sizes(self, vocabulary: int) -> tuple[int, ...]:
        """Tokens of each chunk, for logits of `vocabulary` numbers a token."""
        rows, length, features = self.hidden.shape
        return chunk_sizes(rows * length, vocabulary, features, self.chunks)

    def loss(
        self, labels_BT: Tensor, scale: Tensor | None, weights_BT: Tensor | None, soft: losses.SoftTargets | None = None
    ) -> Tensor:
        """Summed cross entropy of this rank's tokens [B, N / B], fp64 scalar; see `losses.chunked_loss`."""
        return losses.chunked_loss(
            self.logits_of, self.hidden, labels_BT, self.parameters, self.sizes, self.tensor, scale, weights_BT, soft,
            self.kernels,
        )  # fmt: skip

    def own_loss(self, loss: TokenLoss, labels_BT: Tensor, row: LossRow, scale: Tensor | None) -> Tensor:
        """Summed losses by a function of the user's own of this rank's tokens [B, N / B], fp64 scalar."""
        sizes, hidden = self._sizes(self.tensor.vocabulary[-1][1]), self.hidden.reshape(1, -1, self.hidden.shape[-1])
        parts = zip(torch.split(labels_BT.reshape(-1), list(sizes)), row.split(sizes), strict=True)
        if torch.is_grad_enabled():
            chunks = [partial(loss.of_chunk, *part, scale=scale, fold=self.tensor) for part in parts]
            return losses.summed_chunks(self.logits_of, hidden, self.parameters, sizes, chunks)
        pairs = zip(torch.split(hidden, list(sizes), 1), parts, strict=True)
        sums = [loss.without_gradient(*part, self.logits_of(h), self.tensor) for h, part in pairs]
        total = torch.stack(sums).sum()
        return total if scale is None else total * scale

    def target_log_probs(self, labels_BT: Tensor) -> Tensor:
        """Log-probability of the target of every token of this rank [N], without gradient; 0 without a target."""
        return losses.target_log_probs(self.logits_of, self.hidden, labels_BT, self.sizes, self.tensor, self.kernels)


class Task(Protocol):
    """Computes its result from the head of the last stage. `labels` are shifted already, int64 [B, T], -100 without a
    target; `scale`, an fp32 scalar, multiplies a summed loss (None: 1)."""

    def __call__(self, head: Head) -> Tensor: ...


@dataclass
class CrossEntropy:
    """Summed cross entropy. `weights`: of each target, fp64 [B, T] (None: 1). `teacher`: followed at every position."""

    labels: Tensor
    scale: Tensor | None = None
    weights: Tensor | None = None
    teacher: losses.SoftTargets | None = None

    def __call__(self, head: Head) -> Tensor:
        cut = head.context.cut
        weights = None if self.weights is None else cut(self.weights)
        return head.loss(cut(self.labels), self.scale, weights, self.teacher and self.teacher.cut(cut))


@dataclass
class OwnLoss:
    """Summed losses by a function of the user's own. `row`: beside the labels, [B, T] each."""

    loss: TokenLoss
    labels: Tensor
    row: LossRow
    scale: Tensor | None = None

    def __call__(self, head: Head) -> Tensor:
        cut = head.context.cut
        return head.own_loss(self.loss, cut(self.labels), self.row.cut(cut), self.scale)


@dataclass
class AnswerLogProbs:
    """Summed log-probabilities of the targets of each of `count` answers, fp64 [A], without gradient. `answers`: the
    answer of each target, int64 [B, T], -1 for none."""

    labels: Tensor
    answers: Tensor
    count: int

    def __call__(self, head: Head) -> Tensor:
        found_N = head.target_log_probs(head.context.cut(self.labels))
        return _of_answers(found_N, head.context.cut(self.answers), self.count, head.context.row_groups)


@dataclass
class PreferenceLoss:
    """Summed cross entropy, each target weighted by what its answer is worth. `weigh`: summed log-probabilities of the
    answers, fp64 [A] -> their weights, fp64 [A]."""

    log_probs: AnswerLogProbs
    weigh: Callable[[Tensor], Tensor]
    scale: Tensor | None = None

    def __call__(self, head: Head) -> Tensor:
        weights_A = self.weigh(self.log_probs(head))
        answers_BT = head.context.cut(self.log_probs.answers)
        return head.loss(head.context.cut(self.log_probs.labels), self.scale, _of_targets(weights_A, answers_BT))


@dataclass
class TopLogProbs:
    """The `top_k` likeliest next tokens of the first `vocabulary`, and their log-probabilities: fp64 [B, T, K, 2]
    (token, log-probability), without gradient."""

    top_k: int
    vocabulary: int

    def __call__(self, head: Head) -> Tensor:
        tokens, values = losses.top_log_probs(
            head.logits_of, head.hidden, head.sizes, head.tensor, top_k=self.top_k, vocabulary=self.vocabulary
        )
        rows, length = len(head.hidden), head.hidden.shape[1] * head.context.size
        return _of_whole_rows(torch.stack([tokens.double(), values.double()], -1), head.context, rows, length)


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
