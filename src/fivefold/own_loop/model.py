"""`ff.parallelize` and the model it returns."""

import atexit
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from fivefold.checkpoint.live import export_live
from fivefold.core.alike import program
from fivefold.core.errors import UserError
from fivefold.data.batch import MicroBatch
from fivefold.launch.world import leave, open_world
from fivefold.models.build import config_values, use_our_attention
from fivefold.models.discover import facts_of
from fivefold.models.sources import ModelTensors, RandomInit, TensorSource, folder_digests
from fivefold.own_loop.batches import (
    Batch,
    check_grad_enabled,
    leaves_inference_mode,
    micro_batches,
    refusal,
    some,
)
from fivefold.own_loop.optimizer import watch_optimizers
from fivefold.parallel import apply, guard, parts
from fivefold.parallel.adapters.peft_folder import adapter_digests, lora_of, with_peft_folder
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.balance.runtime import Balance, BalanceOptions, configure
from fivefold.parallel.dtypes import PRECISION_OF
from fivefold.parallel.fsdp.runtime import put_in_order
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.layout import Layout
from fivefold.parallel.loss.own import LossFunction, TokenLoss
from fivefold.parallel.plain import check_alike
from fivefold.parallel.state import ParallelState, state_of
from fivefold.torch_internals import fsdp_settle_root
from fivefold.training.inputs import check_loss
from fivefold.training.model import own_coefficient
from fivefold.training.step import accumulate

READ_MORE = "fivefold docs howto/python"
Precision = Literal["fp32", "bf16", "fp64"]


def _refusal_of(what: str, fix: str) -> UserError:
    return refusal(f"{what} of a parallelized model is refused", fix)


def _refused(what: str, fix: str) -> Any:
    """A method that only raises, with the line to write instead; `{layout}` in `fix` is the model's."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise _refusal_of(what, fix.replace("{layout}", str(self.layout)))

    return refuse


class ParallelModel(nn.Module):
    """A `transformers` causal language model parallelized by `ff.parallelize`: the same object, in a subclass.

    Its parameters have the names of the Hugging Face model; a rank holds its shards of them, and `.grad` belongs to the
    shard. A forward without gradients returns logits (not under a pipeline: `ff.logits`).
    """

    config: Any
    fivefold: ParallelState
    given_dtype: torch.dtype  # dtype of the parameters before `parallelize`
    called_around: frozenset[Any]  # see `_around_call`: the hooks of this library
    adapter: Lora | None  # trained on top of the frozen model
    own_loss: TokenLoss | None  # the last one that was used, and so checked

    @property
    def layout(self) -> Layout:
        """The layout of the model over the world."""
        return self.fivefold.plan.layout

    @property
    def data_rank(self) -> int:
        """The share of the data, of `data_ranks`, that this rank reads: `rank` of a `DistributedSampler`."""
        return self.fivefold.plan.placement.data_rank

    @property
    def data_ranks(self) -> int:
        """The number of ranks that read different rows: `num_replicas` of a `DistributedSampler`."""
        return self.fivefold.plan.layout.data_ranks

    @leaves_inference_mode
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward. If it raises or is interrupted (torch hooks do not see Ctrl-C), the model stays consistent."""
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            self.fivefold.guard.is_called = False
            put_in_order(self)
            raise

    def backward(self, batch: Batch | Sequence[Batch], *, loss: LossFunction | None = None) -> Tensor:
        """`ff.gradients(model, batch, loss=loss)`."""
        check_runs(self)
        own = some(micro_batches(self, batch, also=check_grad_enabled, has_columns=loss is not None))
        found = accumulate(self, own, loss=own_loss(self, loss, own))
        parts.mark_gradients(self.parameters())
        return found

    def save_pretrained(self, save_directory: str | Path, *, dtype: str | None = None, **options: Any) -> None:
        """Write the whole model as a Hugging Face folder, as `transformers` does: files of the same names are replaced,
        others stay. Every rank calls this, and the first one writes. `dtype`: see `ff.export`. For a model with an
        adapter, write the adapter, as `peft` does."""
        if unknown := [key for key in options if key not in ("safe_serialization", "is_main_process")]:
            raise _refusal_of(
                f"save_pretrained({unknown[0]}=...)", "model.save_pretrained(path), or ff.export(model, path)"
            )
        export_live(self, Path(save_directory), dtype=dtype, given=self.given_dtype, adapter=self.adapter, into=True)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, even after a call that raised and left whole parameters in their places."""
        if not (self.fivefold.guard.is_library or self.fivefold.guard.is_called):
            put_in_order(self)
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Parameters of the whole model; all those of other pipeline ranks count as trainable."""
        if exclude_embeddings:
            raise _refusal_of("num_parameters(exclude_embeddings=True)", "model.num_parameters()")
        frozen = {name for name, p in self.named_parameters() if only_trainable and not p.requires_grad}
        if only_trainable and self.fivefold.plan.facts.has_adapter:
            frozen = {
                name for name, parameter in self.fivefold.plan.facts.parameters.items() if not parameter.is_trained
            }
        return sum(
            math.prod(spec.shape) for name, spec in self.fivefold.plan.placement.shards.items() if name not in frozen
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of `transformers`, on one process; refused on several, which hold parts of layers and rows."""
        if self.layout.world > 1:
            raise _refusal_of("model.generate()", "ff.generate(model, prompt, tokenizer=tokenizer) on every rank")
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    # A rank has only shards, in shapes that look whole.
    state_dict = _refused(
        "state_dict()",
        "ff.save(model, optimizer, path) to go on from, ff.export(model, path) for transformers, or "
        "ff.gather(model) for whole tensors in memory",
    )
    load_state_dict = _refused(
        "load_state_dict()", "ff.load(model, optimizer, path), or load the weights before ff.parallelize"
    )
    __reduce_ex__ = _refused("pickling", "ff.save(model, optimizer, path), or ff.export(model, path)")
    push_to_hub = _refused("push_to_hub()", "model.save_pretrained(path), and push the folder")
    # torch cannot copy the state of FSDP.
    __deepcopy__ = _refused(
        "copying", "[p.detach().clone() for p in model.parameters()] for averages of the weights, or ff.gather(model)"
    )
    # Recompute and the sizes of parameters belong to the layout.
    gradient_checkpointing_enable = _refused(
        "gradient_checkpointing_enable()", 'ff.parallelize(model, "{layout}+full")'
    )
    resize_token_embeddings = _refused(
        "resize_token_embeddings()", "model.resize_token_embeddings(n) before ff.parallelize"
    )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves and casts (`.to`, `.half`, `.cuda`): refused unless they change nothing."""
        like = next(self.parameters()).detach()
        found = fn(torch.empty(0, dtype=like.dtype, device=like.device))
        if (found.dtype, found.device) != (like.dtype, like.device):
            raise _refusal_of(
                f"moving or casting to {found.device}, {found.dtype}",
                "ff.parallelize(model, layout, device=..., precision=...) says both",
            )
        return self


@leaves_inference_mode
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
    step: tuple[int, int] | None = None,
    adapter: Lora | str | Path | None = None,
    neftune_noise_alpha: float | None = None,
) -> ParallelModel:
    """Parallelize a `transformers` causal language model over the current world; the same model, changed in place.

    `layout`: a `Layout` or its text. `precision`: the compute type (parameters and optimizer state stay in fp32, or in
    fp64); None: the one in the layout, `+fp32` or `+fp64`, else the type of the model's parameters (bf16 for fp16).
    Values come from `source`; without one, from the model itself, or, for a model on the meta device, from random
    initialisation by the model's own recipe with `seed`. Without a process group, the world in the environment
    (torchrun, srun) is joined, or one of this process alone. `step`: tokens of a row and micro batches of a step, for a
    layout with a recompute budget (`+keep12GiB`), which is fitted to them. `adapter`: trained instead of the model,
    which is frozen: `ff.Lora(rank=16)`, or the folder of a PEFT adapter to continue. `neftune_noise_alpha`: of the
    noise on embeddings in training (docs/explain/dropout.md).

    Build the optimizer after this. Raises `UserError` if the layout does not fit the world or the model.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    if not isinstance(layout, Layout):
        raise UserError(f"the layout is a {type(layout).__name__}", fix='pass a Layout, or its text: "shard2.tp2"')
    given = _check_model(model)
    before, called_around, inside = list(model.parameters()), _around_call(model), guard.hooks_inside(model)
    if layout.state_dtype != "fp32":
        raise refusal(
            f"{layout} keeps an optimizer's state in {layout.state_dtype}, and an optimizer of torch keeps its own",
            fix="leave it out of the layout; fivefold train and ff.train take optimizer.state_dtype",
        )
    if layout.outer_every:
        raise refusal(
            f"{layout} has outer steps, which a loop of your own does not take",
            fix="leave them out of the layout; fivefold train and ff.train take outer.every",
        )
    layout = _with_precision(layout, precision, given)
    settings: Any = model.config
    load = own_coefficient(settings.get_text_config())
    if open_world() and dist.get_backend() == "gloo":
        # One loop in sixty ended with SIGABRT at exit, its group still open; that may be the cause.
        atexit.register(leave)
    _check_same_everywhere(model, source, adapter)
    lora = adapter if adapter is None or isinstance(adapter, Lora) else lora_of(adapter)
    if isinstance(adapter, str | Path):
        assert lora is not None
        source = _beside(model, adapter, lora, source, seed)
    apply.parallelize(
        model, layout, device=device, source=source, seed=seed, reduce=reduce, loss_chunks=loss_chunks,
        compile_blocks=compile_blocks, step=_padded(step, layout),
        adapter=lora, neftune_noise_alpha=neftune_noise_alpha,
    )  # fmt: skip
    state = state_of(model)
    if load and not state.plan.watches_routers:
        raise refusal(
            f"{state.plan.anatomy.model_class} asks for a loss of uneven experts, and has no routers that give logits",
            fix="model.config.output_router_logits = False before ff.parallelize",
        )
    configure(model, state.live(Balance), BalanceOptions(load=load), state.placement.buffers)
    guard.install(model)
    if state.plan.feature(FsdpPlan).is_used:
        fsdp_settle_root(model)
    watch_optimizers(model, state.plan.layout, before)
    model.__class__ = type(f"Parallel{state.plan.anatomy.model_class}", (ParallelModel, type(model)), {})
    assert isinstance(model, ParallelModel)
    model.given_dtype, model.adapter, model.own_loss = given, lora, None
    model.called_around = _around_call(model) - called_around
    state.guard.hooks = guard.hooks_inside(model).keys() - inside.keys()
    return model


def own_loss(model: ParallelModel, function: LossFunction | None, batch: Sequence[MicroBatch]) -> TokenLoss | None:
    """The loss of a user's function, tried on the first targets of `batch` unless it was used last. Every rank calls
    this. Raises `UserError`, on every rank, if it cannot be used on one."""
    if function is None:
        return None
    if model.own_loss is None or model.own_loss.function is not function:
        loss = TokenLoss(function)
        check_loss(loss, model, batch)
        model.own_loss = loss
    return model.own_loss


def _around_call(model: nn.Module) -> frozenset[Any]:
    """Code around the forward of the model's class in a call of it: hooks, by number, and a forward of its own."""
    own = vars(model).get("forward")
    return frozenset({*model._forward_pre_hooks, *model._forward_hooks, *([own] if own else [])})


def _beside(model: nn.Module, folder: str | Path, lora: Lora, source: TensorSource | None, seed: int) -> TensorSource:
    """The values of a PEFT adapter, and of its base model."""
    on_meta = next(model.parameters()).is_meta
    use_our_attention(model)
    base = source or (RandomInit(model, seed) if on_meta else ModelTensors(model))
    return with_peft_folder(folder, lora, facts_of(model), base)


def _padded(step: tuple[int, int] | None, layout: Layout) -> tuple[int, int] | None:
    """Pad rows as the layout does. Raises `UserError` unless `step` is a pair of positive numbers."""
    if step is None:
        return None
    if len(step) != 2 or not all(isinstance(size, int) and size > 0 for size in step):
        raise UserError(f"step {step!r} is no step", fix="step=(tokens of a row, micro batches): step=(8192, 4)")
    return layout.resolve(dist.get_world_size()).padded(step[0]), step[1]


def _check_model(model: nn.Module) -> torch.dtype:
    """The type of its parameters. Raises `UserError` for models that cannot be parallelized."""
    if isinstance(model, ParallelModel):
        raise refusal("this model is parallelized already", fix="build another one")
    if not isinstance(model, PreTrainedModel):
        raise refusal(
            f"a {type(model).__name__} cannot be parallelized: it is no model class of transformers",
            fix="pass the causal language model itself, from AutoModelForCausalLM, with no wrapper around it",
        )
    if odd := [name for name, p in model.named_parameters() if p.dtype not in PRECISION_OF]:
        raise refusal(
            f"{odd[0]} is {dict(model.named_parameters())[odd[0]].dtype}: quantised weights cannot be trained",
            fix="load the model without quantization_config",
        )
    if hooked := [n for n, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]:
        raise refusal(
            f"{hooked[0]} has a hook for its gradient, which would be lost: the parameters are others afterwards",
            fix="register it after ff.parallelize",
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise refusal(
            "gradient checkpointing is on in the model",
            fix="leave it off, and let the layout recompute: +full at the end of its text",
        )
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _check_same_everywhere(model: Any, source: TensorSource | None, adapter: Lora | str | Path | None) -> None:
    """Raise `UserError` if ranks built different models, or read other weights: each keeps its shard of its own, and
    replicas would drift apart."""

    def read() -> dict[str, Any]:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        values = {name: t for name, t in tensors.items() if source is None and not t.is_meta}
        return {
            **program(),
            "the model's config": config_values(model.config),
            "the shape, the type and the training of": {
                name: f"{list(t.shape)} {t.dtype}, {'trained' if t.requires_grad else 'frozen'}"
                for name, t in tensors.items()
            },
            "the weights of": {name: _bits_sum(t) for name, t in values.items()},
            "the weights of the source": folder_digests(source.folder) if source and source.folder else None,
            "the adapter": adapter_digests(adapter) if isinstance(adapter, str | Path) else repr(adapter),
        }

    check_alike(
        read,
        fix="build the same model on every rank: torch.manual_seed(1) before it is made, or the same files",
        more=READ_MORE,
    )


def _bits_sum(tensor: Tensor) -> int:
    """The sum of the elements, read as integers: a checksum in one pass and without a copy."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize, torch.uint8)
    return int(tensor.detach().view(bits).sum(dtype=torch.int64)) % 2**62


def _with_precision(layout: Layout, precision: Precision | None, given: torch.dtype) -> Layout:
    """`layout` with the compute type of the model. In a `Layout`, bf16 is the default and means that none was named."""
    default = Layout().precision
    if precision and layout.precision not in (default, precision):
        raise UserError(f"the layout {layout} names a precision, and precision={precision!r} another", fix="name one")
    if layout.precision == default:
        layout = replace(layout, precision=precision or PRECISION_OF[given])
    return layout


def check_parallel(model: Any) -> None:
    """Raise `UserError` unless `parallelize` returned the model; restore its order after a call that raised."""
    if not isinstance(model, ParallelModel):
        raise refusal(
            f"a {type(model).__name__} is not a model that ff.parallelize returned",
            fix="model = ff.parallelize(model, layout), and nothing wrapped around it",
        )
    put_in_order(model)
    guard.check_parameters(model)


def check_spread(model: Any) -> None:
    """`check_parallel`, which takes the model of a run too: `LiveRun.model`."""
    if isinstance(model, ParallelModel) or not isinstance(getattr(model, "fivefold", None), ParallelState):
        check_parallel(model)


def check_runs(model: Any) -> None:
    """`check_parallel`, for a model about to be run here. Raises `UserError` for hooks that this would leave out, and
    what inside of it would take a part for the whole."""
    check_parallel(model)
    guard.check_inside(model)
    if _around_call(model) - model.called_around:
        raise refusal(
            "the whole model has a forward hook, or a forward of its own, which would be left out: here its base, its "
            "layers and its head are called",
            fix=f"register it on one of these (model.{model.fivefold.plan.anatomy.base}), or, in one process, take the "
            "loss of model(...)",
        )
