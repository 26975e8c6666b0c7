"""The first pass of an objective over a model, which gives the weights of the second.

    pass 1, without gradient: tokens -> log-probability of each answer -> loss, and its derivative by each answer
    pass 2, any training pass: cross entropy of each target, times a weight that is minus the derivative by its answer

Pass 1 runs under the same layout and in the same kernels. It is no part of a step's history: fp8 scales, routers and
capacities see pass 2 alone. What it adds to a step is a forward.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.parallel import passes
from fivefold.parallel.state import state_of
from fivefold.training.inputs import evaluating, to_device
from fivefold.training.objectives import Judged, Objective, Ratings, judge

Table = NDArray[np.float64]  # [pairs of a side, 2]: log-probabilities of the answers under a reference model


@dataclass(frozen=True, eq=False)
class Goal:
    """What a step trains for. `reference`: of every pair that a batch may name; None where the objective has none."""

    objective: Objective
    reference: Table | None = None


@dataclass(frozen=True)
class Weighed:
    """The micro batches with their weights, and what the sum over them is divided by: the same on all ranks.

    `loss`: this rank's share of the objective's sum over pairs, fp64; None where the second pass computes it.
    `metrics`: means over all pairs."""

    batch: Sequence[MicroBatch]
    total: float
    loss: Tensor | None
    metrics: Mapping[str, float]


def weigh(model: Any, batch: Sequence[MicroBatch], goal: Goal) -> Weighed:
    """The weights of a global batch's targets. Every rank calls this, with as many micro batches."""
    if not goal.objective.has_pairs:
        device = next(model.parameters()).device
        own = sum(float(weights_of(each).sum()) for each in batch) if state_of(model).plan.is_first_of_row else 0.0
        total = torch.tensor(own, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return Weighed(batch, total.item(), None, {})
    answers = [_answers(each, sums, goal) for each, sums in zip(batch, log_probs(model, batch), strict=True)]
    judged, loss, pairs, metrics = _judged(model, answers, goal.objective)
    weighted = [_weighted(each, found) for each, found in zip(batch, judged, strict=True)]
    return Weighed(weighted, pairs, loss, metrics)


def mean_over_pairs(model: Any, batches: Iterable[MicroBatch], goal: Goal) -> tuple[float, Mapping[str, float]]:
    """The mean of a preference objective over the pairs of all ranks, and its metrics; NaN without pairs."""
    answers = [_answers(batch, log_probs(model, [batch])[0], goal) for batch in batches]
    _, loss, pairs, metrics = _judged(model, answers, goal.objective)
    dist.all_reduce(loss)
    return (loss.item() / pairs if pairs else float("nan")), metrics


def log_probs(model: Any, batch: Sequence[MicroBatch]) -> list[Tensor]:
    """Of each micro batch the summed log-probabilities of its answers, fp64 [P, 2]: on all ranks that share it."""
    device = next(model.parameters()).device
    with evaluating(model):
        sums = [passes.answer_log_probs(model, to_device(each, device, by_answer=True)) for each in batch]
    return [found[: 2 * pairs_of(each)].view(-1, 2) for each, found in zip(batch, sums, strict=True)]


def table(model: Any, batches: Iterable[MicroBatch], pairs: int) -> Table:
    """The log-probabilities of all answers of `batches`, which name `pairs` pairs, under the model as it is now: the
    same on every rank. 0 for pairs that no batch names."""
    found = torch.zeros(pairs, 2, dtype=torch.float64, device=next(model.parameters()).device)
    for each in batches:
        (sums,) = log_probs(model, [each])
        if each.pairs is not None and state_of(model).plan.is_first_of_row:
            found[torch.from_numpy(each.pairs)] = sums
    dist.all_reduce(found)
    return found.cpu().numpy()


def pairs_of(batch: MicroBatch) -> int:
    """Pairs in a micro batch."""
    return 0 if batch.pairs is None else len(batch.pairs)


def answer_tokens(batch: MicroBatch) -> NDArray[np.int64]:
    """Trained targets of each answer, [P, 2]."""
    own = np.zeros(0, np.int64) if batch.answers is None else batch.answers[batch.answers >= 0]
    return np.bincount(own, minlength=2 * pairs_of(batch)).reshape(-1, 2)


def weights_of(batch: MicroBatch) -> NDArray[np.float64]:
    """The weight of every target of a micro batch, 0 where there is none, [B, T]."""
    has_target = batch.labels != IGNORE
    return has_target.astype(np.float64) if batch.weights is None else np.where(has_target, batch.weights, 0.0)


@dataclass(frozen=True)
class _Answers:
    """Of a micro batch: what an objective is a function of, but for the baseline."""

    sums_P2: Tensor
    tokens_P2: Tensor
    before_P2: Tensor | None
    desirable_P: Tensor


def _answers(batch: MicroBatch, sums_P2: Tensor, goal: Goal) -> _Answers:
    device, before = sums_P2.device, None
    if goal.reference is not None:
        own = np.zeros(0, np.int64) if batch.pairs is None else batch.pairs
        before = torch.from_numpy(np.asarray(goal.reference[own])).to(device)
    desirable = np.zeros(pairs_of(batch), np.bool_) if batch.desirable is None else batch.desirable
    tokens = torch.from_numpy(answer_tokens(batch)).to(device)
    return _Answers(sums_P2, tokens, before, torch.from_numpy(desirable).to(device))


def _judged(
    model: Any, answers: Sequence[_Answers], objective: Objective
) -> tuple[list[Judged], Tensor, int, Mapping[str, float]]:
    """Of each micro batch; this rank's share of the losses' sum; how many pairs all ranks have, and the means of their
    metrics."""
    baseline = _baseline(model, answers) if objective.has_baseline else None
    judged = [
        judge(
            objective, each.sums_P2, each.tokens_P2, each.before_P2,
            None if baseline is None else Ratings(each.desirable_P, baseline),
        )
        for each in answers
    ]  # fmt: skip
    loss, pairs, metrics = _over_ranks(model, judged, objective)
    if baseline is not None:
        metrics |= {
            "rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"], "kl": baseline.item(),
        }  # fmt: skip
    return judged, loss, pairs, {name: metrics[name] for name in objective.metrics if not isnan(metrics[name])}


def _baseline(model: Any, answers: Sequence[_Answers]) -> Tensor:
    """By how much the answers to other prompts became likelier, their mean over all ranks, and at least 0: fp64."""
    found = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for each in answers if state_of(model).plan.is_first_of_row else ():
        assert each.before_P2 is not None, "it is compared with a reference"
        gains = each.sums_P2[:, 1] - each.before_P2[:, 1]
        found += torch.stack([gains.sum(), torch.ones_like(gains).sum()])
    dist.all_reduce(found)
    return (found[0] / found[1].clamp(min=1)).clamp(min=0)


def _weighted(batch: MicroBatch, judged: Judged) -> MicroBatch:
    """The micro batch whose weighted cross entropy has the gradient of the objective."""
    if batch.answers is None:
        return replace(batch, weights=np.zeros(batch.labels.shape))
    by_answer = -judged.slope_P2.reshape(-1).cpu().numpy()
    weights = np.where(batch.answers >= 0, by_answer[np.maximum(batch.answers, 0)], 0.0)
    return replace(batch, weights=weights)


def _over_ranks(model: Any, judged: Sequence[Judged], objective: Objective) -> tuple[Tensor, int, dict[str, float]]:
    """This rank's share of the losses' sum; how many pairs all ranks have, and the mean of each metric over those that
    it is about, NaN where it is about none."""
    device, is_first = next(model.parameters()).device, state_of(model).plan.is_first_of_row
    names = [name for name in objective.metrics if not judged or name in judged[0].metrics]
    sums = torch.zeros(1 + 2 * len(objective.metrics), dtype=torch.float64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for each in judged if is_first else ():
        loss += each.loss_P.sum()
        sums[0] += len(each.loss_P)
        for at, name in enumerate(names):
            sums[1 + 2 * at] += each.metrics[name].nansum()
            sums[2 + 2 * at] += (~each.metrics[name].isnan()).sum()
    dist.all_reduce(sums)
    pairs, *rest = sums.tolist()
    means = {name: rest[2 * at] / rest[2 * at + 1] if rest[2 * at + 1] else nan for at, name in enumerate(names)}
    return loss, int(pairs), dict.fromkeys(objective.metrics, nan) | means
