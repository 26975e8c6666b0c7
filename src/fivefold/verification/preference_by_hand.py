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
