"""Between the steps: the validation loss and a generated sample. Training state is left as it was."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import nan
from typing import Any

import torch

from fivefold.config import RunConfig
from fivefold.data.batch import MicroBatch
from fivefold.data.rows import PackedRows
from fivefold.parallel import passes
from fivefold.parallel.data import reshard
from fivefold.parallel.state import state_of
from fivefold.training.optimizer import all_reduce_sum
from fivefold.training.step import to_device


def evaluate(model: Any, rows: PackedRows, config: RunConfig) -> float:
    """Mean cross entropy, nats per target token, over the first `eval.max_tokens` of `rows`; equal on all ranks."""
    state = state_of(model)
    layout = state.plan.layout
    return mean_loss(
        model,
        rows.sequential(
            data_rank=state.plan.data_rank,
            data_ranks=layout.data_ranks,
            micro_batch_size=layout.micro_batch_size,
            row_multiple=layout.row_multiple,
            max_tokens=config.eval.max_tokens,
        ),
    )


def mean_loss(model: Any, batches: Iterable[MicroBatch]) -> float:
    """Mean cross entropy of this rank's micro batches and those of the others, as many on each; NaN without targets."""
    state = state_of(model)
    device = next(model.parameters()).device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    with evaluating(model):
        for batch in batches:
            totals[0] += passes.loss(model, to_device(batch, device))
            totals[1] += batch.targets
    if not state.plan.owns_loss:
        totals[0] = 0
    if not state.plan.is_first_of_row:
        totals[1] = 0
    loss, targets = all_reduce_sum(totals).tolist()
    return float(loss / targets) if targets else nan


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
