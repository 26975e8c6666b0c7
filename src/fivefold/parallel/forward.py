"""One micro batch through a parallelized model or one of its stages: to hidden states, logits, loss."""

from contextlib import ExitStack, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from fivefold.models.forwards import head_only
from fivefold.parallel import loss, pipeline
from fivefold.parallel.chunks import chunk_sizes
from fivefold.parallel.state import state_of


class LossInputs:
    """One micro batch on this rank's device. Not a tensor container that FSDP knows, so it is passed on untouched.

    `input_ids`, `labels` (already shifted, -100 without a target), `position_ids`: int64 [B, T]. `cu_seqlens`: int32 on
    the CPU, cumulative document bounds over B*T tokens, or None when every row is one document. `scale`: fp32
    scalar that the summed loss is multiplied by. `row_tokens`: int64 [B], tokens of each row that are no padding (None:
    all).
    """

    __slots__ = ("cu_seqlens", "input_ids", "labels", "position_ids", "row_tokens", "scale")

    def __init__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        scale: Tensor | None = None,
        row_tokens: Tensor | None = None,
    ) -> None:
        self.input_ids, self.labels, self.position_ids = input_ids, labels, position_ids
        self.cu_seqlens, self.scale = cu_seqlens, scale
        self.row_tokens = row_tokens if row_tokens is not None else torch.full((len(input_ids),), input_ids.shape[1])


def loss_sum(model: Any, inputs: LossInputs, *, loss_chunks: int | None) -> Tensor:
    """The summed cross entropy of this rank's tokens of a micro batch, times `inputs.scale`. Equal on all tp ranks."""
    return _loss_of(model, _last_hidden(model, inputs), inputs, loss_chunks)


def run_stage(model: Any, inputs: LossInputs, stage: int, hidden: Tensor | None, *, loss_chunks: int | None) -> Tensor:
    """A stage on a micro batch: hidden states [B, T, D] in and out; of the last stage, what `loss_sum` gives."""
    staged = cast(pipeline.Pipeline, state_of(model).pipeline).staged
    with staged.running(stage, hidden) as given_out:
        out = _last_hidden(model, inputs)
        return _loss_of(model, out, inputs, loss_chunks) if staged.is_last(stage) else given_out()


def stage_logits(model: Any, stage: int, hidden: Tensor | None, *, logits_to_keep: int, **inputs: Any) -> Tensor:
    """A stage on `inputs` of the model's forward: hidden states in and out; of the last stage, the logits."""
    state = state_of(model)
    staged = cast(pipeline.Pipeline, state.pipeline).staged
    with staged.running(stage, hidden) as given_out:
        if staged.is_last(stage):
            return cast(Tensor, type(model).forward(model, **inputs, logits_to_keep=logits_to_keep).logits)
        model.get_submodule(state.plan.anatomy.base)(**inputs)
        return given_out()


def _last_hidden(model: Any, inputs: LossInputs) -> Tensor:
    """What the base model gives for a micro batch."""
    state = state_of(model)
    if state.balance:
        state.balance.begin_micro_batch(inputs.row_tokens)
    base = model.get_submodule(state.plan.anatomy.base)
    out = base(
        input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, cu_seqlens=inputs.cu_seqlens
    )
    return cast(Tensor, out.last_hidden_state)


def _loss_of(model: Any, hidden: Tensor, inputs: LossInputs, loss_chunks: int | None) -> Tensor:
    """From the last hidden states to the loss."""
    state = state_of(model)
    fold = state.tensor
    labels = state.context.cut(inputs.labels) if state.context else inputs.labels
    if fold:
        hidden = fold.enter(hidden)
    sizes = chunk_sizes(labels.numel(), state.plan.vocabulary, hidden.shape[-1], loss_chunks)
    head_parameters = loss.parameters_after_base(model, state.plan.anatomy)
    with ExitStack() as stack:
        for each in (fold, state.context):
            stack.enter_context(each.chunked_head() if each else nullcontext())
        logits_of = stack.enter_context(head_only(model, state.plan.anatomy))
        return loss.chunked_loss(logits_of, hidden, labels, head_parameters, sizes, fold, inputs.scale)
