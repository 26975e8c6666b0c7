"""Distillation written out: both softmaxes over the whole vocabulary, and autograd through their divergence. The
reference for `parallel/loss/runtime.py`, which uses only the teacher's top-k tokens."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fivefold.data.batch import IGNORE, MicroBatch, TeacherTargets
from fivefold.verification.proof_case import ProofCase


@dataclass(frozen=True)
class Said:
    """A teacher's output at the positions of a row: tokens and log-probabilities, [T, K] each."""

    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float64]


def said(case: ProofCase, row: int) -> Said:
    """The random output of a teacher other than the model of the case, the likeliest tokens first."""
    rng = np.random.default_rng([case.seed, 1_000_039, row])
    shape = (case.row_length, case.vocabulary)
    logits = torch.from_numpy(rng.normal(0, 2, shape))
    top = logits.log_softmax(-1).topk(case.followed)
    return Said(top.indices.numpy(), top.values.numpy())


def followed(case: ProofCase, batch: MicroBatch, rows: list[int]) -> TeacherTargets:
    """That teacher's output at the targets of a micro batch with these rows."""
    shape = (*batch.labels.shape, case.followed)
    tokens, log_probs = np.zeros(shape, np.int32), np.zeros(shape)
    for b, row in enumerate(rows):
        has_target, of_row = batch.labels[b] != IGNORE, said(case, row)
        at = np.flatnonzero(has_target)
        tokens[b, at], log_probs[b, at] = of_row.tokens[at], of_row.log_probs[at]
    return TeacherTargets(tokens, log_probs, case.temperature, case.alpha)


def loss(case: ProofCase, logits: Tensor, targets: Tensor, row: int, start: int) -> Tensor:
    """The loss summed over the targets [n] of a document that begins at `start` of its row. `logits`: [n, V]."""
    at, of_row = slice(start, start + len(targets)), said(case, row)
    tokens, log_probs = (torch.from_numpy(array[at]).to(logits.device) for array in (of_row.tokens, of_row.log_probs))
    wanted = torch.zeros_like(logits).scatter(-1, tokens, (log_probs / case.temperature).softmax(-1).to(logits))
    own = (logits / case.temperature).log_softmax(-1)
    apart = F.kl_div(own, wanted, reduction="none").sum(-1)[targets != IGNORE].sum()
    text = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE)
    return case.alpha * case.temperature**2 * apart + (1 - case.alpha) * text


def likeliest(case: ProofCase, logits: Tensor) -> Tensor:
    """Log-probabilities of a model's own top-k tokens, [..., V] -> [..., K]."""
    return logits.log_softmax(-1).topk(case.followed).values
