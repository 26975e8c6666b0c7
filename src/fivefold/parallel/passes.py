"""Run micro batches through a parallelized model: to its loss, its gradients or its logits.

Every model runs in the stages of a pipeline. Without pipeline parallelism it has one stage, and sends nothing.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fivefold.models.forwards import head_only
from fivefold.parallel.context.runtime import ContextParallel
from fivefold.parallel.dtypes import master_dtype
from fivefold.parallel.loss.runtime import Kernels, parameters_after_base
from fivefold.parallel.loss.tasks import AnswerLogProbs, Head, Task, TopLogProbs
from fivefold.parallel.pipeline.runtime import Pipeline, broadcast_from_last_stage, forward_only, run_pipeline
from fivefold.parallel.state import state_of
from fivefold.parallel.tensor.runtime import TensorParallel


class Inputs:
    """One micro batch on this rank's device, and the task of the head. FSDP passes it on untouched: it is no container
    of tensors that FSDP knows.

    `input_ids`, `position_ids`: int64 [B, T]. `cu_seqlens`: int32 on the CPU, cumulative document bounds over B*T
    tokens, or None when every row is one document. `row_tokens`: int64 [B], tokens of each row without padding (None:
    all). `places`: of the rows in the global batch (None: the first ones).
    """

    __slots__ = "cu_seqlens", "input_ids", "places", "position_ids", "row_tokens", "task"

    def __init__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        task: Task,
        *,
        cu_seqlens: Tensor | None = None,
        row_tokens: Tensor | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        self.places = range(len(input_ids)) if places is None else places
        self.input_ids, self.position_ids, self.task, self.cu_seqlens = input_ids, position_ids, task, cu_seqlens
        if row_tokens is None:
            row_tokens = torch.full((len(input_ids),), input_ids.shape[1], device=input_ids.device)
        self.row_tokens = row_tokens


# ---- steps and micro batches -----------------------------------------------------------------------------------------


def gradients(model: Any, batch: Sequence[Inputs], *, rows: int | None = None, drops: bool = True) -> Tensor:
    """Run forward and backward of the micro batches of a step; gradients end up reduced. Returns the sum of their
    losses, fp64: 0 on pipeline ranks that do not have it.

    `rows`: of the global batch, for the balance of experts (None: every data rank has as many as this one). `drops`:
    False for an objective on pairs, which compares two passes of the model, without dropout in either (as TRL's
    `disable_dropout` has it).
    """
    state = state_of(model)
    if rows is None:
        rows = state.plan.layout.data_ranks * sum(len(inputs.input_ids) for inputs in batch)
    dropping = nullcontext() if drops else state.deterministic()
    with state.in_gradients(rows), state.guard.library(), dropping:
        state.begin_passes()
        return run_pipeline(model, state.live(Pipeline), batch)


def loss(model: Any, inputs: Inputs) -> Tensor:
    """Compute the summed loss of a micro batch, forward only: 0 on pipeline ranks that do not have it."""
    found = _forward_only(model, inputs)
    return torch.zeros((), dtype=torch.float64, device=inputs.input_ids.device) if found is None else found


def answer_log_probs(model: Any, inputs: Inputs) -> Tensor:
    """Result of the task `AnswerLogProbs`: the same on all ranks that share the rows."""
    assert isinstance(inputs.task, AnswerLogProbs)
    return _everywhere(model, inputs, (inputs.task.count,))


def top_log_probs(model: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Result of `TopLogProbs`, int64 and fp64 [B, T, K]: the same on all ranks that share the rows."""
    assert isinstance(inputs.task, TopLogProbs)
    both = _everywhere(model, inputs, (*inputs.input_ids.shape, inputs.task.top_k, 2))
    return both[..., 0].long(), both[..., 1]


def _everywhere(model: Any, inputs: Inputs, shape: Sequence[int]) -> Tensor:
    """Result of a task, fp64 of `shape`, without gradient, on every rank of the pipeline."""
    with torch.no_grad():
        found = _forward_only(model, inputs)
    device = inputs.input_ids.device
    live = state_of(model).live(Pipeline)
    return broadcast_from_last_stage(live, found, tuple(shape), torch.float64, device)


def _forward_only(model: Any, inputs: Inputs) -> Tensor | None:
    state = state_of(model)
    with state.guard.library():
        state.begin_passes()
        return forward_only(
            state.live(Pipeline), inputs.input_ids, lambda stage, hidden: model.run_stage(inputs, stage, hidden)
        )


def logits(model: Any, ids_BT: Tensor, positions_BT: Tensor, *, logits_to_keep: int = 0, **options: Any) -> Tensor:
    """Compute logits [B, T or `logits_to_keep`, V] by the model's own forward, on every rank. `options` go to it."""
    state = state_of(model)
    inputs = {"input_ids": ids_BT, "position_ids": positions_BT, **options}
    with state.guard.library():
        state.begin_passes()
        found = forward_only(
            state.live(Pipeline),
            ids_BT,
            lambda stage, hidden: model.stage_logits(stage, hidden, logits_to_keep=logits_to_keep, **inputs),
        )
    rows, length = ids_BT.shape
    vocabulary = state.placement.shards[state.plan.head_weight].shape[0]
    shape = (rows, logits_to_keep or length, vocabulary)
    dtype = master_dtype(state.plan.layout.precision)  # holds the logits of any forward
    return broadcast_from_last_stage(state.live(Pipeline), found, shape, dtype, ids_BT.device)


# ---- stages ----------------------------------------------------------------------------------------------------------


def run_stage(model: Any, inputs: Inputs, stage: int, hidden: Tensor | None, *, loss_chunks: int | None) -> Tensor:
    """Run a stage: hidden states [B, T, D] in and out; from the last the task's result, equal on all tp ranks."""
    state = state_of(model)
    staged, anatomy = state.live(Pipeline).staged, state.plan.anatomy
    with staged.running(stage, hidden) as given_out:
        state.begin_inputs(inputs)
        base = model.get_submodule(anatomy.base)
        out = base(
            input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, cu_seqlens=inputs.cu_seqlens
        )
        if not staged.is_last(stage):
            return given_out()
        fold, parameters = state.live(TensorParallel), parameters_after_base(model, anatomy)
        entered = fold.enter(out.last_hidden_state)
        with state.chunked_head(), head_only(model, anatomy) as logits_of:
            context, kernels = state.live(ContextParallel), state.live(Kernels)
            head = Head(logits_of, entered, parameters, state.plan.vocabulary, loss_chunks, fold, context, kernels)
            return inputs.task(head)


def stage_logits(model: Any, stage: int, hidden: Tensor | None, *, logits_to_keep: int, **inputs: Any) -> Tensor:
    """Run a stage on `inputs` of the model's base: hidden states in and out; the last stage returns logits."""
    state = state_of(model)
    staged, anatomy = state.live(Pipeline).staged, state.plan.anatomy
    with staged.running(stage, hidden) as given_out:
        shape = inputs["input_ids"].shape
        state.begin_rows(shape, range(shape[0]), inputs.get("cu_seqlens"))
        out = model.get_submodule(anatomy.base)(**inputs)  # not by the whole model's forward, which may drop cu_seqlens
        if not staged.is_last(stage):
            return given_out()
        with head_only(model, anatomy) as logits_of:
            return logits_of(out.last_hidden_state[:, -logits_to_keep:])
