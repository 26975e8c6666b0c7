"""What a parallelized model refuses when its user calls it, because the result would be silently wrong.

After backward the library sums gradients over tensor parallel ranks and over the two ends of a pipeline, and it divides
by the targets of all data ranks. A plain `loss.backward()` misses all three. So every output of the model has a hook
that raises when a gradient reaches it. On one process a plain backward is right and is allowed. On a pipeline rank,
which has only its own layers, a plain forward is refused too. The library's own passes run inside `Guard.library`,
where nothing is refused.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fivefold.core.errors import UserError
from fivefold.parallel.fsdp.copies import before_backward
from fivefold.parallel.fsdp.runtime import put_in_order, reshard
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.plan import ParallelPlan
from fivefold.torch_internals import NORMS, is_in_backward, of_one, without_torch_function

READ_MORE = "docs/howto/python.md"


class Guard:
    """Whether the library itself is running the model; `is_called`: whether a user's call of all of it is under way.
    `parameters`: those of the model by name, where others stand in their places in a forward."""

    def __init__(self) -> None:
        self._depth = 0
        self.is_called = False
        self.parameters: dict[str, nn.Parameter] = {}

    @property
    def is_library(self) -> bool:
        """True inside `library`."""
        return self._depth > 0

    @contextmanager
    def library(self) -> Iterator[None]:
        """Inside, the passes are the library's own, which sum what has to be summed."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def install(model: Any, guard: Guard, plan: ParallelPlan) -> None:
    """Hook `model`, its base, its layers, its embedding and its head for calls that are not the library's.

    Gathered parameters are dropped after a plain forward, and before the next: backward may have gathered them again,
    or ended half-way. Otherwise the forward after the next optimizer step would still use the old values.
    """
    base, parts = plan.anatomy.base, [plan.anatomy.embedding, *plan.anatomy.layers, plan.anatomy.head]
    pipelined, recomputes = plan.layout.pp > 1, any(map(plan.recompute.wraps, plan.placement.layers))

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if guard.is_library:
            return None
        if pipelined:
            raise UserError(
                "pp: this rank has only some of the model's layers, so the model cannot be called on it",
                fix="ff.train_step(model, optimizer, batch), ff.evaluate(model, batches), or ff.logits(model, batch)",
                more=READ_MORE,
            )
        keys = ("output_hidden_states", "output_attentions")
        asked = [key for key in keys if kwargs.get(key, getattr(model.config, key, False))]
        if asked and dist.get_world_size() > 1:
            raise UserError(
                f"{asked[0]} over several ranks: each has other tokens, and nobody puts them together",
                fix=f"leave {asked[0]} out, or ask for it in one process",
                more=READ_MORE,
            )
        if plan.splits_sequence and kwargs.get("inputs_embeds") is not None:
            raise UserError(
                "inputs_embeds under tp with sequence parallel: the embedding gives each rank its tokens",
                fix="pass input_ids, or a layout with +nosp",
                more=READ_MORE,
            )
        if not is_in_backward():  # which runs a model again that is checkpointed as a whole
            put_in_order(model)
            check_parameters(model)
        guard.is_called = True
        return None

    def before_base(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if guard.is_library:
            return None
        if not guard.is_called:
            raise UserError(
                "the base of a parallelized model cannot be called by itself: its parameters come with the whole",
                fix="model(input_ids=...).logits; for a loss model.backward(batch), or ff.evaluate(model, batches)",
                more=READ_MORE,
            )
        if recomputes and torch.is_grad_enabled() and kwargs.get("past_key_values") is None:
            kwargs = {**kwargs, "use_cache": False}  # a second forward would append to it
        return args, _with_cu_seqlens(args, kwargs)

    def before_part(part: nn.Module, args: tuple[Any, ...]) -> None:
        if not (guard.is_library or guard.is_called):
            raise UserError(
                f"{type(part).__name__} cannot be called by itself: a rank has some of its tokens, or nothing of it",
                fix="ff.logits(model, batch), or a layout with +nosp and without pp",
                more=READ_MORE,
            )

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if guard.is_library or not torch.is_grad_enabled() or dist.get_world_size() == 1:
            return
        before_backward(output, refuse_backward)

    def drop(*_: Any) -> None:
        guard.is_called = False
        if not guard.is_library:
            reshard(model)

    for name in dict.fromkeys(("", base, *parts)):
        # Prepended: refused before FSDP's own hooks begin a backward that would be left half done.
        model.get_submodule(name).register_forward_hook(after, prepend=True)
    for name, module in model.named_modules():
        if name:
            module.register_state_dict_pre_hook(refuse_state_dict)
    for name in parts if pipelined or plan.splits_sequence else ():
        model.get_submodule(name).register_forward_pre_hook(before_part, prepend=True)
    model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    for name in _around_layers(plan):
        model.get_submodule(name).register_forward_pre_hook(before_base, with_kwargs=True, prepend=True)
    model.register_forward_hook(drop, always_call=True)
    if plan.feature(FsdpPlan).rests_in_dtensors or plan.feature(FsdpPlan).copied:
        guard.parameters = _by_name(model)
    kind = NarrowPartOfParameter if plan.placement.parts_beyond_fsdp else PartOfParameter
    for name, parameter in guard.parameters.items() if plan.feature(FsdpPlan).rests_in_dtensors else ():
        parameter.register_hook = refuse_gradient_hook  # type: ignore[method-assign]
        if name in plan.gradient_sums or (name == plan.tied and len(plan.placement.pp_ranks[name]) > 1):
            parameter.register_post_accumulate_grad_hook = refuse_accumulated_hook  # type: ignore[method-assign]
        if isinstance(parameter, DTensor):
            parameter.__class__ = kind  # type: ignore[assignment]


def check_parameters(model: Any) -> None:
    """Raise `UserError` where another tensor stands in the place of a parameter, by `functional_call` or because it was
    assigned: it would be passed over, for what is gathered or copied is the parameter that stood there."""
    if not (held := model.fivefold.guard.parameters):
        return
    found = _by_name(model)
    # Of `torch.utils.swap_tensors` the parameter is the same, and what it is and has another's.
    if other := [
        name
        for name, parameter in held.items()
        if found.get(name) is not parameter or (isinstance(parameter, DTensor) and not _is_part(parameter))
    ]:
        raise UserError(
            f"{other[0]} is another tensor than the one that ff.parallelize put there, and would be passed over",
            fix="with torch.no_grad(): parameter.copy_(values), or put it there before ff.parallelize",
            more=READ_MORE,
        )


def _is_part(tensor: Any) -> bool:
    return isinstance(tensor, _OfModel)


def _by_name(model: Any) -> dict[str, nn.Parameter]:
    return dict(nn.Module.named_parameters(model, remove_duplicate=False))


def refuse_gradient_hook(hook: Any, **_: Any) -> None:
    """In place of a parameter's `register_hook`: raises `UserError`, for no hook sees the whole of a gradient."""
    raise UserError(
        "a hook of a parameter's gradient (register_hook) would never be called here, or see a part of it",
        fix="change parameter.grad after loss = model.backward(batch), before the optimizer's step",
        more=READ_MORE,
    )


def refuse_accumulated_hook(hook: Any, **_: Any) -> None:
    """In place of `register_post_accumulate_grad_hook`: raises `UserError`, for the gradient is summed over ranks when
    the whole backward has run."""
    raise UserError(
        "a hook behind a parameter's gradient (register_post_accumulate_grad_hook) would see a part of its sum",
        fix="step, or change parameter.grad, after loss = model.backward(batch); a layout without tp takes such hooks",
        more=READ_MORE,
    )


def refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """As a hook of a part of the model: raises `UserError`, for it would give parts in shapes that look whole."""
    raise UserError(
        f"state_dict() of a part ({type(module).__name__}) of a parallelized model is refused",
        fix="ff.gather(model) has whole tensors by name",
        more=READ_MORE,
    )


def refuse_backward(_: Tensor) -> None:
    """As a hook of a tensor: raises `UserError` when a gradient reaches it."""
    raise UserError(
        "backward() outside of fivefold: over several ranks the gradients would be wrong, for nobody sums them",
        fix="loss = model.backward(batch) in place of loss.backward(), or ff.train_step(model, optimizer, batch)",
        more=READ_MORE,
    )


def _around_layers(plan: ParallelPlan) -> list[str]:
    """The base, and modules of it around all layers, which some models call in its place: `self.model.decoder(...)`."""
    base, parents = plan.anatomy.base, plan.anatomy.layers[0].split(".")[:-2]
    inside = (".".join(parents[:depth]) for depth in range(1, len(parents) + 1))
    return [base, *(name for name in inside if name.startswith(f"{base}."))]


def _with_cu_seqlens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a base with `cu_seqlens`, if `position_ids` restart. As in `transformers`, a restart
    begins a new document unless there is a mask or a cache. Example: positions 0 1 2 0 1 give [0, 3, 5]."""
    positions, others = kwargs.get("position_ids"), ("attention_mask", "past_key_values", "cu_seqlens")
    given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))  # ids come first
    tokens = next((each for each in given if each is not None), None)
    if positions is None or positions.ndim != 2 or tokens is None or any(kwargs.get(key) is not None for key in others):
        return kwargs
    rows, length = tokens.shape[:2]
    begins = torch.ones(rows, length, dtype=torch.bool)
    begins[:, 1:] = (positions.diff(dim=1) != 1).cpu()
    if int(begins.sum()) == rows:
        return kwargs
    cu_seqlens = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([rows * length])])
    return {**kwargs, "cu_seqlens": cu_seqlens.to(torch.int32)}


# ---- parameters and gradients that are only a part -------------------------------------------------------------------


class Part(DTensor):
    """A parameter, a gradient, or what was computed from one, of which a rank holds a part.

    It may be computed with, but a number that is read from it (`item`, `float`, `if`) would be of this rank's part, and
    another one on each rank. Its mesh knows all parts, so that reductions are those of the whole. `.to_local()` is an
    ordinary tensor.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        with without_torch_function():
            if _stepping.optimizers or name.endswith("_like") or name.startswith("new_"):
                return func(*args, **(kwargs or {}))
            if name in _READS:
                _refuse_number(args[0])
            out = func(*args, **(kwargs or {}))
            cls._check(func, name, (args, kwargs), out)
        for each in tree_leaves(out):
            if type(each) is DTensor:
                each.__class__ = cls._derived()
        return out

    @classmethod
    def _derived(cls) -> type[DTensor]:
        return Part

    @classmethod
    def _check(cls, func: Any, name: str, given: Any, out: Any) -> None:
        """Raise `UserError` for an operation that is wrong on a part."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.detach()
        plain.__class__ = DTensor
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class NarrowPart(Part):
    """A part beside others that its mesh does not know of: tensor, expert or pipeline parallel.

    Its norm would be that of this rank's part alone, and `torch.nn.utils.clip_grad_norm_` would scale each rank by
    another factor: reductions raise.
    """

    @classmethod
    def _derived(cls) -> type[DTensor]:
        return NarrowPart

    @classmethod
    def _check(cls, func: Any, name: str, given: Any, out: Any) -> None:
        sizes = [sum(each.numel() for each in tree_leaves(of) if isinstance(each, Tensor)) for of in (out, given)]
        is_smaller = of_one(name) in _REDUCTIONS and sizes[0] < sizes[1]
        if func in NORMS or is_smaller or name.strip("_") in _PRODUCTS:
            raise UserError(
                f"the {name.strip('_')} of a parameter or gradient of which this rank holds a part: clipping by it "
                "would be wrong",
                fix="norm = ff.clip_grad_norm_(model, max_norm) in place of torch.nn.utils.clip_grad_norm_; "
                "ff.gather(model, gradients=True) has whole tensors",
                more=READ_MORE,
            )

    def full_tensor(self, **_: Any) -> Tensor:
        raise UserError(
            "full_tensor() of a parameter or gradient: other ranks hold parts that it would not have",
            fix="ff.gather(model), or ff.gather(model, gradients=True), on every rank",
            more=READ_MORE,
        )


class _OfModel(DTensor):
    """A parameter that is computed with from this rank's part and others: `.data = values` would change neither."""

    @property
    def data(self) -> Tensor:
        return super().data

    @data.setter
    def data(self, values: Tensor) -> None:
        raise UserError(
            "parameter.data = values would change nothing: the parameter is computed with from where its parts lie",
            fix="with torch.no_grad(): parameter.copy_(values); to put it back, keep parameter.detach().clone()",
            more=READ_MORE,
        )

    def __deepcopy__(self, memo: dict[int, nn.Parameter]) -> nn.Parameter:
        """An ordinary one: an average of the weights, say."""
        memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]


class PartOfParameter(_OfModel, Part):
    """A parameter all of whose parts its mesh knows."""


class NarrowPartOfParameter(_OfModel, NarrowPart):
    """A parameter beside others that its mesh does not know of."""


_READS = {"item", "__float__", "__int__", "__bool__", "__index__", "__complex__", "tolist", "numpy", "__array__"}
_REDUCTIONS = {
    "sum", "nansum", "mean", "nanmean", "max", "min", "amax", "amin", "aminmax", "norm", "vector_norm", "std", "var",
    "std_mean", "var_mean", "prod", "dot", "vdot", "inner", "any", "all", "logsumexp", "count_nonzero", "median",
    "nanmedian", "quantile", "nanquantile", "argmax", "argmin", "kthvalue", "topk", "histc", "bincount",
}  # fmt: skip
_PRODUCTS = {"matmul", "rmatmul", "mm", "bmm", "mv", "einsum", "tensordot", "svd", "qr", "eigh", "svdvals"}


class _Stepping:
    """Optimizers between the beginning and the end of a step: what they may do has been tried."""

    optimizers = 0


_stepping = _Stepping()


def begin_step(parameters: Iterable[Tensor]) -> None:
    """Let an optimizer that may take the parts of `parameters`, and their gradients, for whole ones, do so."""
    _stepping.optimizers += 1
    gradients: Iterable[Any] = (parameter.grad for parameter in parameters)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            gradient.__class__ = DTensor


def end_step(parameters: Iterable[Tensor]) -> None:
    """The end of what `begin_step` began."""
    _stepping.optimizers = max(0, _stepping.optimizers - 1)
    for parameter in parameters:
        if isinstance(parameter, Part) and isinstance(parameter.grad, DTensor):
            parameter.grad.__class__ = type(parameter)._derived()


def _refuse_number(tensor: Tensor) -> None:
    """Raise `UserError` unless every rank has the same number."""
    if isinstance(tensor, NarrowPart) or (isinstance(tensor, DTensor) and not _is_whole(tensor)):
        raise UserError(
            "a number of a parameter or gradient of which this rank holds a part: every rank would read another",
            fix="norm = ff.clip_grad_norm_(model, max_norm), inf for the norm alone; ff.gather(model, gradients=True) "
            "has whole tensors; .to_local() is this rank's part",
            more=READ_MORE,
        )


def _is_whole(tensor: DTensor) -> bool:
    sizes = tensor.device_mesh.shape
    return all(size == 1 or place.is_replicate() for size, place in zip(sizes, tensor.placements, strict=True))


def mark_gradients(model: nn.Module) -> None:
    """Let the gradients of `model` refuse to be taken for whole ones. (A step that raised has no end.)"""
    _stepping.optimizers = 0
    end_step(model.parameters())
