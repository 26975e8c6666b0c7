"""Parts of parameters and gradients in the hands of a user: what is computed of them is right, or refused.

A rank's part of a tensor is a `PartOfTensor`, and so is everything computed from it. One rule holds under every layout:
a part may be computed with place by place (`keeps_places`), which gives the part of the result. Everything else, such
as a norm, a slice, a random number or a number for the host, would be of this part alone, and is refused. Every
operator of a call is looked at below `torch.nn.functional`, so that the norm inside of `F.normalize` is seen.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fivefold.core.errors import UserError, first_line
from fivefold.torch_internals import Dispatch, of_one

_HOST = ("tolist", "numpy", "__array__")  # they read numbers without an operator


class PartOfTensor(DTensor):
    """A rank's part of a parameter, a gradient, or a tensor computed from one. `.to_local()` is an ordinary tensor."""

    steps = 0  # steps of optimizers that are under way, which have been tried before

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST:
            raise _refusal(name)
        watched = nullcontext() if PartOfTensor.steps else Dispatch(partial(_watched, name))
        try:
            with watched:
                out = nn.Parameter.__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        except (NotImplementedError, RuntimeError) as error:
            if not (isinstance(error, NotImplementedError) or "mixed torch.Tensor and DTensor" in str(error)):
                raise
            raise _refusal(name, first_line(error)) from error
        for tensor in tree_leaves(out):
            if type(tensor) is DTensor:
                tensor.__class__ = PartOfTensor
        return out

    def full_tensor(self, **_: Any) -> Tensor:
        raise _refusal("full_tensor")

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.detach()
        plain.__class__ = DTensor
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class AssembledParameter(DTensor):
    """A parameter that is assembled from those of several ranks: `.data = values` would change none of them."""

    @property
    def data(self) -> Tensor:
        return super().data

    @data.setter
    def data(self, values: Tensor) -> None:
        raise refused(
            "parameter.data = values would change nothing: the parameter is computed with from where its parts lie",
            "with torch.no_grad(): parameter.copy_(values); to put it back, keep parameter.detach().clone()",
        )

    def __deepcopy__(self, memo: dict[int, nn.Parameter]) -> nn.Parameter:
        """Return an ordinary parameter, for an average of the weights, say."""
        memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]


class PartOfParameter(AssembledParameter, PartOfTensor):
    """A parameter of which this rank has a part."""


def _watched(name: str, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of a call `name`. Raises `UserError` if its result would be of a part alone."""
    if not keeps_places(operator) and any(isinstance(tensor, DTensor) for tensor in tree_leaves((args, kwargs))):
        raise _refusal(name)
    return operator(*args, **kwargs)


def refused(what: str, fix: str) -> UserError:
    """An error of a loop of the user's own."""
    return UserError(what, fix=fix, more="fivefold docs howto/python")


def _refusal(name: str, why: str = "it would be of this part alone, and clipping by it wrong") -> UserError:
    return refused(
        f"{name.strip('_')} of a parameter or gradient of which this rank holds a part: {why}",
        "norm = ff.clip_grad_norm_(model, max_norm) in place of torch.nn.utils.clip_grad_norm_, inf for the norm "
        "alone; ff.gather(model, gradients=True) has whole tensors, ff.scatter(model, {name: values}) parts of them",
    )


@contextmanager
def paused(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Refuse again while an optimizer calls a function of its user. If that raises, the step is over."""
    steps, PartOfTensor.steps = PartOfTensor.steps, 0
    mark_gradients(parameters)
    yield
    PartOfTensor.steps = steps


def mark_gradients(parameters: Iterable[Tensor]) -> None:
    """Make the gradients of `parameters` refuse to be taken for whole ones."""
    PartOfTensor.steps = 0  # a step that raised has no end
    for parameter in parameters:
        if isinstance(parameter, PartOfTensor) and isinstance(parameter.grad, DTensor):
            parameter.grad.__class__ = PartOfTensor


def part_like(parameter: Tensor, values: Tensor) -> Tensor:
    """A part in the form of `parameter`, of the values of this rank and their type."""
    if not isinstance(parameter, DTensor):
        return values
    shape, stride = parameter.shape, parameter.stride()
    part: Tensor = DTensor.from_local(
        values, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
    if isinstance(parameter, PartOfTensor):
        part.__class__ = PartOfTensor
    return part


# ---- operators -------------------------------------------------------------------------------------------------------

# Not tagged as pointwise: they keep every number at its place, or create or fill tensors.
_SAME_PLACES = {
    "copy", "_to_copy", "clone", "where", "masked_fill", "rsub", "fill", "zero", "scalar_tensor", "_fused_adam",
    "_fused_adamw", "_fused_adagrad", "_fused_sgd",
}  # fmt: skip
_NEW = ("ones", "zeros", "full", "empty", "new_")
# They pick or join numbers: a pick by position takes other numbers of a part than of the whole.
_PICKS = {
    "index", "index_select", "index_put", "index_copy", "index_fill", "gather", "take", "masked_select", "nonzero",
    "cat", "stack",
}  # fmt: skip
_RANDOM = ("rand", "normal", "bernoulli", "uniform")
# Views of all numbers in their order: the transpose of a part is no part of the transpose.
_WHOLE_VIEWS = {
    "detach", "alias", "view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "expand", "lift_fresh",
}  # fmt: skip


@cache
def keeps_places(operator: Any) -> bool:
    """True if each result depends on the numbers at its own place alone, so that it may be computed on a part. Torch's
    tag says so, not a list of operators that do otherwise: an unknown one is not trusted."""
    name, plain = operator.overloadpacket.__name__, _plain(operator)
    if plain in _SAME_PLACES or plain in _WHOLE_VIEWS or plain.startswith(_NEW):
        return True
    packet = getattr(torch.ops.aten, plain, operator.overloadpacket)
    if name != plain + "_" * name.endswith("_"):  # foreach operators: `max` reduces each tensor, `maximum` does not
        overloads = packet.overloads()  # by getattr: `__getattr__` would make new ones, which DTensor does not know
        return "dim" not in overloads and any(_is_pointwise(getattr(packet, overload)) for overload in overloads)
    return _is_pointwise(operator) or _is_pointwise(getattr(packet, str(operator).rpartition(".")[2], operator))


@cache
def mixes_nothing(operator: Any) -> bool:
    """True if each result depends on at most one number of each tensor, wherever that stands, or is drawn."""
    return keeps_places(operator) or _plain(operator) in _PICKS or _plain(operator).startswith(_RANDOM)


def _plain(operator: Any) -> str:
    return of_one(operator.overloadpacket.__name__).removesuffix("_")


def _is_pointwise(operator: Any) -> bool:
    is_drawn = torch.Tag.nondeterministic_seeded in operator.tags  # ranks would draw the same for different parts
    return torch.Tag.pointwise in operator.tags and not is_drawn and operator.overloadpacket.__name__ != "equal"
