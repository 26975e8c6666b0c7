"""Objectives that are functions of the log-probabilities of whole answers, in the one training path.

    hidden states -> log-probability of each answer of a micro batch, without gradient
                  -> the loss of each pair, and its derivative by each answer
                  -> cross entropy of each target, times a weight that is minus the derivative by its answer

All of it happens in the loss of a micro batch (`Pairs`), since a micro batch has both answers of each of its pairs. So
an objective costs one more forward pass of the head. Only KTO compares with a mean over the global batch; it adds a
forward pass of the model. That pass leaves no trace in the step's state: scales, routers and capacities ignore it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fivefold.config import ObjectiveSection
from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.parallel import passes
from fivefold.parallel.state import state_of
from fivefold.training.inputs import evaluating, to_device
from fivefold.training.objectives import PairLosses, Ratings, metrics_of, pair_losses

Table = NDArray[np.float64]  # [pairs of a side, 2]: log-probabilities of the answers under a reference model
_MARGIN = "rewards/margins"  # for rated answers the difference of two means


@dataclass(frozen=True, eq=False)
class ObjectiveSpec:
    """The objective of a step. `reference`: log-probabilities of every pair of the data; None if it needs none."""

    objective: ObjectiveSection
    reference: Table | None = None


@dataclass(eq=False)
class Pairs:
    """All inputs of an objective for one micro batch, except the log-probabilities of its answers.

    `tokens_P2`: trained targets. `before_P2`: log-probabilities under the reference, if any. `desirable_P`, `baseline`:
    see `Ratings`. `losses`: the last result; None before the first."""

    objective: ObjectiveSection
    tokens_P2: Tensor
    before_P2: Tensor | None
    desirable_P: Tensor
    baseline: Tensor | None = None
    losses: PairLosses | None = None

    @classmethod
    def of(cls, batch: MicroBatch, spec: ObjectiveSpec, device: torch.device) -> "Pairs":
        pairs = np.zeros(0, np.int64) if batch.pairs is None else batch.pairs
        desirable = np.zeros(len(pairs), np.bool_) if batch.desirable is None else batch.desirable
        before = None if spec.reference is None else np.asarray(spec.reference[pairs])
        tokens_P2, before_P2, desirable_P = (
            None if values is None else torch.from_numpy(values).to(device, non_blocking=True)
            for values in (answer_tokens(batch), before, desirable)
        )
        assert tokens_P2 is not None and desirable_P is not None
        return cls(spec.objective, tokens_P2, before_P2, desirable_P)

    def compute(self, sums_P2: Tensor) -> PairLosses:
        """Compute the losses of the pairs from the summed log-probabilities of their answers, and keep them."""
        ratings = None if self.baseline is None else Ratings(self.desirable_P, self.baseline)
        self.losses = pair_losses(self.objective, sums_P2, self.tokens_P2, self.before_P2, ratings)
        return self.losses

    def weights(self, sums_A: Tensor) -> Tensor:
        """The weight of each answer's targets, fp64 [A] like the sums; without pairs one answer of weight 0."""
        of_answers = -self.compute(sums_A[: self.tokens_P2.numel()].view(-1, 2)).slope_P2.flatten()
        return torch.nn.functional.pad(of_answers, (0, len(sums_A) - len(of_answers)))


# ---- per step --------------------------------------------------------------------------------------------------------


def pairs_of_step(model: Any, batch: Sequence[MicroBatch], spec: ObjectiveSpec) -> list[Pairs]:
    """Return the pairs of each micro batch of a step; an empty list if the objective has no pairs. Every rank calls
    this with the same number of micro batches."""
    if not spec.objective.has_answers:
        return []
    device = next(model.parameters()).device
    pairs_by_batch = [Pairs.of(rows, spec, device) for rows in batch]
    if spec.objective.is_rated:
        _set_baseline(model, pairs_by_batch, log_probs(model, batch))
    return pairs_by_batch


def divisor(model: Any, batch: Sequence[MicroBatch], spec: ObjectiveSpec) -> float:
    """The divisor of the loss sum over the global batch, on every rank: its pairs, or the weights of its targets."""
    own = 0.0
    if state_of(model).placement.is_first_of_row:
        own = sum(float(pairs_of(rows) if spec.objective.has_answers else weights_of(rows).sum()) for rows in batch)
    found = torch.tensor(own, dtype=torch.float64, device=next(model.parameters()).device)
    dist.all_reduce(found)
    return found.item()


def outcome(
    model: Any, pairs_by_batch: Sequence[Pairs], objective: ObjectiveSection
) -> tuple[Tensor, Mapping[str, float]]:
    """This rank's share of the summed losses, fp64, and metric means over all pairs; call it after a step's passes."""
    coords = state_of(model).placement.coords
    speaks = coords.tp == coords.cp == 0  # in a pipeline, only ranks with a loss have computed any
    loss, _, metrics = _over_ranks(model, pairs_by_batch if speaks else (), objective)
    return loss, metrics


# ---- forward only ----------------------------------------------------------------------------------------------------


def mean_over_pairs(
    model: Any, batches: Iterable[MicroBatch], spec: ObjectiveSpec
) -> tuple[float, Mapping[str, float]]:
    """The mean of a preference objective over the pairs of all ranks, and its metrics; NaN without pairs."""
    device = next(model.parameters()).device
    both = [(Pairs.of(rows, spec, device), log_probs(model, [rows])[0]) for rows in batches]
    pairs_by_batch = [pairs for pairs, _ in both]
    if spec.objective.is_rated:
        _set_baseline(model, pairs_by_batch, [sums for _, sums in both])
    for of_batch, sums in both:
        of_batch.compute(sums)
    loss, pairs, metrics = _over_ranks(
        model, pairs_by_batch if state_of(model).placement.is_first_of_row else (), spec.objective
    )
    dist.all_reduce(loss)
    return (loss.item() / pairs if pairs else nan), metrics


def log_probs(model: Any, batch: Sequence[MicroBatch]) -> list[Tensor]:
    """Summed log-probabilities of the answers of each micro batch, fp64 [P, 2], on all ranks that share it."""
    device = next(model.parameters()).device
    with evaluating(model):
        sums = [passes.answer_log_probs(model, to_device(rows, device, by_answer=True)) for rows in batch]
    return [found[: 2 * pairs_of(rows)].view(-1, 2) for rows, found in zip(batch, sums, strict=True)]


def table(model: Any, batches: Iterable[MicroBatch], pairs: int) -> Table:
    """Log-probabilities of all answers of `batches` under the current model, [`pairs`, 2], the same on every rank.
    Pairs in no batch have 0."""
    found = torch.zeros(pairs, 2, dtype=torch.float64, device=next(model.parameters()).device)
    for rows in batches:
        (sums,) = log_probs(model, [rows])
        if rows.pairs is not None and state_of(model).placement.is_first_of_row:
            found[torch.from_numpy(rows.pairs)] = sums
    dist.all_reduce(found)
    return found.cpu().numpy()


# ---- per micro batch -------------------------------------------------------------------------------------------------


def pairs_of(batch: MicroBatch) -> int:
    return 0 if batch.pairs is None else len(batch.pairs)


def answer_tokens(batch: MicroBatch) -> NDArray[np.int64]:
    """The number of trained targets of each answer, [P, 2]."""
    own = np.zeros(0, np.int64) if batch.answers is None else batch.answers[batch.answers >= 0]
    return np.bincount(own, minlength=2 * pairs_of(batch)).reshape(-1, 2)


def weights_of(batch: MicroBatch) -> NDArray[np.float64]:
    """The weight of every position's target in a micro batch, [B, T]; 0 without a target."""
    has_target = batch.labels != IGNORE
    return has_target.astype(np.float64) if batch.weights is None else np.where(has_target, batch.weights, 0.0)


# ---- over ranks ------------------------------------------------------------------------------------------------------


def _set_baseline(model: Any, pairs_by_batch: Sequence[Pairs], sums: Sequence[Tensor]) -> None:
    """Set the baseline of all pairs: how much likelier answers to other prompts became, the mean over all ranks, at
    least 0, fp64. `sums`: [P, 2] of each micro batch."""
    found = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for pairs, sums_P2 in zip(pairs_by_batch, sums, strict=True) if state_of(model).placement.is_first_of_row else ():
        assert pairs.before_P2 is not None, "it is compared with a reference"
        gains = sums_P2[:, 1] - pairs.before_P2[:, 1]
        found += torch.stack([gains.sum(), torch.ones_like(gains).sum()])
    dist.all_reduce(found)
    baseline = (found[0] / found[1].clamp(min=1)).clamp(min=0)
    for pairs in pairs_by_batch:
        pairs.baseline = baseline


def _over_ranks(
    model: Any, pairs_by_batch: Sequence[Pairs], objective: ObjectiveSection
) -> tuple[Tensor, int, Mapping[str, float]]:
    """This rank's share of the summed losses, the number of pairs on all ranks, and the mean of each metric over the
    pairs it applies to. Metrics that apply to no pair are left out. `pairs_by_batch`: those that this rank reports."""
    device = next(model.parameters()).device
    names = [name for name in metrics_of(objective) if not (objective.is_rated and name == _MARGIN)]
    sums = torch.zeros(1 + 2 * len(names), dtype=torch.float64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for losses in (pairs.losses for pairs in pairs_by_batch if pairs.losses is not None):
        loss += losses.loss_P.sum()
        sums[0] += len(losses.loss_P)
        for at, name in enumerate(names):
            sums[1 + 2 * at] += losses.metrics[name].nansum()
            sums[2 + 2 * at] += (~losses.metrics[name].isnan()).sum()
    dist.all_reduce(sums)
    pairs, *rest = sums.tolist()
    means = {name: rest[2 * at] / rest[2 * at + 1] if rest[2 * at + 1] else nan for at, name in enumerate(names)}
    if objective.is_rated:
        means[_MARGIN] = means["rewards/chosen"] - means["rewards/rejected"]
    return loss, int(pairs), {name: means[name] for name in metrics_of(objective) if not isnan(means[name])}
