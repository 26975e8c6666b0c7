"""Objectives besides cross entropy, written out with autograd through the whole formula: the reference for
`training/preference.py`, which works in the loss of a micro batch, and for `parallel/loss/runtime.py`, which uses only
a teacher's top-k tokens. Preferences are as in their papers, and as TRL computes them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fivefold.data.batch import IGNORE, MicroBatch, TeacherTargets
from fivefold.verification.proof_case import ProofCase


def answer_log_probs(
    case: ProofCase, logits_of: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities of the answers and their numbers of tokens, [P, 2] each. `logits_of`: [B, T] ->
    [B, T, V] for sequences; each answer is one. Both answers of a whole row are computed together, because
    scales of matmuls span a row."""
    sums, counts = [], []
    batches = (
        [[*row] for row in case.pairs() if row] if case.whole_rows else [[it] for row in case.pairs() for it in row]
    )
    for batch in batches:
        ids_BT = torch.stack([torch.from_numpy(piece.tokens.astype("int64")) for piece in batch])
        found_BTV = logits_of(ids_BT)[:, :-1].to(dtype).log_softmax(-1)
        for piece, ids, found in zip(batch, ids_BT, found_BTV, strict=True):
            assert piece.trained is not None
            of_targets = found.gather(-1, ids[1:, None].to(found.device))[:, 0]
            sums.append(of_targets[torch.from_numpy(piece.trained).to(found.device)].sum())
            counts.append(int(piece.trained.sum()))
    return torch.stack(sums).view(-1, 2), torch.tensor(counts, dtype=dtype, device=sums[0].device).view(-1, 2)


def preference_loss(case: ProofCase, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss over pairs, and the means of the metrics: rewards of the chosen and the rejected answers, the
    margin, the accuracy, and their log-probabilities, in the order of `objectives.METRICS`. Raises `ValueError` for an
    objective without a formula."""
    if case.objective in RATED:
        return RATED[case.objective](case, sums)
    if case.objective not in PAIRS:
        raise ValueError(f"{case.objective} has no formula by hand, in PAIRS or RATED of this file")
    each, rewards, shown = PAIRS[case.objective](case, sums, sums / counts, counts)
    margin = rewards[:, 0] - rewards[:, 1]
    told = [rewards[:, 0], rewards[:, 1], margin, (margin > 0).to(margin), shown[:, 0], shown[:, 1]]
    return each.mean(), torch.stack([number.detach().mean() for number in told])


# Arguments of a formula: the case; log-probabilities of answers, their means over tokens, numbers of tokens, [P, 2]
# each. Results: the loss of each pair [P]; the rewards, and the log-probabilities of metrics, [P, 2].
Formula = Callable[[ProofCase, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _before(case: ProofCase, sums: Tensor) -> Tensor:
    return torch.from_numpy(case.compared_with()).to(sums)


def _dpo(case: ProofCase, sums: Tensor, means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gains = sums - _before(case, sums)
    return -F.logsigmoid(case.beta * (gains[:, 0] - gains[:, 1])), case.beta * gains, sums


def _ipo(case: ProofCase, sums: Tensor, means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    before = _before(case, sums)
    gains = means - before / counts
    return (gains[:, 0] - gains[:, 1] - 1 / (2 * case.beta)) ** 2, case.beta * (sums - before), sums


def _simpo(case: ProofCase, sums: Tensor, means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    each = -F.logsigmoid(case.beta * (means[:, 0] - means[:, 1] - case.gamma / case.beta))
    return each, case.beta * means, means


def _orpo(case: ProofCase, sums: Tensor, means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ratio = torch.log1p(-means[:, 0].exp()) - torch.log1p(-means[:, 1].exp())
    each = -means[:, 0] - case.beta * F.logsigmoid(means[:, 0] - means[:, 1] - ratio)
    return each, case.beta * means, means


PAIRS: dict[str, Formula] = {"dpo": _dpo, "ipo": _ipo, "simpo": _simpo, "orpo": _orpo}


def _kto(case: ProofCase, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of KTO, and its metrics in the order of `objectives.RATED_METRICS`."""
    gains = sums - _before(case, sums)
    baseline = gains[:, 1].detach().mean().clamp(min=0)
    ratings = [piece.desirable for row in case.pairs() for piece in row if piece.answer == 0]
    good = [number for number, rating in enumerate(ratings) if rating]
    bad = [number for number, rating in enumerate(ratings) if not rating]
    liked = case.desirable_weight * (1 - torch.sigmoid(case.beta * (gains[good, 0] - baseline)))
    disliked = case.undesirable_weight * (1 - torch.sigmoid(case.beta * (baseline - gains[bad, 0])))
    means = [rows.detach()[numbers, 0].mean() for rows in (case.beta * gains, sums) for numbers in (good, bad)]
    return torch.cat([liked, disliked]).mean(), torch.stack([*means, means[0] - means[1], baseline])


RATED: dict[str, Callable[[ProofCase, Tensor], tuple[Tensor, Tensor]]] = {"kto": _kto}


# ---- distillation: both softmaxes over the whole vocabulary ----------------------------------------------------------


@dataclass(frozen=True)
class TeacherRow:
    """A teacher's output at the positions of a row: tokens and log-probabilities, [T, K] each."""

    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float64]


def teacher_row(case: ProofCase, row: int) -> TeacherRow:
    """The random output of a teacher other than the model of the case, the likeliest tokens first."""
    rng = np.random.default_rng([case.seed, 1_000_039, row])
    shape = (case.row_length, case.vocabulary)
    logits = torch.from_numpy(rng.normal(0, 2, shape))
    top = logits.log_softmax(-1).topk(case.followed)
    return TeacherRow(top.indices.numpy(), top.values.numpy())


def teacher_targets(case: ProofCase, batch: MicroBatch, rows: list[int]) -> TeacherTargets:
    """That teacher's output at the targets of a micro batch with these rows."""
    shape = (*batch.labels.shape, case.followed)
    tokens, log_probs = np.zeros(shape, np.int32), np.zeros(shape)
    for b, row in enumerate(rows):
        has_target, of_row = batch.labels[b] != IGNORE, teacher_row(case, row)
        at = np.flatnonzero(has_target)
        tokens[b, at], log_probs[b, at] = of_row.tokens[at], of_row.log_probs[at]
    return TeacherTargets(tokens, log_probs, case.temperature, case.alpha)


def distillation_loss(case: ProofCase, logits: Tensor, targets: Tensor, row: int, start: int) -> Tensor:
    """The loss summed over the targets [n] of a document that begins at `start` of its row. `logits`: [n, V]."""
    at, of_row = slice(start, start + len(targets)), teacher_row(case, row)
    tokens, log_probs = (torch.from_numpy(array[at]).to(logits.device) for array in (of_row.tokens, of_row.log_probs))
    wanted = torch.zeros_like(logits).scatter(-1, tokens, (log_probs / case.temperature).softmax(-1).to(logits))
    own = (logits / case.temperature).log_softmax(-1)
    apart = F.kl_div(own, wanted, reduction="none").sum(-1)[targets != IGNORE].sum()
    text = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE)
    return case.alpha * case.temperature**2 * apart + (1 - case.alpha) * text


def top_log_probs(case: ProofCase, logits: Tensor) -> Tensor:
    """Log-probabilities of a model's own top-k tokens, [..., V] -> [..., K]."""
    return logits.log_softmax(-1).topk(case.followed).values
