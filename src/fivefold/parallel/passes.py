"""Micro batches through the model, with a pipeline or without: what training, evaluation and generation call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.parallel import data, pipeline, tensor
from fivefold.parallel.forward import LossInputs
from fivefold.parallel.state import ParallelState, state_of


def backward(model: Any, batch: Sequence[LossInputs]) -> Tensor:
    """Forward and backward of the micro batches of a step. Returns the sum of their losses, fp64: with a pipeline, 0
    on the ranks that do not compute it."""
    state = state_of(model)
    with state.guard.library():
        return pipeline.run(model, state.pipeline, batch) if state.pipeline else _one_by_one(model, state, batch)


def gradients(model: Any, batch: Sequence[LossInputs], *, rows: int) -> Tensor:
    """`backward`, with gradients reduced. `rows`: of the global batch, for what balances experts."""
    state = state_of(model)
    if state.balance and not state.balance.is_begun:
        state.balance.begin_step(rows)
    loss = backward(model, batch)
    if state.tensor:
        tensor.sum_partial_gradients(model, state.tensor, state.mesh.kv_replicas)
    return loss


def _one_by_one(model: Any, state: ParallelState, batch: Sequence[LossInputs]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for index, inputs in enumerate(batch):
        data.prepare_micro_batch(model, state.plan.layout, last=index == len(batch) - 1)
        part = model.loss_sum(inputs)
        part.backward()
        total += part.detach()
    return total


def loss(model: Any, inputs: LossInputs) -> Tensor:
    """The summed loss of a micro batch, forward only: with a pipeline, 0 on the ranks that do not compute it."""
    state = state_of(model)
    with state.guard.library():
        if state.pipeline is None:
            return model.loss_sum(inputs)  # type: ignore[no-any-return]
        found = pipeline.forward_only(
            state.pipeline, inputs.input_ids, lambda stage, hidden: model.run_stage(inputs, stage, hidden)
        )
    return torch.zeros((), dtype=torch.float64, device=inputs.input_ids.device) if found is None else found


def logits(model: Any, ids_BT: Tensor, positions_BT: Tensor, *, logits_to_keep: int = 0, **options: Any) -> Tensor:
    """Logits [B, T or `logits_to_keep`, V] of the model's own forward, on every rank. `options` go to it."""
    state = state_of(model)
    inputs = {"input_ids": ids_BT, "position_ids": positions_BT, **options}
    with state.guard.library():
        if state.pipeline is None:
            return model(**inputs, logits_to_keep=logits_to_keep).logits  # type: ignore[no-any-return]
        found = pipeline.forward_only(
            state.pipeline,
            ids_BT,
            lambda stage, hidden: model.stage_logits(stage, hidden, logits_to_keep=logits_to_keep, **inputs),
        )
    rows, length = ids_BT.shape
    vocabulary = state.plan.shards[state.plan.head_weight].shape[0]
    shape = (rows, logits_to_keep or length, vocabulary)
    dtype = data.master_dtype(state.plan.layout.precision)  # holds what any forward gives
    return pipeline.broadcast_from_last_stage(state.pipeline, found, shape, dtype, ids_BT.device)
