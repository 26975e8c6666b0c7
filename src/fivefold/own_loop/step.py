"""Steps, gradients, losses, logits and text of a parallelized model."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import UserError
from fivefold.data.batch import MicroBatch
from fivefold.generation import SEED, TEMPERATURE, TOP_K, TOP_P, check_options
from fivefold.generation.decode import decode, ready
from fivefold.generation.sampling import end_tokens, stop_texts
from fivefold.generation.text import StoppedText, encode_prompt
from fivefold.own_loop.batches import (
    READ_MORE,
    Batch,
    check_grad_enabled,
    leaves_inference_mode,
    micro_batches,
    refusal,
    some,
)
from fivefold.own_loop.model import ParallelModel, check_parallel, check_runs, check_spread, own_loss
from fivefold.own_loop.optimizer import check_optimizer
from fivefold.parallel import passes
from fivefold.parallel.loss.own import LossFunction
from fivefold.parallel.plain import check_alike, on_every_rank
from fivefold.training import step
from fivefold.training.inputs import evaluating, to_device
from fivefold.training.step import StepResult, all_reduce_sum, clip_, mean_loss, squared_norm


def train_step(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch | Sequence[Batch],
    *,
    max_grad_norm: float | None = None,
    learning_rate: float | None = None,
    loss: LossFunction | None = None,
) -> StepResult:
    """Take one optimizer step on a global batch, and clear the gradients afterwards.

    `batch`: this data rank's rows as `transformers` takes them, `input_ids` and `labels` [rows, tokens] (unshifted,
    -100 without a target), optionally `attention_mask` and `position_ids`; or a list of such dicts, the micro batches.
    Rows may have any length, ranks unequal numbers of rows, targets and micro batches. The loss is the sum of cross
    entropy over all targets of all data ranks and micro batches, divided by their number. `max_grad_norm` None: no
    clipping. `learning_rate` None: each parameter group keeps its own.

    `loss`: a function of your own in place of cross entropy, `loss(logits, labels, row)` -> the loss of each of T
    tokens. `logits` [T, vocabulary] are in fp32 (fp64), `labels` [T] are targets; `row` has `input_ids`, `position_ids`
    and, as `row["NAME"]`, further entries of the batch: numbers [rows, tokens], each at its label, or [rows].

    A step without targets, or with a non-finite loss or gradient, is skipped: `result.skipped`. Raises `UserError`.
    """
    check_runs(model)

    def ready_to_step() -> None:
        check_grad_enabled()
        check_optimizer(optimizer, model)
        if max_grad_norm is not None and not _is_number(max_grad_norm):
            raise UserError(
                f"max_grad_norm {max_grad_norm!r} is no norm", fix="a positive number, or None: no clipping"
            )
        if learning_rate is not None and not (_is_number(learning_rate) and math.isfinite(learning_rate)):
            raise UserError(f"learning_rate {learning_rate!r} is no rate", fix="a number, or None: the optimizer's own")
        if any(parameter.grad is not None for parameter in model.parameters()):
            raise refusal(
                "the model has gradients from before, and a step begins with none",
                fix="optimizer.zero_grad() first; or go on: ff.clip_grad_norm_(model, 1.0); optimizer.step()",
            )

    own = some(micro_batches(model, batch, also=ready_to_step, has_columns=loss is not None))
    result = step.train_step(
        model, optimizer, own, learning_rate=learning_rate, max_grad_norm=max_grad_norm or 0.0,
        loss=own_loss(model, loss, own),
    )  # fmt: skip
    model.zero_grad(set_to_none=True)  # also of parameters that the optimizer lacks
    return result


def gradients(model: ParallelModel, batch: Batch | Sequence[Batch], *, loss: LossFunction | None = None) -> Tensor:
    """Forward and backward of a global batch, in place of `loss.backward()`: gradients are summed over all ranks and
    added to existing ones. Returns the loss, nats per target, the same on every rank (fp64, no gradient).

    `batch` and `loss` as in `train_step`. Several calls add up, each divided by its own targets, as with
    `loss.backward()`; the micro batches of one step are better passed together, as a list. Raises `UserError`.
    """
    check_parallel(model)
    return model.backward(batch, loss=loss)


def clip_grad_norm_(model: ParallelModel, max_norm: float) -> Tensor:
    """Scale the gradients so that their norm over the whole model is at most `max_norm`. Returns the norm before that,
    the same on every rank (fp64). The equivalent of `torch.nn.utils.clip_grad_norm_`; `max_norm` inf: only the norm."""
    check_spread(model)
    if not (_is_number(max_norm) and max_norm > 0):
        raise UserError(f"max_norm {max_norm!r} is no norm to clip to", fix="a positive number")
    norm = all_reduce_sum(squared_norm(model)).sqrt()
    clip_(model, float(norm), max_norm)
    return norm


@leaves_inference_mode
def evaluate(model: ParallelModel, batches: Batch | Iterable[Batch], *, loss: LossFunction | None = None) -> float:
    """The mean cross entropy, nats per target, over all targets of these batches and those of the other ranks; or the
    mean of `loss`, as in `train_step`.

    `batches` as in `train_step`, of this data rank; ranks may have unequal numbers of them. NaN without targets. Raises
    `UserError` if no rank has a batch.
    """
    check_runs(model)
    each = iter([batches] if isinstance(batches, Mapping) else batches)

    def take() -> list[MicroBatch]:
        given = [batch for batch in [next(each, None)] if batch is not None]
        return micro_batches(model, given, has_columns=loss is not None)

    first = some(take())

    def read() -> Iterator[MicroBatch]:
        own = first
        while own:
            yield from own
            own = take()

    return mean_loss(model, read(), own_loss(model, loss, first))


@leaves_inference_mode
def logits(model: ParallelModel, batch: Batch) -> Tensor:
    """Logits [rows, tokens, vocabulary] of this data rank's rows, on each of its ranks, without gradients.

    `batch`: `input_ids`, optionally `position_ids` that restart at each document. Any length, any layout.
    """
    check_runs(model)

    def one_without_mask() -> None:
        if not isinstance(batch, Mapping):
            raise refusal(f"logits takes one micro batch, not a {type(batch).__name__}", fix="pass a dict of tensors")
        if batch.get("attention_mask") is not None:
            raise refusal(
                "logits takes no attention_mask", fix="leave it out: with padding at the end of a row, no token sees it"
            )

    own = micro_batches(model, batch, needs_labels=False, also=one_without_mask)
    inputs = to_device(own[0], next(model.parameters()).device)
    with evaluating(model):
        found = passes.logits(
            model, inputs.input_ids, inputs.position_ids, cu_seqlens=inputs.cu_seqlens, use_cache=False
        )
    rows, tokens = batch["input_ids"].shape
    return found[:rows, :tokens]


@leaves_inference_mode
def generate(
    model: ParallelModel,
    prompt: str | Tensor | Sequence[int],
    *,
    tokenizer: Any = None,
    max_new_tokens: int = 100,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    top_p: float = TOP_P,
    seed: int = SEED,
    eos_token_ids: Sequence[int] | None = None,
) -> str | list[int]:
    """Continue `prompt` with a parallelized model: text with a `tokenizer` of `transformers` (or `tokenizers`), or
    tokens, [tokens] or [1, tokens], which give tokens. Every rank passes the same, and gets the same. Tokens are drawn
    with `seed`; `temperature=0` always takes the likeliest. One of the `stop_strings` of `model.generation_config` ends
    the result; a text leaves it out."""
    check_runs(model)
    options: Any = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    options["seed"] = seed
    ends = end_tokens(model) if eos_token_ids is None else tuple(eos_token_ids)
    stop = stop_texts(model)

    def read() -> Tensor:
        if stop and tokenizer is None:
            raise refusal(
                f"model.generation_config.stop_strings is {list(stop)}, and there is no tokenizer to see them by",
                fix="ff.generate(model, prompt, tokenizer=tokenizer)",
            )
        ids = _prompt_ids(prompt, tokenizer, ends)
        vocabulary = model.fivefold.plan.facts.vocabulary
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise refusal(f"the prompt has tokens outside of the model's vocabulary of {vocabulary}")
        check_options(options, more=READ_MORE)
        return ids

    ids = on_every_rank(read)
    # Otherwise ranks would draw different tokens, or one would stop early and leave the others waiting.
    check_alike(
        lambda: {"the prompt": ids.tolist(), **options, "eos_token_ids": ends},
        fix="every rank passes the same: all compute it",
        more=READ_MORE,
    )
    tokens, pieces, stream = list[int](), list[str](), StoppedText(tokenizer, stop)
    with ready(model):
        for token in decode(model, ids, eos_token_ids=ends, **options):
            tokens.append(token)
            if stop and token not in ends:
                pieces.append(stream.push(token))
            if stream.is_over:
                break
    if not isinstance(prompt, str):
        return tokens
    if stop:
        return "".join([*pieces, stream.finish()])
    return str(tokenizer.decode([token for token in tokens if token not in ends]))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value >= 0


def _prompt_ids(prompt: str | Tensor | Sequence[int], tokenizer: Any, ends: tuple[int, ...]) -> Tensor:
    """The prompt as int64 [1, T]."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError("a text needs a tokenizer", fix="ff.generate(model, prompt, tokenizer=tokenizer)")
        return encode_prompt(tokenizer, prompt, ends)
    ids: Tensor = torch.as_tensor(prompt)
    ids = ids.unsqueeze(0) if ids.ndim == 1 else ids
    if not ids.numel():
        raise refusal("the prompt has no tokens", fix="pass one or more, such as the one that begins a text")
    if ids.ndim != 2 or len(ids) != 1 or ids.is_floating_point():
        raise refusal(
            f"the prompt is {ids.dtype} of shape {list(ids.shape)}",
            fix="pass the tokens of one text, int64 [tokens] or [1, tokens]; several one after the other",
        )
    return ids.long().cpu()
