"""Objectives of preference training, as functions of log-probabilities alone: no model, no tokens, no ranks.

An answer's log-probability is the sum over its tokens. From those of a pair of answers comes its loss, and the
derivative with respect to each of the two. A second pass takes that derivative, with its sign changed, as the weight of
every token of the answer: the gradient of this weighted cross entropy is that of the objective.

Legend: P pairs; in the dimension of two, 0 is the chosen answer and 1 the rejected one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """`name`: sft (the mean over weighted targets), or a preference objective of `LOSSES`. `beta`: its temperature, or
    the weight of the odds ratio (ORPO). `gamma`: the margin of SimPO."""

    name: str = "sft"
    beta: float = 0.1
    gamma: float = 0.5

    @property
    def has_pairs(self) -> bool:
        """Whether it is about pairs of answers."""
        return self.name in LOSSES

    @property
    def needs_reference(self) -> bool:
        """Whether it compares with the log-probabilities of a reference model."""
        return self.name in ("dpo", "ipo")

    @property
    def uses_means(self) -> bool:
        """Whether its answers count by the mean over their tokens."""
        return self.name != "dpo"


@dataclass(frozen=True)
class Judged:
    """Of P pairs: the loss [P], its derivative by each answer's summed log-probability [P, 2], and metrics [P] by the
    names that TRL gives them: of sums over tokens where there is a reference, else of means. All fp64."""

    loss_P: Tensor
    slope_P2: Tensor
    metrics: Mapping[str, Tensor]


def judge(objective: Objective, policy_P2: Tensor, tokens_P2: Tensor, reference_P2: Tensor | None = None) -> Judged:
    """`policy_P2`, `reference_P2`: summed log-probabilities of the answers; `tokens_P2`: their trained tokens.

    Raises `ValueError` where the objective needs a reference and there is none.
    """
    if objective.needs_reference and reference_P2 is None:
        raise ValueError(f"{objective.name} needs the log-probabilities of a reference model")
    with torch.enable_grad():
        sums = policy_P2.detach().double().requires_grad_()
        counts = tokens_P2.to(sums).clamp(min=1)
        answers = sums / counts if objective.uses_means else sums
        before = torch.zeros_like(sums)
        if objective.needs_reference and reference_P2 is not None:
            before = reference_P2.to(sums) / counts if objective.uses_means else reference_P2.to(sums)
        loss = LOSSES[objective.name](objective, answers, answers - before)
        (slope,) = torch.autograd.grad(loss.sum(), sums)
    shown = sums.detach() if objective.needs_reference else answers.detach()
    rewards = objective.beta * (shown - reference_P2.to(shown) if reference_P2 is not None else shown)
    return Judged(
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

# Each of (the objective, log-probabilities [P, 2], the same less those of the reference) -> loss [P].


def _dpo(objective: Objective, answers: Tensor, gains: Tensor) -> Tensor:
    """https://arxiv.org/abs/2305.18290, equation 7."""
    return -F.logsigmoid(objective.beta * (gains[:, 0] - gains[:, 1]))


def _ipo(objective: Objective, answers: Tensor, gains: Tensor) -> Tensor:
    """https://arxiv.org/abs/2310.12036, equation 17, of means over tokens as TRL has it."""
    return (gains[:, 0] - gains[:, 1] - 1 / (2 * objective.beta)).square()


def _simpo(objective: Objective, answers: Tensor, gains: Tensor) -> Tensor:
    """https://arxiv.org/abs/2405.14734, equation 6."""
    return -F.logsigmoid(objective.beta * (answers[:, 0] - answers[:, 1]) - objective.gamma)


def _orpo(objective: Objective, answers: Tensor, gains: Tensor) -> Tensor:
    """https://arxiv.org/abs/2403.07691, equations 6 and 7: the cross entropy of the chosen answer, and the odds."""
    odds = answers - torch.log(-torch.expm1(answers.clamp(max=-1e-12)))  # a probability of 1 has no odds
    return -answers[:, 0] - objective.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])


LOSSES: Mapping[str, Callable[[Objective, Tensor, Tensor], Tensor]] = {
    "dpo": _dpo, "ipo": _ipo, "orpo": _orpo, "simpo": _simpo,
}  # fmt: skip
