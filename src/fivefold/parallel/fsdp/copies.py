"""Stand-ins for parameters in compute, if nothing is to be gathered: in one process, or on tensor ranks alone.

Parameters are stored in fp32, the optimizer's dtype; their stand-ins are copies in the compute dtype. Those of tensor
ranks are stored as DTensors; if the dtype is the same, this rank's tensor stands in. They are in place from a forward
until its backward is done. The semantics and the times are FSDP's: inputs of layers are cast, every gradient reaches
its copy in the compute dtype, and is added to the parameter's own in fp32. This saves FSDP's hooks at every unit, which
take a quarter of a step with a model of 1M parameters.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fivefold.core.errors import UserError
from fivefold.parallel.dtensor import local, with_local
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.state import LivePart, ParallelState
from fivefold.torch_internals import (
    after_this_backward,
    call_gradient_hooks,
    overwrite_unseen,
    through_gradient_hooks,
)


class Copies(LivePart):
    """Copies of `names` in `dtype`: made once, they stay in memory. A parameter of this dtype is not copied.

    `is_held`: they stay in place until `put_back` is called, as ZeRO-1 and 2 keep gathered parameters.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], dtype: torch.dtype) -> None:
        self.is_held = False
        self._dtype = dtype
        self._is_in = self._is_waiting = False
        self._names = {model.get_parameter(name): name for name in names}
        own = {parameter: local(parameter) for parameter in self._names}
        self._copied = [parameter for parameter in own if parameter.dtype != dtype]
        own |= {parameter: torch.empty_like(own[parameter], dtype=dtype) for parameter in self._copied}
        self._of = {parameter: nn.Parameter(values) for parameter, values in own.items()}
        self._versions = list[int]()  # of the copies when they were put in
        for parameter, copy in self._of.items():
            copy.register_post_accumulate_grad_hook(_adding_to(parameter))  # type: ignore[no-untyped-call]
        self._places = [
            (module._parameters, leaf, parameter)
            for module in model.modules()
            for leaf, parameter in module._parameters.items()
            if parameter is not None and parameter in self._of
        ]

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        """Made once parameters are allocated."""
        return cls(state.model, state.plan.feature(FsdpPlan).stood_in_for, state.dtype)

    def put_in(self) -> None:
        """Put the copies in the parameters' places, with the parameters' current values."""
        if self._is_in:
            return
        self._is_in = True
        if self._copied:
            overwrite_unseen(
                [self._of[parameter] for parameter in self._copied], [local(parameter) for parameter in self._copied]
            )
        for parameter, copy in self._of.items():
            copy.requires_grad_(parameter.requires_grad)
        self._versions = [self._of[parameter]._version for parameter in self._copied]
        for places, leaf, parameter in self._places:
            places[leaf] = self._of[parameter]

    def put_back(self) -> None:
        """Put the parameters in their places again.

        Raises `UserError` if a copy was written to: that change is lost.
        """
        self.is_held = self._is_waiting = False
        if self._is_in:
            self._is_in = False
            for places, leaf, parameter in self._places:
                places[leaf] = parameter
            self._check_versions()

    def _check_versions(self) -> None:
        for parameter, version in zip(self._copied, self._versions, strict=True):
            if self._of[parameter]._version != version:
                raise UserError(
                    f"{self._names[parameter]} was changed while a copy in {str(self._dtype)[6:]} stood in its place, "
                    "in a backward or after one that raised: the change is lost",
                    fix="take it from model.named_parameters(), which puts all in order",
                )

    def hold(self) -> None:
        self.put_in()
        self.is_held = True

    # ---- hooks of the model ------------------------------------------------------------------------------------------

    def around_model(self, model: nn.Module, methods: Sequence[str]) -> None:
        model.register_forward_pre_hook(lambda *_: self.put_in())
        if self._copied:
            model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        model.register_forward_hook(lambda module, inputs, out: self._after(out))
        for name in methods:
            setattr(model, name, self._around(getattr(model, name)))

    def before_layer(self, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.put_in()
            return self._after(method(*args, **kwargs))

        return run

    def _after(self, out: Any) -> Any:
        if torch.is_grad_enabled():
            before_backward(out, self._before_backward)
        return out

    def _before_backward(self, _: Tensor) -> None:
        """Put copies in for backward too, which may recompute layers."""
        self.put_in()
        if not self._is_waiting:
            self._is_waiting = True
            after_this_backward(self._after_backward)

    def _after_backward(self) -> None:
        self._is_waiting = False
        if not self.is_held:
            self.put_back()

    def _cast_inputs(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return self._cast(args), self._cast(kwargs)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._dtype) if value.is_floating_point() else value
        if type(value) is dict:
            return {key: self._cast(item) for key, item in value.items()}
        return type(value)(map(self._cast, value)) if type(value) in (tuple, list) else value


def before_backward(output: Any, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` when a gradient reaches one of the tensors of a model's output."""
    for tensor in tree_leaves(dict(output) if hasattr(output, "keys") else output):
        if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _adding_to(parameter: nn.Parameter) -> Callable[[Tensor], None]:
    """Make a hook that adds a copy's gradient to the parameter's, in its type."""

    def add(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        if gradient is None:  # frozen since the forward
            return
        gradient = through_gradient_hooks(parameter, gradient)
        if parameter.grad is None:
            parameter.grad = with_local(parameter, gradient.to(parameter.dtype))
        else:
            local(parameter.grad).add_(gradient)
        call_gradient_hooks(parameter)

    return add
