"""The functions of a loop of one's own: steps, gradients, losses, logits and text of a parallelized model; and both
model and optimizer on disk, and as whole tensors."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fivefold import checkpoint
from fivefold.checkpoint import Checkpoint, Metadata, find_checkpoint
from fivefold.checkpoint.cut import WEIGHT
from fivefold.checkpoint.live import export_live, gathered
from fivefold.checkpoint.load import restore
from fivefold.checkpoint.manifest import MANIFEST
from fivefold.checkpoint.save import standing
from fivefold.core.alike import digests
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
from fivefold.parallel import parts, passes, plain
from fivefold.parallel.loss.own import LossFunction
from fivefold.parallel.placement import Placement
from fivefold.parallel.plain import check_alike, on_every_rank
from fivefold.parallel.state import state_of
from fivefold.training import step
from fivefold.training.inputs import evaluating, to_device
from fivefold.training.optimizers.trial import IMPLEMENTATION
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


# ---- on disk, and as whole tensors -----------------------------------------------------------------------------------


def gather(model: ParallelModel, *, gradients: bool = False) -> dict[str, Tensor]:
    """Every parameter by its Hugging Face name, whole, on the CPU of every rank; or its gradient, zeros without one.
    For a model with an adapter, the parameters of the adapter."""
    check_spread(model)
    return gathered(model, gradients=gradients)


def scatter(model: ParallelModel, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts of whole tensors, by the name of a parameter each: the inverse of `gather`.

    A part is computed with place by place, beside the parameter of its name or its gradient. Example, a mask that keeps
    the first 200 rows: `p.grad.mul_(ff.scatter(model, {name: mask})[name])`. Every rank gives the same values, of any
    type. Names of another pipeline rank are left out. Raises `UserError` for a name that no parameter has, or a shape
    that is not its own.
    """
    check_spread(model)
    placement, named = state_of(model).placement, dict(model.named_parameters())
    for name, whole in values.items():
        if (spec := placement.shards.get(name)) is None or tuple(whole.shape) != spec.shape:
            is_known = f"{name} has the shape {list(whole.shape)}, and the parameter {list(spec.shape)}" if spec else ""
            raise UserError(is_known or f"no parameter is called {name}", fix="names and shapes as ff.gather has them")
    return {name: _part(placement, name, named[name], values[name]) for name in values if name in named}


def _part(placement: Placement, name: str, parameter: Tensor, whole: Tensor) -> Tensor:
    own = torch.empty(placement.local_shape(name), dtype=whole.dtype, device=parameter.device)
    for global_region, local_region in placement.regions(name):
        own[local_region] = whole[global_region].to(own.device)
    return parts.part_like(parameter, own)


def save(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    *,
    state: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Save weights, optimizer state and the options of its parameter groups as the folder `path`, loadable under any
    layout. The folder appears once all of it is written and read back.

    `state`: any JSON value (a step, a scheduler's `state_dict()`), returned by `load`. `overwrite`: replace a
    checkpoint of that name, which `load` finds until the new one is there. Raises `UserError`, and `RunFailed` if it
    cannot be written.
    """
    check_parallel(model)

    def check() -> dict[str, Any]:
        if optimizer is not None:
            check_optimizer(optimizer, model)
        try:
            kept = json.loads(json.dumps(dict(state or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"state is not JSON: {error}", fix="numbers, texts, lists and dicts of them") from error
        return {"state": kept}

    about = on_every_rank(check)
    if optimizer is not None:
        about["optimizer"] = _described(model, optimizer)
    at = about["state"].get("step")
    count = at if isinstance(at, int) and at >= 0 else 0
    checkpoint.save(model, optimizer, Path(path), Metadata(step=count, state=about), overwrite=overwrite)
    return Path(path)


@leaves_inference_mode
def load(model: ParallelModel, optimizer: torch.optim.Optimizer | None, path: str | Path) -> dict[str, Any]:
    """Load the result of `save` at `path`, or the newest checkpoint of a run folder, under any layout. Returns the
    `state` given to `save`.

    The optimizer must be of the same class with the same parameters in the same groups; their options (rates, decay,
    betas) are replaced by the saved ones. Raises `UserError`, before anything changes, if that does not fit.
    """
    check_parallel(model)
    folder = standing(Path(path))

    def check() -> Checkpoint:
        opened = Checkpoint.described(folder) if (folder / MANIFEST).exists() else find_checkpoint(folder)
        if optimizer is not None:
            check_optimizer(optimizer, model)
            _check_fits(model, optimizer, opened)
        return opened

    opened = on_every_rank(check)
    check_alike(lambda: digests(opened.path, [opened.path / MANIFEST]), more=READ_MORE)
    saved = opened.state.get("optimizer") or {}
    restore(model, optimizer, opened, types=saved.get("types"))  # `types`: of earlier versions
    if optimizer is not None:
        for group, was in zip(optimizer.param_groups, saved.get("groups", ()), strict=False):
            for key, value in was["options"].items():
                if key not in IMPLEMENTATION:  # the implementation stays that of this optimizer
                    group[key] = _like(group.get(key), value)
    return dict(opened.state.get("state", opened.state))


def _described(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The class of an optimizer, and the options and parameter names (of all ranks) of each group."""
    own = [{"options": _options(group), "parameters": names} for group, names in _groups(model, optimizer)]
    everyone = plain.everywhere(own)
    groups = [
        {**group, "parameters": sorted({name for ranks in everyone for name in ranks[at]["parameters"]})}
        for at, group in enumerate(everyone[0])
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], list[str]]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(group, [names[id(parameter)] for parameter in group["params"]]) for group in optimizer.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that JSON supports; a tensor of one number as that number."""
    found = {}
    for key, value in group.items():
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        is_plain = value is None or isinstance(value, bool | int | str | list | tuple)
        if key not in ("params", "param_names") and (is_plain or (isinstance(value, float) and math.isfinite(value))):
            found[key] = value
    return found


def _like(now: Any, saved: Any) -> Any:
    """A saved option in the type of the current one: a tuple, a tensor."""
    if isinstance(now, tuple) and isinstance(saved, list):
        return tuple(saved)
    return torch.full_like(now, saved) if isinstance(now, Tensor) else saved


def _check_fits(model: nn.Module, optimizer: torch.optim.Optimizer, opened: Checkpoint) -> None:
    saved = opened.state.get("optimizer")
    if not saved and set(opened.kinds) <= {WEIGHT} and not opened.manifest.scalars:
        raise refusal(
            f"{opened.path} was saved without an optimizer: this one would begin anew",
            fix="load the weights alone: ff.load(model, None, path)",
        )
    if not saved:
        return
    if saved["class"] != type(optimizer).__name__:
        raise refusal(
            f"{opened.path} was saved with {saved['class']}, and this optimizer is {type(optimizer).__name__}",
            fix="build the optimizer that it was saved with, or load the weights alone: ff.load(model, None, path)",
        )
    groups = _groups(model, optimizer)
    if len(groups) != len(saved["groups"]):
        raise refusal(
            f"{opened.path} has {len(saved['groups'])} parameter groups, and the optimizer {len(groups)}",
            fix="build the optimizer with the groups that it was saved with",
        )
    for at, ((_, names), was) in enumerate(zip(groups, saved["groups"], strict=True)):
        here = {name for name, _ in model.named_parameters()}
        if different := sorted(set(names) ^ (set(was["parameters"]) & here)):
            raise refusal(
                f"{different[0]} is {'' if different[0] in names else 'not '}in parameter group {at}, and "
                f"{'was not' if different[0] in names else 'was'} when {opened.path} was saved",
                fix="build the optimizer with the groups that it was saved with",
            )


def export(model: ParallelModel, path: str | Path, *, dtype: str | None = None, force: bool = False) -> Path:
    """Write the whole model as the Hugging Face folder `path`, or its adapter as one of `peft`. Every rank calls this,
    and the first one writes.

    `dtype`: fp32, bf16, fp16 or fp64; None: the original type of the model if that has 16 bits, else the type it is
    trained in. `force` replaces an existing model folder.
    """
    check_parallel(model)
    export_live(model, Path(path), dtype=dtype, given=model.given_dtype, adapter=model.adapter, force=force)
    return Path(path)
