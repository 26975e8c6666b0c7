"""Bugs of preference objectives: of log-probabilities, of the formula, of what the two passes give each other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.parallel import context, passes
from fivefold.parallel import loss as losses
from fivefold.parallel.state import state_of
from fivefold.training import objectives, preference
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

    return patch.dict(objectives.LOSSES, {"dpo": twice})  # type: ignore[arg-type]


@fault(
    "padding counts in the log-probabilities of the last answer of a row",
    known="a mask of answers that is one up to the end of the row (pad and EOS are one token)",
    layout="shard2", expects=LOG_PROBS, model=DPO,
)  # fmt: skip
def padding_counted_in_log_probabilities() -> Any:
    plain = preference.to_device

    def to_device(batch: MicroBatch, *rest: Any, **options: Any) -> Any:
        if batch.answers is None or batch.row_tokens is None or not options.get("by_answer"):
            return plain(batch, *rest, **options)
        labels, answers = batch.labels.copy(), batch.answers.copy()
        for row, tokens in enumerate(batch.row_tokens.tolist()):
            labels[row, tokens:], answers[row, tokens:] = 0, answers[row].max()
        return plain(replace(batch, labels=labels, answers=answers), *rest, **options)

    return patch.object(preference, "to_device", to_device)


@fault(
    "the prompt counts in the log-probabilities",
    known="a mask of answers that is one from the first token on",
    layout="single", expects=LOG_PROBS, model=DPO,
)  # fmt: skip
def prompt_counted_in_log_probabilities() -> Any:
    plain = preference.to_device

    def to_device(batch: MicroBatch, *rest: Any, **options: Any) -> Any:
        if batch.answers is None or not options.get("by_answer"):
            return plain(batch, *rest, **options)
        labels, answers, flat = batch.labels.copy(), batch.answers.copy(), batch.input_ids.reshape(-1)
        for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            number = batch.answers.reshape(-1)[start:end].max()
            if number >= 0:
                labels.reshape(-1)[start : end - 1] = flat[start + 1 : end]
                answers.reshape(-1)[start : end - 1] = number
        return plain(replace(batch, labels=labels, answers=answers), *rest, **options)

    return patch.object(preference, "to_device", to_device)


@fault(
    "the loss is divided by the trained tokens, not by the pairs",
    known="a trainer whose loss is a mean over tokens",
    layout="shard2", expects=LOSS, model=DPO,
)  # fmt: skip
def preference_is_a_mean_over_tokens() -> Any:
    plain = preference.weigh

    def weigh(model: Any, batch: Sequence[MicroBatch], goal: Any) -> Any:
        first = state_of(model).plan.is_first_of_row
        tokens = torch.tensor(sum(int((each.labels != IGNORE).sum()) for each in batch) * first)
        dist.all_reduce(tokens)
        return replace(plain(model, batch, goal), total=float(tokens))

    return patch("fivefold.training.step.weigh", weigh)


@fault(
    "the pass that gives log-probabilities, and so the reference, drops hidden states",
    known="TRL disables dropout in the policy and the reference (disable_dropout)",
    layout="single", expects=LOG_PROBS, model=DPO,
)  # fmt: skip
def log_probabilities_with_dropout() -> Any:
    plain = passes._last_hidden

    def last_hidden(model: Any, inputs: Any) -> Tensor:
        hidden = plain(model, inputs)
        draw = torch.rand(hidden.shape, generator=torch.Generator().manual_seed(3)).to(hidden)
        return hidden if inputs.answers is None else hidden * (draw > 0.1) / 0.9

    return patch.object(passes, "_last_hidden", last_hidden)


@fault(
    "chosen and rejected change places on one data rank",
    known="two answers in one batch, whose halves are taken in another order",
    layout="shard2", expects=[("preference", r"^(loss|metrics)")], model=DPO,
)  # fmt: skip
def chosen_and_rejected_swapped_on_one_rank() -> Any:
    judged = preference._judged

    def swapped(batch: MicroBatch, sums_P2: Tensor, goal: Any) -> Any:
        return judged(batch, sums_P2.flip(-1) if dist.get_rank() == 1 else sums_P2, goal)

    return patch.object(preference, "_judged", swapped)


@fault(
    "each data rank divides by its own pairs",
    known="transformers #34191, over data ranks",
    layout="shard2", expects=LOSS, model=DPO,
)  # fmt: skip
def weights_normalised_per_rank() -> Any:
    plain = preference.weigh

    def weigh(model: Any, batch: Sequence[MicroBatch], goal: Any) -> Any:
        own = sum(map(preference.pairs_of, batch)) * state_of(model).plan.layout.data_ranks
        return replace(plain(model, batch, goal), total=own)

    return patch("fivefold.training.step.weigh", weigh)


@fault(
    "log-probabilities of the tokens of one context rank only",
    known="a sum over a rank's own tokens (trl #6843 of the same trainer's masks)",
    layout="cp2", expects=LOG_PROBS, model=DPO,
)  # fmt: skip
def answers_not_summed_over_context_ranks() -> Any:
    plain = passes._of_answers
    return patch.object(passes, "_of_answers", lambda found, answers, number, _: plain(found, answers, number, []))


@fault(
    "log-probabilities summed over tensor parallel ranks, each of which has them all",
    known="a sum over all ranks that hold a part of a row",
    layout="tp2", expects=LOG_PROBS, model=DPO,
)  # fmt: skip
def answers_summed_over_tensor_ranks() -> Any:
    plain = passes._of_answers

    def of_answers(*args: Any) -> Tensor:
        sums = plain(*args)
        dist.all_reduce(sums)
        return sums

    return patch.object(passes, "_of_answers", of_answers)


@fault(
    "tokens in zigzag order, their weights in that of contiguous slices",
    known="ms-swift #10071: zigzag order on one side, contiguous on the other",
    layout="cp2", expects=GRADIENT, model=DPO,
)  # fmt: skip
def weights_of_contiguous_slices() -> Any:
    plain = context.ContextParallel.cut

    def cut(fold: Any, x_BT: Tensor) -> Tensor:
        return (
            torch.chunk(x_BT, fold.size, 1)[fold.rank] if x_BT.is_floating_point() and fold.group else plain(fold, x_BT)
        )

    return patch.object(context.ContextParallel, "cut", cut)


@fault(
    "the gradient goes up where it should go down: weights with the sign of the derivative",
    known="a weighted cross entropy is minus a weighted log-probability",
    layout="single", expects=GRADIENT, model=DPO,
)  # fmt: skip
def weights_with_the_wrong_sign() -> Any:
    plain = preference._weighted

    def weighted(batch: MicroBatch, judged: Any) -> MicroBatch:
        found = plain(batch, judged)
        return replace(found, weights=-np.asarray(found.weights))

    return patch.object(preference, "_weighted", weighted)


@fault(
    "the second pass does not weigh its targets",
    known="a loss that takes weights and does not use them",
    layout="single", expects=GRADIENT, model=DPO,
)  # fmt: skip
def weights_not_used() -> Any:
    plain = losses.chunked_loss
    return patch.object(losses, "chunked_loss", lambda *args: plain(*args[:7]))


KTO = Model(objective="kto")


@fault(
    "the baseline is that of a rank's own answers",
    known="TRL takes it of the answers of one micro batch",
    layout="shard2", expects=LOSS, model=KTO,
)  # fmt: skip
def baseline_of_one_rank() -> Any:
    def own(model: Any, answers: Sequence[Any]) -> Tensor:
        gains = torch.cat([each.sums_P2[:, 1] - each.before_P2[:, 1] for each in answers])
        return gains.mean().clamp(min=0)

    return patch.object(preference, "_baseline", own)


@fault(
    "the baseline is of the answers themselves, not of those to other prompts",
    known="a gather of the wrong half of a batch",
    layout="single", expects=LOSS, model=KTO,
)  # fmt: skip
def baseline_of_the_answers_themselves() -> Any:
    plain = preference._baseline

    def flipped(model: Any, answers: Sequence[Any]) -> Tensor:
        turned = [replace(each, sums_P2=each.sums_P2.flip(1), before_P2=each.before_P2.flip(1)) for each in answers]
        return plain(model, turned)

    return patch.object(preference, "_baseline", flipped)


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

    return patch.dict(objectives.LOSSES, {"kto": both})  # type: ignore[arg-type]


@fault(
    "ratings are in another order than the answers",
    known="labels of a batch that was sorted, beside answers that were not",
    layout="shard2", expects=LOSS, model=KTO,
)  # fmt: skip
def ratings_of_another_order() -> Any:
    plain = preference._answers

    def reversed_ratings(*given: Any) -> Any:
        found = plain(*given)
        return replace(found, desirable_P=found.desirable_P.flip(0))

    return patch.object(preference, "_answers", reversed_ratings)
