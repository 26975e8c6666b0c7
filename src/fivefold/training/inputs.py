"""Micro batches on the device, and the model as an evaluation has it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fivefold.data.batch import MicroBatch
from fivefold.parallel.fsdp.runtime import reshard
from fivefold.parallel.loss.runtime import SoftTargets
from fivefold.parallel.passes import LossInputs


def to_device(
    batch: MicroBatch, device: torch.device, scale: Tensor | None = None, *, by_answer: bool = False,
    judge: Callable[[Tensor], Tensor] | None = None,
) -> LossInputs:  # fmt: skip
    """A micro batch of numpy arrays as tensors; `cu_seqlens` stays on the CPU, and is left out when rows are
    documents. `by_answer`: for the log-probabilities of its answers, one at least (of nothing, where it has none); so
    too where a `judge` weighs them."""
    ids, labels, positions = (
        torch.from_numpy(array).to(device, non_blocking=True)
        for array in (batch.input_ids, batch.labels, batch.position_ids)
    )
    rows = batch.input_ids.shape[0]
    cu_seqlens = None if len(batch.cu_seqlens) == rows + 1 else torch.from_numpy(batch.cu_seqlens)
    row_tokens = None if batch.row_tokens is None else torch.from_numpy(batch.row_tokens).to(device, non_blocking=True)
    weights = None if batch.weights is None else torch.from_numpy(batch.weights).to(device, non_blocking=True)
    answers, of_answers = None, 0
    if by_answer or judge is not None:
        pairs = 0 if batch.pairs is None else len(batch.pairs)
        answers = torch.full_like(labels, -1) if batch.answers is None else torch.from_numpy(batch.answers).to(device)
        of_answers = max(1, 2 * pairs)
    soft = None
    if (teacher := batch.teacher) is not None:
        both = (torch.from_numpy(array).to(device, non_blocking=True) for array in (teacher.tokens, teacher.log_probs))
        tokens, log_probs = both
        soft = SoftTargets(tokens.long(), log_probs, teacher.temperature, teacher.alpha)
    return LossInputs(
        ids, labels, positions, cu_seqlens=cu_seqlens, scale=scale, row_tokens=row_tokens, weights=weights,
        answers=answers, of_answers=of_answers, judge=judge, soft=soft,
    )  # fmt: skip


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """No gradients, eval mode; afterwards the gathered parameters are dropped, for the next step changes them."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        reshard(model)
