"""Bugs of distillation: of what is asked of a teacher, and of the loss that follows it."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.parallel.context import runtime as context
from fivefold.parallel.loss import runtime as losses
from fivefold.parallel.loss import tasks
from fivefold.verification import proof
from tests.verification.faults.fault import Model, fault

DISTILL = Model(objective="distill")
ASKED, LOSS = [("teacher", r"^asked")], [("teacher", r"^loss")]
GRADIENT = [("gradient of the objective", r"")]


def _of_softmaxes(change: Any) -> Any:
    """`change` is given the softmax of the text and that of the teacher, and what the teacher says."""
    plain = losses._softmaxes

    def changed(labels_N: Tensor, soft: Any = None) -> Any:
        return plain(labels_N) if soft is None else change(*plain(labels_N, soft), soft)

    return patch.object(losses, "_softmaxes", changed)


@fault(
    "the divergence is not multiplied by the square of the temperature",
    known="a gradient that shrinks as the temperature rises: axolotl and TRL have had it both ways",
    layout="single", expects=LOSS, model=DISTILL,
)  # fmt: skip
def temperature_not_squared() -> Any:
    return _of_softmaxes(lambda text, teacher, soft: (text, replace(teacher, weight=soft.alpha)))


@fault(
    "the temperature is the teacher's alone",
    known="logits of the student that are not divided",
    layout="single", expects=LOSS, model=DISTILL,
)  # fmt: skip
def temperature_of_the_teacher_alone() -> Any:
    return _of_softmaxes(lambda text, teacher, _: (text, replace(teacher, temperature=1.0)))


@fault(
    "the weights of the text and of the teacher change places",
    known="kd_alpha and kd_ce_alpha, each the other's",
    layout="single", expects=LOSS, model=DISTILL,
)  # fmt: skip
def weights_change_places() -> Any:
    def turned(text: Any, teacher: Any, soft: Any) -> Any:
        return (
            replace(text, weight=soft.alpha),
            replace(teacher, weight=(1 - soft.alpha) * soft.temperature**2),
        )

    return _of_softmaxes(turned)


@fault(
    "the shares of the likeliest tokens do not add up to 1",
    known="a softmax over the vocabulary, cut to the likeliest tokens and not normalised again",
    layout="single", expects=LOSS, model=DISTILL,
)  # fmt: skip
def shares_not_normalised() -> Any:
    def cut(text: Any, teacher: Any, soft: Any) -> Any:
        ((tokens, _),) = teacher.targets
        return text, replace(
            teacher, targets=((tokens, torch.where(text.targets[0][1] != 0, soft.log_probs.exp(), 0)),)
        )

    return _of_softmaxes(cut)


@fault(
    "the teacher is followed at positions without a target too",
    known="a divergence without the mask of the answers",
    layout="single", expects=LOSS, model=DISTILL,
)  # fmt: skip
def followed_without_a_mask() -> Any:
    softmaxes, plain = losses._softmaxes, losses.softmax_losses

    def everywhere(labels_N: Tensor, soft: Any = None) -> Any:
        if soft is None:
            return softmaxes(labels_N)
        text, _ = softmaxes(labels_N, soft)
        return text, softmaxes(torch.where(labels_N == IGNORE, 0, labels_N), soft)[1]

    def unmasked(labels: Tensor, soft: Any, logits: Tensor, factor: Any, **options: Any) -> Any:
        whole = factor if factor is None or soft is None else torch.full_like(factor, factor.max())
        return plain(labels, soft, logits, whole, **options)

    return patch.multiple(losses, _softmaxes=everywhere, softmax_losses=unmasked)


@fault(
    "what the teacher says is one position too early",
    known="log-probabilities of a server that leaves out the first token, beside labels that are shifted",
    layout="single", expects=LOSS, model=DISTILL,
)  # fmt: skip
def teacher_one_position_early() -> Any:
    plain = proof.to_device

    def shifted(batch: MicroBatch, *rest: Any, **options: Any) -> Any:
        if batch.teacher is not None:
            tokens, log_probs = batch.teacher.tokens.copy(), batch.teacher.log_probs.copy()
            tokens[:, :-1], log_probs[:, :-1] = tokens[:, 1:], log_probs[:, 1:]
            batch = replace(batch, teacher=replace(batch.teacher, tokens=tokens, log_probs=log_probs))
        return plain(batch, *rest, **options)

    return patch.object(proof, "to_device", shifted)


@fault(
    "each rank of tp names the likeliest tokens of its own part of the vocabulary",
    known="a top-k of logits that are split",
    layout="tp2", expects=ASKED, model=DISTILL,
)  # fmt: skip
def likeliest_of_a_part() -> Any:
    plain = tasks.top_log_probs

    def own(logits: Tensor, fold: Any, top_k: int, vocabulary: int) -> Any:
        with patch.object(type(fold), "all_gather", lambda self, x: torch.cat([x] * self.size, -1)):
            return plain(logits, fold, top_k, vocabulary)

    return patch.object(tasks, "top_log_probs", own)


@fault(
    "log-probabilities of the teacher are normalised over a part of the vocabulary",
    known="a softmax of logits that are split",
    layout="tp2", expects=ASKED, model=DISTILL,
)  # fmt: skip
def normalised_over_a_part() -> Any:
    plain = tasks.top_log_probs

    def own(logits: Tensor, fold: Any, top_k: int, vocabulary: int) -> Any:
        with patch.object(type(fold), "all_reduce", lambda *_: None):
            return plain(logits, fold, top_k, vocabulary)

    return patch.object(tasks, "top_log_probs", own)


@fault(
    "positions of a rank of cp are taken for the first of a row",
    known="a zigzag of chunks that is forgotten where rows are put together",
    layout="cp2", expects=ASKED, model=DISTILL,
)  # fmt: skip
def positions_of_cp_forgotten() -> Any:
    plain = tasks._of_whole_rows

    def in_order(found_N: Tensor, fold: context.ContextParallel, rows: int, length: int) -> Tensor:
        size = length // fold.size
        with patch.object(type(fold), "cut", lambda self, x: x[:, self.rank * size : (self.rank + 1) * size]):
            return plain(found_N, fold, rows, length)

    return patch.object(tasks, "_of_whole_rows", in_order)


@fault(
    "the gradient follows the text alone",
    known="a divergence that is logged, of logits that were detached",
    layout="shard2", expects=GRADIENT, model=DISTILL,
)  # fmt: skip
def gradient_of_the_text_alone() -> Any:
    plain = losses.softmax_losses

    def detached(labels: Tensor, soft: Any, logits: Tensor, factor: Any, **options: Any) -> Any:
        if soft is None or factor is None:
            return plain(labels, soft, logits, factor, **options)
        _, of_text = plain(labels, None, logits.clone(), factor * (1 - soft.alpha), **options)
        return plain(labels, soft, logits, None, **options)[0], of_text

    return patch.object(losses, "softmax_losses", detached)
