"""A training loop of one's own over a parallelized model: what `import fivefold as ff` offers beside the commands.

Every function is called by every rank of the world, with the rows of its data rank. What the trainer does runs here
too: the same step, the same passes, the same checkpoints. What would be wrong is refused with the line to write
(docs/python.md).
"""

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from fivefold.checkpoint import Checkpoint, Metadata, find_checkpoint
from fivefold.checkpoint.live import export_live, gathered
from fivefold.checkpoint.load import restore, scalar_types
from fivefold.checkpoint.manifest import NAME as MANIFEST
from fivefold.checkpoint.manifest import WEIGHT
from fivefold.checkpoint.save import on_first_rank, save_as, standing
from fivefold.core.errors import UserError
from fivefold.core.layout import Layout
from fivefold.data.batch import MicroBatch
from fivefold.generation import SEED, TEMPERATURE, TOP_K
from fivefold.generation.decode import decode, ready
from fivefold.launch.world import open_world
from fivefold.models.sources import TensorSource
from fivefold.parallel import apply, guard, passes, plain
from fivefold.parallel.balance import BalanceOptions, configure
from fivefold.parallel.data import put_in_order, reshard
from fivefold.parallel.state import ParallelState, state_of
from fivefold.torch_internals import fsdp_settle_root
from fivefold.training.batches import Batch, differing, micro_batches, on_every_rank
from fivefold.training.evaluate import evaluating, mean_loss
from fivefold.training.model import own_coefficient
from fivefold.training.optimizer import all_reduce_sum, clip_, squared_norm
from fivefold.training.own_optimizer import check_optimizer, watch_optimizers
from fivefold.training.step import StepResult, accumulate, to_device
from fivefold.training.step import train_step as step

READ_MORE = "docs/python.md"
Precision = Literal["fp32", "bf16", "fp64"]
_PRECISIONS: Mapping[torch.dtype, Precision] = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "bf16",
}  # fmt: skip


# ---- the model -------------------------------------------------------------------------------------------------------


class ParallelModel(nn.Module):
    """A `transformers` causal language model that `ff.parallelize` has state: the same object, of its own class too.

    Its parameters have the names of the Hugging Face model; a rank holds its part of them, and `.grad` is that part's.
    A forward without gradients gives logits (not under a pipeline: `ff.logits`).
    """

    config: Any
    fivefold: ParallelState
    given_dtype: torch.dtype  # of the parameters, before

    @property
    def layout(self) -> Layout:
        """How the model lies over the world."""
        return self.fivefold.plan.layout

    @property
    def data_rank(self) -> int:
        """Which of the `data_ranks` shares of the data this rank reads: `rank` of a `DistributedSampler`."""
        return self.fivefold.plan.data_rank

    @property
    def data_ranks(self) -> int:
        """How many ranks read different rows: `num_replicas` of a `DistributedSampler`."""
        return self.fivefold.plan.layout.data_ranks

    def backward(self, batch: Batch | Sequence[Batch]) -> Tensor:
        """`ff.gradients(model, batch)`."""
        return gradients(self, batch)

    def save_pretrained(self, save_directory: str | Path, *, dtype: str | None = None, **options: Any) -> None:
        """Write the whole model as a Hugging Face folder, as `transformers` does: files of the same names are replaced,
        others stay. Every rank calls this, and the first one writes. `dtype`: see `ff.export`."""
        if unknown := [key for key in options if key not in ("safe_serialization", "is_main_process")]:
            raise _refused(
                f"save_pretrained({unknown[0]}=...)", "model.save_pretrained(path), or ff.export(model, path)"
            )
        export_live(self, Path(save_directory), dtype=dtype, given=self.given_dtype, into=True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a rank has only parts, in shapes that look whole."""
        raise _refused(
            "state_dict()",
            "ff.save(model, optimizer, path) to go on from, ff.export(model, path) for transformers, or "
            "ff.gather(model) for whole tensors in memory",
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as `state_dict`."""
        raise _refused(
            "load_state_dict()", "ff.load(model, optimizer, path), or load the weights before ff.parallelize"
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parts, even after a call that raised with whole parameters in their places."""
        if not (self.fivefold.guard.is_library or self.fivefold.guard.is_called):
            put_in_order(self)
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Of the whole model; of those of other pipeline ranks all count as trainable."""
        if exclude_embeddings:
            raise _refused("num_parameters(exclude_embeddings=True)", "model.num_parameters()")
        frozen = {name for name, p in self.named_parameters() if only_trainable and not p.requires_grad}
        return sum(math.prod(spec.shape) for name, spec in self.fivefold.plan.shards.items() if name not in frozen)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """That of `transformers`, on one process; refused on several ranks, which have parts of layers and of rows."""
        if self.layout.world > 1:
            raise _refused("model.generate()", "ff.generate(model, prompt, tokenizer=tokenizer) on every rank")
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: recompute belongs to the layout."""
        raise _refused("gradient_checkpointing_enable()", f'ff.parallelize(model, "{self.layout}+full")')

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise _refused("resize_token_embeddings()", "model.resize_token_embeddings(n) before ff.parallelize")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused: what pickles a model has the parts of one rank."""
        raise _refused("pickling", "ff.save(model, optimizer, path), or ff.export(model, path)")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refused: torch has no copies of what FSDP keeps."""
        raise _refused(
            "copying",
            "[p.detach().clone() for p in model.parameters()] for averages of the weights, or ff.gather(model)",
        )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise _refused("push_to_hub()", "model.save_pretrained(path), and push the folder")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves and casts (`.to`, `.half`, `.cuda`): those that change nothing pass."""
        like = next(self.parameters()).detach()
        found = fn(torch.empty(0, dtype=like.dtype, device=like.device))
        if (found.dtype, found.device) != (like.dtype, like.device):
            raise _refused(
                f"moving or casting to {found.device}, {found.dtype}",
                "ff.parallelize(model, layout, device=..., precision=...) says both",
            )
        return self


def _refused(what: str, fix: str) -> UserError:
    return UserError(f"{what} of a parallelized model is refused", fix=fix, more=READ_MORE)


def parallelize(
    model: nn.Module,
    layout: Layout | str,
    *,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
    source: TensorSource | None = None,
    seed: int = 1234,
    reduce: str = "fp32",
    loss_chunks: int | None = None,
    compile_blocks: bool = False,
) -> ParallelModel:
    """ParallelState a `transformers` causal language model over the current world; the same model, changed in place.

    `layout`: a `Layout` or its text. `precision`: what it computes in (parameters and optimizer state stay in fp32, or
    in fp64); None: what the layout names, `+fp32` or `+fp64`, else the type that the model's parameters have (bf16 for
    fp16). Values come from `source`; without one, from the model itself, or, for a model on the meta device, from
    random initialisation by the model's own recipe with `seed`. Without a process group, the world in the environment
    (torchrun, srun) is joined, or one of this process alone.

    Build the optimizer after this. Raises `UserError` when the layout does not fit the world or the model.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    if not isinstance(layout, Layout):
        raise UserError(f"the layout is a {type(layout).__name__}", fix='pass a Layout, or its text: "shard2.tp2"')
    given = _check_model(model)
    before = list(model.parameters())
    layout = _with_precision(layout, precision, given)
    settings: Any = model.config
    load = own_coefficient(settings.get_text_config())
    open_world()
    _check_same_everywhere(model, values=source is None)
    apply.parallelize(
        model, layout, device=device, source=source, seed=seed, reduce=reduce, loss_chunks=loss_chunks,
        compile_blocks=compile_blocks,
    )  # fmt: skip
    state = state_of(model)
    if load and state.balance is None:
        raise UserError(
            f"{state.plan.anatomy.model_class} asks for a loss of uneven experts, and has no routers that give logits",
            fix="model.config.output_router_logits = False before ff.parallelize",
            more=READ_MORE,
        )
    if load:
        configure(model, state.balance, BalanceOptions(load=load), state.plan.buffers)
    anatomy = state.plan.anatomy
    parts = [anatomy.embedding, *anatomy.layers, anatomy.head]
    guard.install(
        model, state.guard, base=anatomy.base, parts=parts, pipelined=state.pipeline is not None,
        splits_tokens=state.tensor is not None and state.tensor.sequence_parallel,
        reshard=lambda: reshard(model),
    )  # fmt: skip
    fsdp_settle_root(model)
    watch_optimizers(model, state.plan.layout, before)
    model.__class__ = type(f"Parallel{anatomy.model_class}", (ParallelModel, type(model)), {})
    assert isinstance(model, ParallelModel)
    model.given_dtype = given
    return model


def _check_model(model: nn.Module) -> torch.dtype:
    """The type of its parameters. Raises `UserError` for what is no model to parallelize."""
    if isinstance(model, ParallelModel):
        raise UserError("this model is parallelized already", fix="build another one", more=READ_MORE)
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"a {type(model).__name__} cannot be parallelized: it is no model class of transformers",
            fix="pass the causal language model itself, from AutoModelForCausalLM, with no wrapper around it",
            more=READ_MORE,
        )
    if odd := [name for name, p in model.named_parameters() if p.dtype not in _PRECISIONS]:
        raise UserError(
            f"{odd[0]} is {dict(model.named_parameters())[odd[0]].dtype}: quantised weights cannot be trained",
            fix="load the model without quantization_config",
            more=READ_MORE,
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise UserError(
            "gradient checkpointing is on in the model",
            fix="leave it off, and let the layout recompute: +full at the end of its text",
            more=READ_MORE,
        )
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _check_same_everywhere(model: nn.Module, *, values: bool) -> None:
    """Raise `UserError` where ranks built different models: each keeps its part of its own, and copies would drift
    apart. `values`: whether those of the tensors are compared too."""
    if dist.get_world_size() == 1:
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kinds = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors.items()]
    if differing([zlib.crc32(repr(kinds).encode())]):
        raise UserError(
            "ranks were given different models: names, shapes, types or what is frozen",
            fix="build the same model on every rank",
            more=READ_MORE,
        )
    names = [name for name, t in tensors.items() if values and not t.is_meta]
    if different := differing([_bits_sum(tensors[name]) for name in names]):
        raise UserError(
            f"ranks were given different weights: {names[different[0]]} (and {len(different) - 1} others)",
            fix="the same on every rank: torch.manual_seed(1) before the model is made, or from_pretrained",
            more=READ_MORE,
        )


def _bits_sum(tensor: Tensor) -> int:
    """Of the elements, read as integers: a checksum in one pass and without a copy."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize, torch.uint8)
    return int(tensor.detach().view(bits).sum(dtype=torch.int64)) % 2**62


def _with_precision(layout: Layout, precision: Precision | None, given: torch.dtype) -> Layout:
    """`layout` with what the model computes in. In a `Layout`, bf16 is what stands where nothing was named."""
    default = Layout().precision
    if precision and layout.precision not in (default, precision):
        raise UserError(f"the layout {layout} names a precision, and precision={precision!r} another", fix="name one")
    if layout.precision == default:
        layout = replace(layout, precision=precision or _PRECISIONS[given])
    return layout


# ---- a step ----------------------------------------------------------------------------------------------------------


def train_step(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch | Sequence[Batch],
    *,
    max_grad_norm: float | None = None,
    learning_rate: float | None = None,
) -> StepResult:
    """One optimizer step on a global batch; the gradients are gone afterwards.

    `batch`: this data rank's rows as `transformers` takes them, `input_ids` and `labels` [rows, tokens] (unshifted,
    -100 without a target), optionally `attention_mask` and `position_ids`; or a list of such dicts, the micro batches.
    Rows may have any length, ranks unequal numbers of rows, targets and micro batches. The loss is the sum of cross
    entropy over all targets, divided by their number: of all data ranks and micro batches. `max_grad_norm` None: no
    clipping. `learning_rate` None: each parameter group keeps its own.

    A step without targets, or whose loss or gradient is not finite, is skipped: `result.skipped`. Raises `UserError`.
    """
    _check_parallel(model)

    def ready_to_step() -> None:
        _check_grad_enabled()
        check_optimizer(optimizer, model)
        if max_grad_norm is not None and not _is_number(max_grad_norm):
            raise UserError(
                f"max_grad_norm {max_grad_norm!r} is no norm", fix="a positive number, or None: no clipping"
            )
        if learning_rate is not None and not (_is_number(learning_rate) and math.isfinite(learning_rate)):
            raise UserError(f"learning_rate {learning_rate!r} is no rate", fix="a number, or None: the optimizer's own")
        if any(parameter.grad is not None for parameter in model.parameters()):
            raise UserError(
                "the model has gradients from before, and a step begins with none",
                fix="optimizer.zero_grad() first; or go on: ff.clip_grad_norm_(model, 1.0); optimizer.step()",
                more=READ_MORE,
            )

    own = _some(micro_batches(model, batch, also=ready_to_step))
    result = step(model, optimizer, own, learning_rate=learning_rate, max_grad_norm=max_grad_norm or 0.0)
    model.zero_grad(set_to_none=True)  # those that the optimizer does not have, too
    return result


def gradients(model: ParallelModel, batch: Batch | Sequence[Batch]) -> Tensor:
    """Forward and backward of a global batch, in place of `loss.backward()`: gradients are summed over all ranks and
    added to those that are there. Returns the loss, nats per target, the same on every rank (fp64, no gradient).

    `batch` as in `train_step`. Several calls add up, each divided by its own targets, as `loss.backward()` would; the
    micro batches of one step are better passed together, as a list. Raises `UserError`.
    """
    _check_parallel(model)
    loss = accumulate(model, _some(micro_batches(model, batch, also=_check_grad_enabled)))
    if _has_parts(model.fivefold):
        guard.mark_gradients(model)
    return loss


def clip_grad_norm_(model: ParallelModel, max_norm: float) -> Tensor:
    """Scale the gradients so that their norm over the whole model is at most `max_norm`; the norm before that, the same
    on every rank (fp64). What `torch.nn.utils.clip_grad_norm_` does in one process; `max_norm` inf: only the norm."""
    _check_parallel(model)
    if not (_is_number(max_norm) and max_norm > 0):
        raise UserError(f"max_norm {max_norm!r} is no norm to clip to", fix="a positive number")
    norm = all_reduce_sum(squared_norm(model)).sqrt()
    clip_(model, float(norm), max_norm)
    return norm


def evaluate(model: ParallelModel, batches: Batch | Iterable[Batch]) -> float:
    """The mean cross entropy, nats per target, of all targets of these batches and those of the other ranks.

    `batches` as in `train_step`, of this data rank; ranks may have unequal numbers of them. NaN without targets.
    """
    _check_parallel(model)
    each = iter([batches] if isinstance(batches, Mapping) else batches)

    def read() -> Iterator[MicroBatch]:
        while own := micro_batches(model, [batch for batch in [next(each, None)] if batch is not None]):
            yield from own

    return mean_loss(model, read())


def logits(model: ParallelModel, batch: Batch) -> Tensor:
    """Logits [rows, tokens, vocabulary] of this data rank's rows, on each of its ranks, without gradients.

    `batch`: `input_ids`, optionally `position_ids` that restart where a document begins. Any length, any layout.
    """
    _check_parallel(model)

    def no_mask() -> None:
        if batch.get("attention_mask") is not None:
            raise UserError(
                "logits takes no attention_mask",
                fix="leave it out: with padding at the end of a row, no token sees it",
                more=READ_MORE,
            )

    own = micro_batches(model, batch, needs_labels=False, also=no_mask)
    inputs = to_device(own[0], next(model.parameters()).device)
    with evaluating(model):
        found = passes.logits(
            model, inputs.input_ids, inputs.position_ids, cu_seqlens=inputs.cu_seqlens, use_cache=False
        )
    rows, tokens = batch["input_ids"].shape
    return found[:rows, :tokens]


def gather(model: ParallelModel, *, gradients: bool = False) -> dict[str, Tensor]:
    """Every parameter by its Hugging Face name, whole, on the CPU of every rank; or its gradient, zeros without one."""
    _check_parallel(model)
    return gathered(model, gradients=gradients)


def _check_grad_enabled() -> None:
    if not torch.is_grad_enabled():
        raise UserError(
            "gradients are off here: torch.no_grad()",
            fix="train outside of it; ff.evaluate(model, batches) gives a loss alone",
            more=READ_MORE,
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value >= 0


def _check_parallel(model: Any) -> None:
    if not isinstance(model, ParallelModel):
        raise UserError(
            f"a {type(model).__name__} is not a model that ff.parallelize returned",
            fix="model = ff.parallelize(model, layout), and nothing wrapped around it",
            more=READ_MORE,
        )
    put_in_order(model)


def _some(batch: list[MicroBatch]) -> list[MicroBatch]:
    if not batch:
        raise UserError("no rank has a micro batch", fix="pass a dict of tensors, or a list of some", more=READ_MORE)
    return batch


def _has_parts(state: ParallelState) -> bool:
    """Whether gradients have parts on other ranks that their own mesh does not know of."""
    return state.plan.layout.tp > 1 or state.plan.layout.pp > 1 or state.mesh.experts is not state.mesh.fsdp


# ---- text ------------------------------------------------------------------------------------------------------------


def generate(
    model: ParallelModel,
    prompt: str | Tensor | Sequence[int],
    *,
    tokenizer: Any = None,
    max_new_tokens: int = 100,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    seed: int = SEED,
    eos_token_ids: Sequence[int] | None = None,
) -> str | list[int]:
    """Continue `prompt` with a parallelized model: text with a `tokenizer` of `transformers` (or `tokenizers`), or
    tokens, [tokens] or [1, tokens], of which come tokens. Every rank passes the same, and gets the same."""
    _check_parallel(model)
    ends = _end_tokens(model) if eos_token_ids is None else tuple(eos_token_ids)

    def read() -> Tensor:
        ids = _prompt_ids(prompt, tokenizer, ends)
        vocabulary = model.fivefold.plan.shards[f"{model.fivefold.plan.anatomy.embedding}.weight"].shape[0]
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise UserError(f"the prompt has tokens outside of the model's vocabulary of {vocabulary}", more=READ_MORE)
        for name, value, least in (
            ("max_new_tokens", max_new_tokens, 1), ("temperature", temperature, 0), ("top_k", top_k, 0),
        ):  # fmt: skip
            if not value >= least:
                raise UserError(f"{name} {value} is less than {least}", fix=f"{least} or more")
        return ids

    ids = on_every_rank(read)
    first = on_first_rank(lambda: ids.tolist())
    on_every_rank(lambda: _same_prompt(first, ids))
    options: Any = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k or None, "seed": seed}
    with ready(model):
        tokens = list(decode(model, ids, eos_token_ids=ends, **options))
    if not isinstance(prompt, str):
        return tokens
    return str(tokenizer.decode([token for token in tokens if token not in ends]))


def _prompt_ids(prompt: str | Tensor | Sequence[int], tokenizer: Any, ends: tuple[int, ...]) -> Tensor:
    """int64 [1, T]."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError("a text needs a tokenizer", fix="ff.generate(model, prompt, tokenizer=tokenizer)")
        from fivefold.generation.text import encode_prompt

        if hasattr(tokenizer, "apply_chat_template"):  # of transformers; encode_prompt takes one of tokenizers
            tokens = list(tokenizer(prompt)["input_ids"])
            while tokens and tokens[-1] in ends:
                tokens.pop()
            tokens = tokens or list(ends)[:1]
            if not tokens:
                raise UserError("the prompt is empty", fix="write a few words to continue")
            return torch.tensor([tokens], dtype=torch.int64)
        return encode_prompt(tokenizer, prompt, ends)
    ids: Tensor = torch.as_tensor(prompt)
    ids = ids.unsqueeze(0) if ids.ndim == 1 else ids
    if ids.ndim != 2 or len(ids) != 1 or not ids.numel() or ids.is_floating_point():
        raise UserError(
            f"the prompt is {ids.dtype} of shape {list(ids.shape)}",
            fix="pass the tokens of one text, int64 [tokens] or [1, tokens]; several one after the other",
            more=READ_MORE,
        )
    return ids.long().cpu()


def _same_prompt(first: list[list[int]], ids: Tensor) -> None:
    if ids.tolist() != first:
        raise UserError(
            "ranks were given different prompts", fix="every rank passes the same one: all compute it", more=READ_MORE
        )


def _end_tokens(model: Any) -> tuple[int, ...]:
    """Tokens that end a text for this model."""
    for settings in (getattr(model, "generation_config", None), model.config):
        found = getattr(settings, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


# ---- state -----------------------------------------------------------------------------------------------------------

# How an optimizer computes, not what: those of the one that is loaded into stay.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def save(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    *,
    state: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Save weights, optimizer state and the options of its parameter groups as the folder `path`, to be loaded under
    any layout. It appears when all of it is written and read back.

    `state`: anything that JSON holds (a step, a scheduler's `state_dict()`), which `load` returns. `overwrite`: replace
    a checkpoint of that name, which `load` finds until the new one is there. Raises `UserError`, and `RunFailed` when
    it cannot be written.
    """
    _check_parallel(model)

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
    save_as(model, optimizer, Path(path), Metadata(step=count, state=about), overwrite=overwrite)
    return Path(path)


def load(model: ParallelModel, optimizer: torch.optim.Optimizer | None, path: str | Path) -> dict[str, Any]:
    """Load what `save` has saved at `path`, or the newest checkpoint of a run folder, under whatever layout. Returns
    the `state` that was given to `save`.

    The optimizer is one of the same class with the same parameters in the same groups; their options (rates, decay,
    betas) become those that were saved. Raises `UserError`, before anything changes, where that does not fit.
    """
    _check_parallel(model)
    folder = standing(Path(path))

    def check() -> Checkpoint:
        opened = Checkpoint.open(folder) if (folder / MANIFEST).exists() else find_checkpoint(folder)
        if optimizer is not None:
            check_optimizer(optimizer, model)
            _check_fits(model, optimizer, opened)
        return opened

    opened = on_every_rank(check)
    saved = opened.state.get("optimizer") or {}
    restore(model, optimizer, opened, types=saved.get("types"))
    if optimizer is not None:
        for group, was in zip(optimizer.param_groups, saved.get("groups", ()), strict=False):
            for key, value in was["options"].items():
                if key not in _IMPLEMENTATION:
                    group[key] = _like(group.get(key), value)
    return dict(opened.state.get("state", opened.state))


def _described(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The class of an optimizer, and of each group its options and the names of its parameters on all ranks."""
    own = [{"options": _options(group), "parameters": names} for group, names in _groups(model, optimizer)]
    everyone = plain.everywhere([own, scalar_types(optimizer)])
    groups = [
        {**group, "parameters": sorted({name for ranks, _ in everyone for name in ranks[at]["parameters"]})}
        for at, group in enumerate(everyone[0][0])
    ]
    types = {key: kind for _, each in everyone for key, kind in each.items()}
    return {"class": type(optimizer).__name__, "groups": groups, "types": types}


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], list[str]]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(group, [names[id(each)] for each in group["params"]]) for group in optimizer.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those that JSON holds; a tensor of one number as that number."""
    found = {}
    for key, value in group.items():
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        is_plain = value is None or isinstance(value, bool | int | str | list | tuple)
        if key not in ("params", "param_names") and (is_plain or (isinstance(value, float) and math.isfinite(value))):
            found[key] = value
    return found


def _like(now: Any, saved: Any) -> Any:
    """An option as the optimizer had it: a tuple, a tensor."""
    if isinstance(now, tuple) and isinstance(saved, list):
        return tuple(saved)
    return torch.full_like(now, saved) if isinstance(now, Tensor) else saved


def _check_fits(model: nn.Module, optimizer: torch.optim.Optimizer, opened: Checkpoint) -> None:
    saved = opened.state.get("optimizer")
    if not saved and set(opened.kinds) <= {WEIGHT} and not opened.manifest.scalars:
        raise UserError(
            f"{opened.path} was saved without an optimizer: this one would begin anew",
            fix="load the weights alone: ff.load(model, None, path)",
            more=READ_MORE,
        )
    if not saved:
        return
    if saved["class"] != type(optimizer).__name__:
        raise UserError(
            f"{opened.path} was saved with {saved['class']}, and this optimizer is {type(optimizer).__name__}",
            fix="build the optimizer that it was saved with, or load the weights alone: ff.load(model, None, path)",
            more=READ_MORE,
        )
    groups = _groups(model, optimizer)
    if len(groups) != len(saved["groups"]):
        raise UserError(
            f"{opened.path} has {len(saved['groups'])} parameter groups, and the optimizer {len(groups)}",
            fix="build the optimizer with the groups that it was saved with",
            more=READ_MORE,
        )
    for at, ((_, names), was) in enumerate(zip(groups, saved["groups"], strict=True)):
        here = {name for name, _ in model.named_parameters()}
        if different := sorted(set(names) ^ (set(was["parameters"]) & here)):
            raise UserError(
                f"{different[0]} is {'' if different[0] in names else 'not '}in parameter group {at}, and "
                f"{'was not' if different[0] in names else 'was'} when {opened.path} was saved",
                fix="build the optimizer with the groups that it was saved with",
                more=READ_MORE,
            )


def export(model: ParallelModel, path: str | Path, *, dtype: str | None = None, force: bool = False) -> Path:
    """Write the whole model as the Hugging Face folder `path`. Every rank calls this, and the first one writes.

    `dtype`: fp32, bf16, fp16 or fp64; None: the type that the model came in, where that has 16 bits, and else the type
    it is trained in. `force` replaces a model folder that is there.
    """
    _check_parallel(model)
    export_live(model, Path(path), dtype=dtype, given=model.given_dtype, force=force)
    return Path(path)
