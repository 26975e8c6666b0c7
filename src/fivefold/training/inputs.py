"""Micro batches on the device, and the context in which a model is evaluated."""

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
    """Convert a micro batch of numpy arrays to tensors. `cu_seqlens` stays on the CPU; it is omitted when every row is
    one document. `by_answer`, or a `judge` that weighs answers: include the answer index of each target. At least one
    answer is counted, an empty one if there are none."""
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
    """Evaluate without gradients, in eval mode. Reshards the parameters at the end: the next step changes them."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        reshard(model)
