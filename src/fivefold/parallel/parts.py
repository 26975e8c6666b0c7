"""Parts of parameters and gradients in the hands of a user: what is computed of them is right, or refused.

A rank's part of a tensor is a `Part`, and so is everything computed from it. Its mesh knows all parts, so DTensor gives
the results of the whole. A `NarrowPart` lies next to others that its mesh does not know (tensor, expert or pipeline
parallel): it may be computed with place by place alone. Every operator of a call is looked at below
`torch.nn.functional`, so that the norm inside of `F.normalize` is seen.

| operator | `Part` | `NarrowPart` |
|---|---|---|
| place by place (`elementwise.py`) | right | right |
| others: reductions, products, sorts, picks | right | refused |
| a number for the host (`item`, `if`, `alpha=`) | refused, unless all ranks have the same | refused |
| random numbers | refused, unless the part is whole | refused |
| in place, on a slice that DTensor has gathered | refused: the slice is a copy | refused |
| a mean over unequal shards | refused: DTensor averages averages | refused |
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils._pytree import tree_leaves

from fivefold.core.errors import UserError, first_line
from fivefold.parallel.dtensor import local
from fivefold.parallel.elementwise import is_random, keeps_places
from fivefold.torch_internals import Dispatch, storage_key, without_torch_function

READ_MORE = "docs/howto/python.md"
_COPY = "fivefold_copy"  # attribute of a slice that shares no memory with the tensor that it was taken from
_HOST = {"tolist", "numpy", "__array__"}  # they read numbers without an operator
_AS_SPOKEN = {"getitem": "slice", "setitem": "slice", "get": "view"}


class Part(DTensor):
    """A rank's part of a parameter, of a gradient, or of a tensor computed from one; its mesh knows all parts.
    `.to_local()` is an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        with without_torch_function():
            if _steps:
                return func(*args, **(kwargs or {}))
            if name in _HOST:
                _refuse_number(args[0], cls)
            try:
                with Dispatch(partial(_watched, cls, name.strip("_"))):
                    out = func(*args, **(kwargs or {}))
            except (NotImplementedError, RuntimeError) as error:
                if not (isinstance(error, NotImplementedError) or "mixed torch.Tensor and DTensor" in str(error)):
                    raise
                raise UserError(
                    f"{name.strip('_')} of a parameter or gradient of which a rank holds a part: {first_line(error)}",
                    fix="make the whole tensor alike on every rank, and take this rank's part of it: "
                    "ff.scatter(model, {name: values}); ff.gather(model) has whole tensors",
                    more=READ_MORE,
                ) from error
        for tensor in tree_leaves(out) if not (name.endswith("_like") or name.startswith("new_")) else ():
            if type(tensor) is DTensor:
                tensor.__class__ = cls._derived()
        return out

    @classmethod
    def _derived(cls) -> type[DTensor]:
        return Part

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.detach()
        plain.__class__ = DTensor
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class NarrowPart(Part):
    """A part next to others that its mesh does not know: tensor, expert or pipeline parallel."""

    @classmethod
    def _derived(cls) -> type[DTensor]:
        return NarrowPart

    def full_tensor(self, **_: Any) -> Tensor:
        raise UserError(
            "full_tensor() of a parameter or gradient: other ranks hold parts that it would not have",
            fix="ff.gather(model), or ff.gather(model, gradients=True), on every rank",
            more=READ_MORE,
        )


def _watched(kind: type[Part], name: str, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of a call `name` on parts of a `kind`. Raises `UserError` where it would be wrong."""
    parts = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, DTensor)]
    is_narrow = issubclass(kind, NarrowPart)
    if not parts:
        return operator(*args, **kwargs)
    if operator.overloadpacket is torch.ops.aten._local_scalar_dense:
        _refuse_number(args[0], kind)
    if is_random(operator) and (is_narrow or not all(map(_is_whole, parts))):
        raise UserError(
            f"{name} of a parameter or gradient of which this rank holds a part: ranks would draw the same numbers for "
            "different parts",
            fix="draw the whole tensor alike on every rank; ff.scatter(model, {name: values}) has its part",
            more=READ_MORE,
        )
    if is_narrow and not keeps_places(operator) and any(part.numel() > 1 for part in parts):
        raise UserError(
            f"the {_AS_SPOKEN.get(name, name)} of a parameter or gradient of which this rank holds a part: it would be "
            "of this part alone, and clipping by it wrong",
            fix="norm = ff.clip_grad_norm_(model, max_norm) in place of torch.nn.utils.clip_grad_norm_; "
            "ff.gather(model, gradients=True) has whole tensors, and ff.scatter(model, {name: values}) parts of them",
            more=READ_MORE,
        )
    if any(hasattr(tensor, _COPY) for tensor in _written(operator, args, kwargs)):
        raise UserError(
            f"{name} of a slice of a parameter or gradient: ranks hold parts, and the slice is a copy, so the change "
            "would be lost",
            fix="multiply by a mask: p.grad.mul_(mask), where mask = ff.scatter(model, {name: whole mask})[name]",
            more=READ_MORE,
        )
    out = operator(*args, **kwargs)
    if any(map(partial(_is_mean_of_means, out), parts)):
        raise UserError(
            f"the {name} of a parameter or gradient whose rows ranks share unevenly: it would be a mean of their means",
            fix="sum() / numel()",
            more=READ_MORE,
        )
    if operator.is_view and isinstance(args[0], DTensor):
        for tensor in tree_leaves(out):
            if isinstance(tensor, DTensor) and (hasattr(args[0], _COPY) or not _shares_memory(tensor, args[0])):
                setattr(tensor, _COPY, True)
    return out


def _is_mean_of_means(out: Any, part: DTensor) -> bool:
    """True if DTensor averages the averages of shards that are not equally large."""
    if not isinstance(out, DTensor):
        return False
    pairs = zip(out.placements, part.placements, part.device_mesh.shape, strict=True)
    return any(
        isinstance(after, Partial) and after.reduce_op == "avg" and isinstance(before, Shard)
        and part.shape[before.dim] % size
        for after, before, size in pairs
    )  # fmt: skip


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Tensors that an operator writes to."""
    if operator._schema.is_mutable:
        for at, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tree_leaves(args[at] if at < len(args) else kwargs.get(argument.name))


def _shares_memory(view: DTensor, tensor: DTensor) -> bool:
    return storage_key(local(view)) == storage_key(local(tensor))


class _OfModel(DTensor):
    """A parameter that is assembled from this rank's part and others: `.data = values` would change neither."""

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
        """Return an ordinary parameter, for an average of the weights, say."""
        memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]


class PartOfParameter(_OfModel, Part):
    """A parameter whose mesh knows all of its parts."""


class NarrowPartOfParameter(_OfModel, NarrowPart):
    """A parameter whose mesh does not know all of its parts."""


class _Steps:
    """Steps of optimizers that are under way, which have been tried before: the frames that run them. A step that
    raised has no end; its frame does not run any more."""

    def __init__(self) -> None:
        self.frames: list[FrameType] = []

    def __bool__(self) -> bool:
        while self.frames and not _runs(self.frames[-1]):
            self.frames.pop()
        return bool(self.frames)


def _runs(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:  # Python clears no frame that runs
        return True
    return False


_steps = _Steps()


def begin_step(parameters: Iterable[Tensor], frame: FrameType) -> None:
    """Let an optimizer that can do so take the parts of `parameters`, and their gradients, for whole tensors. `frame`:
    the one that runs its step."""
    _steps.frames.append(frame)
    gradients: Iterable[Any] = (parameter.grad for parameter in parameters)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            gradient.__class__ = DTensor


def end_step(parameters: Collection[Tensor], state: Mapping[Any, Any]) -> None:
    """End what `begin_step` began. `state`: of the optimizer; its tensors are parts too."""
    _steps.frames[-1:] = []
    mark_gradients(parameters)
    for parameter in parameters:
        kept = state.get(parameter)
        for value in kept.values() if isinstance(kept, Mapping) else ():
            _mark(value, parameter)


@contextmanager
def paused(parameters: Collection[Tensor]) -> Iterator[None]:
    """Take parts for parts again while an optimizer calls a function of its user."""
    before, _steps.frames = _steps.frames, []
    mark_gradients(parameters)
    try:
        yield
    finally:
        _steps.frames = before


def _mark(tensor: Any, parameter: Tensor) -> None:
    """Make a tensor that lies like `parameter` a part, if that is one."""
    if isinstance(parameter, Part) and isinstance(tensor, DTensor):
        tensor.__class__ = parameter._derived()


def mark_gradients(parameters: Iterable[Tensor]) -> None:
    """Make the gradients of `parameters` refuse to be taken for whole ones."""
    for parameter in parameters:
        _mark(parameter.grad, parameter)


def _refuse_number(tensor: Any, kind: type[Part]) -> None:
    """Raise `UserError` unless every rank has the same number."""
    if issubclass(kind, NarrowPart) or (isinstance(tensor, DTensor) and not _is_whole(tensor)):
        raise UserError(
            "a number of a parameter or gradient of which this rank holds a part: every rank would read another",
            fix="norm = ff.clip_grad_norm_(model, max_norm), inf for the norm alone; ff.gather(model, gradients=True) "
            "has whole tensors; .to_local() is this rank's part",
            more=READ_MORE,
        )


def _is_whole(tensor: DTensor) -> bool:
    sizes = tensor.device_mesh.shape
    return all(size == 1 or place.is_replicate() for size, place in zip(sizes, tensor.placements, strict=True))


def is_parameter(tensor: Any) -> bool:
    """True for a parameter that is assembled from parts."""
    return isinstance(tensor, _OfModel)


def part_like(parameter: Tensor, values: Tensor) -> Tensor:
    """A part in the form of `parameter`, of the values of this rank and their type."""
    if not isinstance(parameter, DTensor):
        return values
    shape, stride = parameter.shape, parameter.stride()
    part: Tensor = DTensor.from_local(
        values, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
    _mark(part, parameter)
    return part
