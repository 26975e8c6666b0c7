"""Preference objectives as in their papers (and as TRL computes them), with autograd through the whole formula: the
reference for `training/preference.py`, which works in the loss of a micro batch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.verification.proof_case import ProofCase


def log_probs(case: ProofCase, logits_of: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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


def loss(case: ProofCase, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss over pairs, and the means of the metrics: rewards of the chosen and the rejected answers, the
    margin, the accuracy, and their log-probabilities, in the order of `objectives.METRICS`."""
    if case.objective == "kto":
        return _of_rated(case, sums)
    before = torch.from_numpy(case.compared_with()).to(sums)
    beta, means = case.beta, sums / counts
    if case.objective == "dpo":
        each = -F.logsigmoid(beta * ((sums[:, 0] - before[:, 0]) - (sums[:, 1] - before[:, 1])))
        rewards, shown = beta * (sums - before), sums
    elif case.objective == "ipo":
        gains = means - before / counts
        each, rewards, shown = (gains[:, 0] - gains[:, 1] - 1 / (2 * beta)) ** 2, beta * (sums - before), sums
    elif case.objective == "simpo":
        each = -F.logsigmoid(beta * (means[:, 0] - means[:, 1] - case.gamma / beta))
        rewards, shown = beta * means, means
    else:
        ratio = torch.log1p(-means[:, 0].exp()) - torch.log1p(-means[:, 1].exp())
        each = -means[:, 0] - beta * F.logsigmoid(means[:, 0] - means[:, 1] - ratio)
        rewards, shown = beta * means, means
    margin = rewards[:, 0] - rewards[:, 1]
    told = [rewards[:, 0], rewards[:, 1], margin, (margin > 0).to(margin), shown[:, 0], shown[:, 1]]
    return each.mean(), torch.stack([number.detach().mean() for number in told])


def _of_rated(case: ProofCase, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of KTO, and its metrics in the order of `objectives.RATED_METRICS`."""
    gains = sums - torch.from_numpy(case.compared_with()).to(sums)
    baseline = gains[:, 1].detach().mean().clamp(min=0)
    ratings = [piece.desirable for row in case.pairs() for piece in row if piece.answer == 0]
    good = [number for number, rating in enumerate(ratings) if rating]
    bad = [number for number, rating in enumerate(ratings) if not rating]
    liked = case.desirable_weight * (1 - torch.sigmoid(case.beta * (gains[good, 0] - baseline)))
    disliked = case.undesirable_weight * (1 - torch.sigmoid(case.beta * (baseline - gains[bad, 0])))
    means = [rows.detach()[numbers, 0].mean() for rows in (case.beta * gains, sums) for numbers in (good, bad)]
    return torch.cat([liked, disliked]).mean(), torch.stack([*means, means[0] - means[1], baseline])
