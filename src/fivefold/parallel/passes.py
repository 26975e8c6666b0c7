"""Run micro batches through a parallelized model: to its loss, its gradients or its logits. Training, evaluation and
generation call this.

Every model runs in the stages of a pipeline. Without pipeline parallelism it has one stage, and sends nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.models.forwards import head_only
from fivefold.parallel.collectives import chunk_sizes
from fivefold.parallel.context.runtime import ContextParallel
from fivefold.parallel.fsdp import runtime as data
from fivefold.parallel.loss import runtime as losses
from fivefold.parallel.pipeline import runtime as pipeline
from fivefold.parallel.state import state_of
from fivefold.parallel.tensor import runtime as tensor


class LossInputs:
    """One micro batch on this rank's device. FSDP passes it on untouched, because it knows no such tensor container.

    `input_ids`, `labels` (already shifted, -100 without a target), `position_ids`: int64 [B, T]. `cu_seqlens`: int32 on
    the CPU, cumulative document bounds over B*T tokens, or None when every row is one document. `scale`: fp32 scalar,
    the factor of the summed loss. `row_tokens`: int64 [B], tokens of each row without padding (None: all). `weights`:
    fp64 [B, T], the factor of each target's cross entropy (None: 1). `answers`: int64 [B, T], the number of the answer
    that a target belongs to, below `of_answers`; -1 for none. `judge`: maps the summed log-probabilities of the
    answers, fp64 [of_answers], to the weights of their targets, fp64 [of_answers]; None: the sums are the result
    (`answer_log_probs`). `soft`: a teacher's distribution at every position. `top_k`: how many of the likeliest tokens
    are the result, of the first `vocabulary` (`top_log_probs`).
    """

    __slots__ = (
        "answers", "cu_seqlens", "input_ids", "judge", "labels", "of_answers", "position_ids", "row_tokens", "scale",
        "soft", "top_k", "vocabulary", "weights",
    )  # fmt: skip

    def __init__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        scale: Tensor | None = None,
        row_tokens: Tensor | None = None,
        weights: Tensor | None = None,
        answers: Tensor | None = None,
        of_answers: int = 0,
        judge: Callable[[Tensor], Tensor] | None = None,
        soft: losses.SoftTargets | None = None,
        top_k: int = 0,
        vocabulary: int = 0,
    ) -> None:
        self.input_ids, self.labels, self.position_ids = input_ids, labels, position_ids
        self.cu_seqlens, self.scale, self.weights = cu_seqlens, scale, weights
        self.answers, self.of_answers, self.judge = answers, of_answers, judge
        self.soft, self.top_k, self.vocabulary = soft, top_k, vocabulary
        if row_tokens is None:
            row_tokens = torch.full((len(input_ids),), input_ids.shape[1], device=input_ids.device)
        self.row_tokens = row_tokens


# ---- steps and micro batches -----------------------------------------------------------------------------------------


def backward(model: Any, batch: Sequence[LossInputs]) -> Tensor:
    """Run forward and backward of the micro batches of a step. Returns the sum of their losses, fp64: 0 on the ranks of
    a pipeline that do not compute it."""
    state = state_of(model)
    with state.guard.library():
        state.fp8_scales.begin_passes()
        return pipeline.run(model, state.pipeline, batch)


def gradients(model: Any, batch: Sequence[LossInputs], *, rows: int) -> Tensor:
    """Run `backward` and reduce the gradients. `rows`: of the global batch, for the balance of experts."""
    state = state_of(model)
    if not state.balance.is_begun:
        state.balance.begin_step(rows)
    with state.amax.recording():
        found = backward(model, batch)
    tensor.sum_partial_gradients(state.partial_gradients, state.mesh)
    return found


def loss(model: Any, inputs: LossInputs) -> Tensor:
    """Compute the summed loss of a micro batch, forward only: 0 on pipeline ranks that do not have it."""
    state = state_of(model)
    with state.guard.library():
        state.fp8_scales.begin_passes()
        found = pipeline.forward_only(
            state.pipeline, inputs.input_ids, lambda stage, hidden: model.run_stage(inputs, stage, hidden)
        )
    return torch.zeros((), dtype=torch.float64, device=inputs.input_ids.device) if found is None else found


def answer_log_probs(model: Any, inputs: LossInputs) -> Tensor:
    """Sum the log-probabilities of the trained targets of each of `inputs.of_answers` answers, fp64, without gradient:
    the same on all ranks that share the rows."""
    state = state_of(model)
    with torch.no_grad(), state.guard.library():
        state.fp8_scales.begin_passes()
        found = pipeline.forward_only(
            state.pipeline, inputs.input_ids, lambda stage, hidden: model.run_stage(inputs, stage, hidden)
        )
    shape = (inputs.of_answers,)
    return pipeline.broadcast_from_last_stage(state.pipeline, found, shape, torch.float64, inputs.input_ids.device)


def top_log_probs(model: Any, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Find the `inputs.top_k` likeliest next tokens of every position, int64 [B, T, K], and their log-probabilities,
    fp64, without gradient: the same on all ranks that share the rows."""
    state = state_of(model)
    with torch.no_grad(), state.guard.library():
        state.fp8_scales.begin_passes()
        found = pipeline.forward_only(
            state.pipeline, inputs.input_ids, lambda stage, hidden: model.run_stage(inputs, stage, hidden)
        )
    shape, device = (*inputs.input_ids.shape, inputs.top_k, 2), inputs.input_ids.device
    both = pipeline.broadcast_from_last_stage(state.pipeline, found, shape, torch.float64, device)
    return both[..., 0].long(), both[..., 1]


def logits(model: Any, ids_BT: Tensor, positions_BT: Tensor, *, logits_to_keep: int = 0, **options: Any) -> Tensor:
    """Compute logits [B, T or `logits_to_keep`, V] by the model's own forward, on every rank. `options` go to it."""
    state = state_of(model)
    inputs = {"input_ids": ids_BT, "position_ids": positions_BT, **options}
    with state.guard.library():
        state.fp8_scales.begin_passes()
        found = pipeline.forward_only(
            state.pipeline,
            ids_BT,
            lambda stage, hidden: model.stage_logits(stage, hidden, logits_to_keep=logits_to_keep, **inputs),
        )
    rows, length = ids_BT.shape
    vocabulary = state.placement.shards[state.plan.head_weight].shape[0]
    shape = (rows, logits_to_keep or length, vocabulary)
    dtype = data.master_dtype(state.plan.layout.precision)  # holds the logits of any forward
    return pipeline.broadcast_from_last_stage(state.pipeline, found, shape, dtype, ids_BT.device)


# ---- stages ----------------------------------------------------------------------------------------------------------


def run_stage(model: Any, inputs: LossInputs, stage: int, hidden: Tensor | None, *, loss_chunks: int | None) -> Tensor:
    """Run a stage on a micro batch: hidden states [B, T, D] in and out. The last stage returns the summed cross entropy
    of this rank's tokens, times `inputs.scale`, equal on all tp ranks. With `inputs.answers` and no judge it returns
    their log-probabilities; with `inputs.top_k`, the likeliest tokens."""
    staged = state_of(model).pipeline.staged
    with staged.running(stage, hidden) as given_out:
        out = _last_hidden(model, inputs)
        return _loss_of(model, out, inputs, loss_chunks) if staged.is_last(stage) else given_out()


def stage_logits(model: Any, stage: int, hidden: Tensor | None, *, logits_to_keep: int, **inputs: Any) -> Tensor:
    """Run a stage on `inputs` of the model's base: hidden states in and out; the last stage returns logits."""
    state = state_of(model)
    staged, anatomy = state.pipeline.staged, state.plan.anatomy
    with staged.running(stage, hidden) as given_out:
        out = model.get_submodule(anatomy.base)(**inputs)  # not by the whole model's forward, which may drop cu_seqlens
        if not staged.is_last(stage):
            return given_out()
        with head_only(model, anatomy) as logits_of:
            return logits_of(out.last_hidden_state[:, -logits_to_keep:])


def _last_hidden(model: Any, inputs: LossInputs) -> Tensor:
    """Run the base model on a micro batch."""
    state = state_of(model)
    state.balance.begin_micro_batch(inputs.row_tokens)
    base = model.get_submodule(state.plan.anatomy.base)
    out = base(
        input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, cu_seqlens=inputs.cu_seqlens
    )
    return cast(Tensor, out.last_hidden_state)


def _loss_of(model: Any, hidden: Tensor, inputs: LossInputs, loss_chunks: int | None) -> Tensor:
    """Compute the loss from the last hidden states."""
    state = state_of(model)
    anatomy, labels, hidden = state.plan.anatomy, state.context.cut(inputs.labels), state.tensor.enter(hidden)
    sizes = chunk_sizes(labels.numel(), state.plan.vocabulary, hidden.shape[-1], loss_chunks)
    head_parameters = losses.parameters_after_base(model, anatomy)
    with state.chunked_head(), head_only(model, anatomy) as logits_of:
        weights = None if inputs.weights is None else state.context.cut(inputs.weights)
        if inputs.answers is not None:
            answers = state.context.cut(inputs.answers)
            found = losses.target_log_probs(logits_of, hidden, labels, sizes, state.tensor, state.loss_kernels)
            sums = _of_answers(found, answers, inputs.of_answers, state.context.row_groups)
            if inputs.judge is None:
                return sums
            weights = _of_targets(inputs.judge(sums), answers)
        if inputs.top_k:
            tokens, values = losses.top_log_probs(
                logits_of, hidden, sizes, state.tensor, top_k=inputs.top_k, vocabulary=inputs.vocabulary
            )
            return _of_whole_rows(torch.stack([tokens.double(), values.double()], -1), state.context, inputs.input_ids)
        soft = None if inputs.soft is None else inputs.soft.cut(state.context.cut)
        return losses.chunked_loss(
            logits_of, hidden, labels, head_parameters, sizes, state.tensor, inputs.scale, weights, soft,
            state.loss_kernels,
        )  # fmt: skip


def _of_answers(found_N: Tensor, answers_BT: Tensor, number: int, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Sum over the targets of each answer, fp64 [number]; `groups` hold the rest of its tokens. The order is fixed,
    unlike that of `index_add` on a GPU: copies of a parameter must get the same gradient on every rank."""
    is_of = answers_BT.reshape(1, -1) == torch.arange(number, device=found_N.device).unsqueeze(-1)
    sums = torch.where(is_of, found_N.double(), 0.0).sum(-1)
    for group in groups:
        dist.all_reduce(sums, group=group)
    return sums


def _of_targets(weights_A: Tensor, answers_BT: Tensor) -> Tensor:
    """Weight of the answer of each target [B, T], 0 without one."""
    return torch.where(answers_BT >= 0, weights_A[answers_BT.clamp(min=0)], 0.0)


def _of_whole_rows(found_N: Tensor, context: ContextParallel, ids_BT: Tensor) -> Tensor:
    """Assemble [B, T, ...] from the results of each cp rank for its own tokens, [N, ...]."""
    here = context.cut(torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT))[0]
    whole = found_N.new_zeros(*ids_BT.shape, *found_N.shape[1:])
    whole[:, here] = found_N.view(len(ids_BT), -1, *found_N.shape[1:])
    for group in context.row_groups:
        dist.all_reduce(whole, group=group)
    return whole
