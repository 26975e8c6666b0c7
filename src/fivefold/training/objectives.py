"""Objectives of preference training, as functions of log-probabilities alone: no model, no tokens, no ranks.

An answer's log-probability is the sum over its tokens. The log-probabilities of a pair of answers give its loss, and
the derivative with respect to each of the two. The negative derivative is the weight of every token of the answer: the
gradient of this weighted cross entropy equals that of the objective (`training/preference.py`).

Legend: P pairs; in the dimension of two, 0 is the chosen answer and 1 the rejected one. For rated answers (KTO), 0 is
the answer, and 1 the same prompt with the answer to another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.config import ObjectiveSection
from fivefold.core.objectives import OBJECTIVES


@dataclass(frozen=True)
class Ratings:
    """Ratings of P answers: whether each is desirable, bool [P]; and the baseline, a scalar. The baseline is how much
    likelier answers to other prompts became: the mean over the global batch, at least 0."""

    desirable_P: Tensor
    baseline: Tensor


@dataclass(frozen=True)
class PairLosses:
    """Losses of P pairs [P], their derivatives by each answer's summed log-probability [P, 2], and metrics [P] under
    TRL's names. Metrics use sums over tokens if the objective needs a reference or uses no means, else means; NaN where
    a metric does not apply to a pair. All fp64."""

    loss_P: Tensor
    slope_P2: Tensor
    metrics: Mapping[str, Tensor]


def pair_losses(
    objective: ObjectiveSection, policy_P2: Tensor, tokens_P2: Tensor, reference_P2: Tensor | None = None,
    ratings: Ratings | None = None,
) -> PairLosses:  # fmt: skip
    """Pairs pairs. `policy_P2`, `reference_P2`: summed log-probabilities of answers; `tokens_P2`: their trained tokens.

    Raises `ValueError` if a reference or ratings are needed and missing.
    """
    if objective.compares and reference_P2 is None:
        raise ValueError(f"{objective.name} needs the log-probabilities of a reference model")
    if objective.is_rated and ratings is None:
        raise ValueError(f"{objective.name} needs ratings of the answers")
    uses_means = OBJECTIVES[objective.name].uses_means
    with torch.enable_grad():
        sums = policy_P2.detach().double().requires_grad_()
        counts = tokens_P2.to(sums).clamp(min=1)
        answers = sums / counts if uses_means else sums
        before = torch.zeros_like(sums)
        if objective.compares and reference_P2 is not None:
            before = reference_P2.to(sums) / counts if uses_means else reference_P2.to(sums)
        loss = LOSSES[objective.name](objective, answers, answers - before, ratings)
        (slope,) = torch.autograd.grad(loss.sum(), sums)
    shown = sums.detach() if objective.compares else answers.detach()
    rewards = objective.beta * (shown - reference_P2.to(shown) if reference_P2 is not None else shown)
    if ratings is not None:
        return PairLosses(loss.detach(), slope, _of_ratings(rewards[:, 0], shown[:, 0], ratings))
    return PairLosses(
        loss.detach(),
        slope,
        {
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "rewards/margins": rewards[:, 0] - rewards[:, 1],
            "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).double(),
            "logps/chosen": shown[:, 0],
            "logps/rejected": shown[:, 1],
        },
    )


METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
)  # fmt: skip
# For rated answers; TRL calls the desirable ones chosen. Their margin follows from two means over all pairs.
RATED_METRICS = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "rewards/margins", "kl")


def metrics_of(objective: ObjectiveSection) -> tuple[str, ...]:
    return RATED_METRICS if objective.is_rated else METRICS


def _of_ratings(rewards_P: Tensor, shown_P: Tensor, ratings: Ratings) -> dict[str, Tensor]:
    nothing = torch.full_like(rewards_P, torch.nan)
    found = {
        f"{what}/{of}": torch.where(ratings.desirable_P == (of == "chosen"), values, nothing)
        for what, values in (("rewards", rewards_P), ("logps", shown_P))
        for of in ("chosen", "rejected")
    }
    return found | {"kl": ratings.baseline.expand_as(rewards_P)}


# Arguments of each loss: the objective, log-probabilities [P, 2], these minus the reference's, ratings. Result: [P].


def _kto(objective: ObjectiveSection, answers: Tensor, gains: Tensor, ratings: Ratings | None) -> Tensor:
    """KTO: https://arxiv.org/abs/2402.01306, equation 7. No gradient flows through the baseline."""
    assert ratings is not None
    above = objective.beta * (gains[:, 0] - ratings.baseline)
    good = objective.desirable_weight * (1 - torch.sigmoid(above))
    return torch.where(ratings.desirable_P, good, objective.undesirable_weight * (1 - torch.sigmoid(-above)))


def _dpo(objective: ObjectiveSection, answers: Tensor, gains: Tensor, _: Ratings | None) -> Tensor:
    """DPO: https://arxiv.org/abs/2305.18290, equation 7."""
    return -F.logsigmoid(objective.beta * (gains[:, 0] - gains[:, 1]))


def _ipo(objective: ObjectiveSection, answers: Tensor, gains: Tensor, _: Ratings | None) -> Tensor:
    """IPO: https://arxiv.org/abs/2310.12036, equation 17, on means over tokens as in TRL."""
    return (gains[:, 0] - gains[:, 1] - 1 / (2 * objective.beta)).square()


def _simpo(objective: ObjectiveSection, answers: Tensor, gains: Tensor, _: Ratings | None) -> Tensor:
    """SimPO: https://arxiv.org/abs/2405.14734, equation 6."""
    return -F.logsigmoid(objective.beta * (answers[:, 0] - answers[:, 1]) - objective.gamma)


def _orpo(objective: ObjectiveSection, answers: Tensor, gains: Tensor, _: Ratings | None) -> Tensor:
    """ORPO: https://arxiv.org/abs/2403.07691, equations 6 and 7: cross entropy of the chosen answer, and the odds."""
    odds = answers - torch.log(-torch.expm1(answers.clamp(max=-1e-12)))  # clamped: the odds of 1 are infinite
    return -answers[:, 0] - objective.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


LOSSES: dict[str, Callable[[ObjectiveSection, Tensor, Tensor, Ratings | None], Tensor]] = {
    "dpo": _dpo, "ipo": _ipo, "orpo": _orpo, "simpo": _simpo, "kto": _kto,
}  # fmt: skip
