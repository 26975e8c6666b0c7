"""Bugs of preference objectives: of log-probabilities, of the formula, of the weights that follow from it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.parallel.loss import tasks
from fivefold.parallel.loss.tasks import AnswerLogProbs, Head
from fivefold.parallel.state import state_of
from fivefold.training import objectives, preference, step
from tests.verification.faults.fault import Model, fault

DPO = Model(objective="dpo")
LOG_PROBS, LOSS = [("preference", r"^log-probabilities")], [("preference", r"^loss")]
GRADIENT = [("gradient of the objective", r"")]


@fault(
    "beta is in the rewards and once more in the loss",
    known="rewards that are scaled where they are logged, and used",
    layout="single", expects=LOSS, model=DPO,
)  # fmt: skip
def beta_applied_twice() -> Any:
    plain = objectives.LOSSES["dpo"]

    def twice(objective: Any, answers: Tensor, gains: Tensor, ratings: Any) -> Tensor:
        return plain(objective, answers, objective.beta * gains, ratings)

    return patch.dict(objectives.LOSSES, {"dpo": twice})


@fault(
    "padding counts in the log-probabilities of the last answer of a row",
    known="a mask of answers that is one up to the end of the row (pad and EOS are one token)",
    layout="shard2", expects=LOG_PROBS, model=DPO,
)  # fmt: skip
def padding_counted_in_log_probabilities() -> Any:
    def counted(batch: MicroBatch) -> MicroBatch:
        assert batch.answers is not None and batch.row_tokens is not None
        labels, answers = batch.labels.copy(), batch.answers.copy()
        for row, tokens in enumerate(batch.row_tokens.tolist()):
            labels[row, tokens:], answers[row, tokens:] = 0, answers[row].max()
        return replace(batch, labels=labels, answers=answers)

    return _of_answers_on_the_device(counted)


def _of_answers_on_the_device(changed: Callable[[MicroBatch], MicroBatch]) -> Any:
    """Micro batches whose answers are judged are others, forward only and in a step."""
    plain = preference.to_device

    def to_device(batch: MicroBatch, *rest: Any, **options: Any) -> Any:
        is_judged = options.get("by_answer") or options.get("weigh") is not None
        return plain(changed(batch) if is_judged and batch.answers is not None else batch, *rest, **options)

    patches = ExitStack()
    for module in (preference, step):
        patches.enter_context(patch.object(module, "to_device", to_device))
    return patches


@fault(
    "the prompt counts in the log-probabilities",
    known="a mask of answers that is one from the first token on",
    layout="single", expects=LOG_PROBS, model=DPO,
)  # fmt: skip
def prompt_counted_in_log_probabilities() -> Any:
    def counted(batch: MicroBatch) -> MicroBatch:
        assert batch.answers is not None
        labels, answers, flat = batch.labels.copy(), batch.answers.copy(), batch.input_ids.reshape(-1)
        for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            number = batch.answers.reshape(-1)[start:end].max()
            if number >= 0:
                labels.reshape(-1)[start : end - 1] = flat[start + 1 : end]
                answers.reshape(-1)[start : end - 1] = number
        return replace(batch, labels=labels, answers=answers)

    return _of_answers_on_the_device(counted)


@fault(
    "the loss is divided by the trained tokens, not by the pairs",
    known="a trainer whose loss is a mean over tokens",
    layout="shard2", expects=LOSS, model=DPO,
)  # fmt: skip
def preference_is_a_mean_over_tokens() -> Any:
    def tokens(model: Any, batch: Sequence[MicroBatch], _: Any) -> float:
        first = state_of(model).placement.is_first_of_row
        found = torch.tensor(sum(int((each.labels != IGNORE).sum()) for each in batch) * first)
        dist.all_reduce(found)
        return float(found)

    return patch.object(step, "divisor", tokens)


@fault(
    "the pass that gives log-probabilities, and so the reference, drops hidden states",
    known="TRL disables dropout in the policy and the reference (disable_dropout)",
    layout="single", expects=LOG_PROBS, model=DPO,
)  # fmt: skip
def log_probabilities_with_dropout() -> Any:
    plain = preference.to_device

    class Dropping(AnswerLogProbs):
        def __call__(self, head: Head) -> Tensor:
            draw = torch.rand(head.hidden.shape, generator=torch.Generator().manual_seed(3)).to(head.hidden)
            return super().__call__(replace(head, hidden=head.hidden * (draw > 0.1) / 0.9))

    def to_device(*args: Any, **options: Any) -> Any:
        inputs = plain(*args, **options)
        inputs.task = Dropping(**vars(inputs.task))
        return inputs

    return patch.object(preference, "to_device", to_device)


@fault(
    "chosen and rejected change places on one data rank",
    known="two answers in one batch, whose halves are taken in another order",
    layout="shard2", expects=[("preference", r"^(loss|metrics)")], model=DPO,
)  # fmt: skip
def chosen_and_rejected_swapped_on_one_rank() -> Any:
    plain = preference.Pairs.compute

    def swapped(pairs: Any, sums_P2: Tensor) -> Any:
        return plain(pairs, sums_P2.flip(-1) if dist.get_rank() == 1 else sums_P2)

    return patch.object(preference.Pairs, "compute", swapped)


@fault(
    "each data rank divides by its own pairs",
    known="transformers #34191, over data ranks",
    layout="shard2", expects=LOSS, model=DPO,
)  # fmt: skip
def weights_normalised_per_rank() -> Any:
    def own(model: Any, batch: Sequence[MicroBatch], _: Any) -> float:
        return float(sum(map(preference.pairs_of, batch)) * state_of(model).plan.layout.data_ranks)

    return patch.object(step, "divisor", own)


@fault(
    "log-probabilities of the tokens of one context rank only",
    known="a sum over a rank's own tokens (trl #6843 of the same trainer's masks)",
    layout="cp2", expects=LOG_PROBS, model=DPO,
)  # fmt: skip
def answers_not_summed_over_context_ranks() -> Any:
    plain = tasks._of_answers
    return patch.object(tasks, "_of_answers", lambda found, answers, number, _: plain(found, answers, number, []))


@fault(
    "log-probabilities summed over tensor parallel ranks, each of which has them all",
    known="a sum over all ranks that hold a part of a row",
    layout="tp2", expects=LOG_PROBS, model=DPO,
)  # fmt: skip
def answers_summed_over_tensor_ranks() -> Any:
    plain = tasks._of_answers

    def of_answers(*args: Any) -> Tensor:
        sums = plain(*args)
        dist.all_reduce(sums)
        return sums

    return patch.object(tasks, "_of_answers", of_answers)


@fault(
    "tokens in zigzag order, their weights in that of contiguous slices",
    known="ms-swift #10071: zigzag order on one side, contiguous on the other",
    layout="cp2", expects=GRADIENT, model=DPO,
)  # fmt: skip
def weights_of_contiguous_slices() -> Any:
    plain = tasks._of_targets

    def weights(weights_A: Tensor, answers_BT: Tensor) -> Tensor:
        ranks: list[Any] = [None, None]  # the first has slices 0 and 3 of four, the second 1 and 2
        dist.all_gather_object(ranks, answers_BT)
        (first, last), (second, third) = (each.chunk(2, 1) for each in ranks)
        contiguous = (first, second), (third, last)
        return plain(weights_A, torch.cat(contiguous[dist.get_rank()], 1))

    return patch.object(tasks, "_of_targets", weights)


@fault(
    "the gradient goes up where it should go down: weights with the sign of the derivative",
    known="a weighted cross entropy is minus a weighted log-probability",
    layout="single", expects=GRADIENT, model=DPO,
)  # fmt: skip
def weights_with_the_wrong_sign() -> Any:
    plain = preference.Pairs.weights
    return patch.object(preference.Pairs, "weights", lambda pairs, sums_A: -plain(pairs, sums_A))


@fault(
    "the loss does not weigh the targets of its answers",
    known="a loss that takes weights and does not use them",
    layout="single", expects=GRADIENT, model=DPO,
)  # fmt: skip
def weights_not_used() -> Any:
    plain = Head.softmax_chunks
    return patch.object(Head, "softmax_chunks", lambda head, labels, *_: plain(head, labels))


KTO = Model(objective="kto")


@fault(
    "the baseline is that of a rank's own answers",
    known="TRL takes it of the answers of one micro batch",
    layout="shard2", expects=LOSS, model=KTO,
)  # fmt: skip
def baseline_of_one_rank() -> Any:
    def own(model: Any, pairs_by_batch: Sequence[Any], sums: Sequence[Tensor]) -> None:
        gains = [sums_P2[:, 1] - each.before_P2[:, 1] for each, sums_P2 in zip(pairs_by_batch, sums, strict=True)]
        for each in pairs_by_batch:
            each.baseline = torch.cat(gains).mean().clamp(min=0)

    return patch.object(preference, "_set_baseline", own)


@fault(
    "the baseline is of the answers themselves, not of those to other prompts",
    known="a gather of the wrong half of a batch",
    layout="single", expects=LOSS, model=KTO,
)  # fmt: skip
def baseline_of_the_answers_themselves() -> Any:
    plain = preference._set_baseline

    def flipped(model: Any, pairs_by_batch: Sequence[Any], sums: Sequence[Tensor]) -> None:
        turned = [replace(each, before_P2=each.before_P2.flip(1)) for each in pairs_by_batch]
        plain(model, turned, [each.flip(1) for each in sums])
        for each, other in zip(pairs_by_batch, turned, strict=True):
            each.baseline = other.baseline

    return patch.object(preference, "_set_baseline", flipped)


@fault(
    "answers to other prompts are trained too",
    known="a mask that is one for every sequence of a batch",
    layout="single", expects=GRADIENT, model=KTO,
)  # fmt: skip
def answers_to_other_prompts_trained() -> Any:
    plain = objectives.LOSSES["kto"]

    def both(objective: Any, answers: Tensor, gains: Tensor, ratings: Any) -> Tensor:
        others = plain(objective, answers, gains.flip(1), ratings)
        return plain(objective, answers, gains, ratings) + others - others.detach()

    return patch.dict(objectives.LOSSES, {"kto": both})


@fault(
    "ratings are in another order than the answers",
    known="labels of a batch that was sorted, beside answers that were not",
    layout="shard2", expects=LOSS, model=KTO,
)  # fmt: skip
def ratings_of_another_order() -> Any:
    plain = preference.Pairs.of.__func__  # type: ignore[attr-defined]

    def reversed_ratings(*given: Any) -> Any:
        found = plain(*given)
        return replace(found, desirable_P=found.desirable_P.flip(0))

    return patch.object(preference.Pairs, "of", classmethod(reversed_ratings))
