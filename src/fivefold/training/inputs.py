"""Micro batches on the device, a loss of the user's own, and the model as an evaluation has it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.named_code import NamedCode
from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.parallel.fsdp.runtime import reshard
from fivefold.parallel.loss.own import LossRow, TokenLoss
from fivefold.parallel.loss.runtime import SoftTargets
from fivefold.parallel.loss.tasks import AnswerLogProbs, CrossEntropy, OwnLoss, PreferenceLoss, Task
from fivefold.parallel.passes import Inputs
from fivefold.parallel.plain import on_every_rank
from fivefold.parallel.state import state_of


def to_device(
    batch: MicroBatch, device: torch.device, scale: Tensor | None = None, *, by_answer: bool = False,
    weigh: Callable[[Tensor], Tensor] | None = None, task: Task | None = None, loss: TokenLoss | None = None,
    first_row: int = 0,
) -> Inputs:  # fmt: skip
    """Convert a micro batch of numpy arrays to tensors. `cu_seqlens` stays on the CPU; it is omitted when every row is
    one document. `first_row`: the place of the first row in the global batch, where the batch does not say its places.

    `task` is the task of the head. Without one it is `OwnLoss` with a `loss` of the user's own, `PreferenceLoss` if
    `weigh` weighs answers, `AnswerLogProbs` with `by_answer` (at least one answer is counted, an empty one if there are
    none), else `CrossEntropy`.
    """

    def there(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    rows, has_rows = batch.input_ids.shape[0], batch.row_tokens is not None
    cu_seqlens = None if len(batch.cu_seqlens) == rows + 1 else torch.from_numpy(batch.cu_seqlens)
    if loss is not None:
        task = OwnLoss(loss, there(batch.labels), loss_row(batch, there), scale)
    if task is None:
        task = _answers(batch, there) if by_answer or weigh is not None else _cross_entropy(batch, there, scale)
        if weigh is not None and isinstance(task, AnswerLogProbs):
            task = PreferenceLoss(task, weigh, scale)
    places = range(first_row, first_row + rows) if batch.places is None else batch.places.tolist()
    return Inputs(
        there(batch.input_ids), there(batch.position_ids), task, cu_seqlens=cu_seqlens,
        row_tokens=there(batch.row_tokens) if has_rows else None, places=places,
    )  # fmt: skip


def _cross_entropy(batch: MicroBatch, there: Callable[[Any], Tensor], scale: Tensor | None) -> CrossEntropy:
    teacher, soft = batch.teacher, None
    if teacher is not None:
        tokens, log_probs = there(teacher.tokens).long(), there(teacher.log_probs)
        soft = SoftTargets(tokens, log_probs, teacher.temperature, teacher.alpha)
    weights = None if batch.weights is None else there(batch.weights)
    return CrossEntropy(there(batch.labels), scale, weights, soft)


def _answers(batch: MicroBatch, there: Callable[[Any], Tensor]) -> AnswerLogProbs:
    labels, pairs = there(batch.labels), 0 if batch.pairs is None else len(batch.pairs)
    answers = torch.full_like(labels, -1) if batch.answers is None else there(batch.answers)
    return AnswerLogProbs(labels, answers, max(1, 2 * pairs))


def loss_row(batch: MicroBatch, there: Callable[[Any], Tensor] = torch.from_numpy) -> LossRow:
    """The tokens of a micro batch as a loss of the user's own gets them, [B, T]."""
    columns = {name: there(column) for name, column in batch.columns.items()}
    return LossRow(there(batch.input_ids), there(batch.position_ids), columns)


def share_of(model: Any) -> dict[str, Any]:
    """The arguments with which `PackedRows` selects this rank's rows."""
    placement = state_of(model).placement
    return {
        "data_rank": placement.data_rank,
        "data_ranks": placement.layout.data_ranks,
        "micro_batch_size": placement.layout.micro_batch_size,
        "row_multiple": placement.layout.row_multiple,
    }


def squared_lengths(batch: Sequence[MicroBatch]) -> int:
    """Sum of squared lengths of the documents in these rows, without segments that have no target (padding)."""
    total = 0
    for part in batch:
        lengths = np.diff(part.cu_seqlens).astype(np.int64)
        with_target = np.add.reduceat(part.labels.reshape(-1) != IGNORE, part.cu_seqlens[:-1]) > 0
        total += int((lengths[with_target] ** 2).sum())
    return total


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


# ---- a loss of the user's own ----------------------------------------------------------------------------------------


def own_loss(config: RunConfig) -> TokenLoss | None:
    """The function of `objective.path`, whose file is run; None for a built-in objective. Raises `UserError`."""
    return None if not config.objective.is_own else loss_at(config.objective.path)


def loss_at(text: str) -> TokenLoss:
    """The function at `PATH.py:NAME`, whose file is run. Raises `UserError`."""
    code = NamedCode.read(text, "objective.path")
    return TokenLoss(code.load(), code.digest)


def check_loss(loss: TokenLoss, model: Any, batch: Sequence[MicroBatch]) -> None:
    """Try a loss of the user's own on the first targets of this rank's micro batches. Every rank calls this. Raises
    `UserError`, on every rank, if it cannot be used on one."""
    on_every_rank(lambda: _try_loss(loss, model, batch))


def _try_loss(loss: TokenLoss, model: Any, batch: Sequence[MicroBatch]) -> None:
    if not callable(loss.function):
        raise UserError(f"loss is a {type(loss.function).__name__}", fix="pass a function of (logits, labels, row)")
    device, vocabulary = next(model.parameters()).device, state_of(model).plan.whole_vocabulary
    for rows in batch:
        at = np.flatnonzero(rows.labels.reshape(-1) != IGNORE)
        if len(at):
            (row,) = loss_row(rows).split([rows.labels.size])
            labels = torch.from_numpy(rows.labels.reshape(-1)[at])
            loss.check(labels.to(device), row.at(at).cut(lambda tokens: tokens.to(device)), vocabulary)
            return
