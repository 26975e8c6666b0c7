"""Adapters beside a frozen model: how its embedding and its frozen parameters change."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.parallel.adapters.settings import nf4_bytes
from fivefold.parallel.adapters.spec import RestFrozen, SendGradient
from fivefold.parallel.edits import Builders


def builders(model: nn.Module, dtype: torch.dtype) -> Builders:
    """`dtype`: in which the model computes."""

    def send_gradient(edit: SendGradient) -> None:
        embedding = model.get_submodule(edit.path)
        embedding.forward = _with_gradient(embedding.forward)

    return {SendGradient: send_gradient, RestFrozen: lambda edit: _rest_frozen(model, dtype)}


def _with_gradient(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a frozen embedding's forward so that its output requires a gradient. The backward pass then runs through the
    first layer as through the others, with the same collectives whatever is trained."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        out = plain(*args, **kwargs)
        return out.requires_grad_() if torch.is_grad_enabled() and out.is_leaf else out

    return forward


def _rest_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep what is not trained in the type that it computes in, or as bytes of NF4."""
    resting = dict[nn.Parameter, nn.Parameter]()  # a tied one stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad:
                continue
            if parameter not in resting:
                values = parameter.to(dtype)
                if name == "weight" and getattr(module, "in_nf4", False):
                    rows, numbers = parameter.shape
                    values = torch.empty(rows, nf4_bytes(numbers), dtype=torch.uint8, device=parameter.device)
                resting[parameter] = nn.Parameter(values, requires_grad=False)
            module._parameters[name] = resting[parameter]
