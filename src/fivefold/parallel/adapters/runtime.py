"""Adapters in a frozen model: branches of its linears and experts, its embedding, its frozen parameters."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.core.errors import UserError
from fivefold.models.facts import ModelFacts
from fivefold.models.hf_internals import is_plain_linear
from fivefold.models.sources import TensorSource
from fivefold.ops.linear import Linears
from fivefold.parallel.adapters.facts import A, B, Target, adapted, targets_of
from fivefold.parallel.adapters.nf4 import Nf4
from fivefold.parallel.adapters.settings import Lora, nf4_bytes
from fivefold.parallel.adapters.sources import WithAdapters
from fivefold.parallel.adapters.spec import Attach, Freeze, RestFrozen, SendGradient
from fivefold.parallel.state import Builders, LivePart, ParallelState


@dataclass(frozen=True)
class Adapter(LivePart):
    """Settings of the adapter of one model, if it has one."""

    lora: Lora | None


def with_adapter(
    model: nn.Module, facts: ModelFacts, lora: Lora | None, source: TensorSource, seed: int
) -> tuple[ModelFacts, TensorSource]:
    """The facts of a model with an adapter, and its first values; None: those given. `source` may be without it, and
    it is then new, by `seed`. Raises `UserError` if the model cannot have it."""
    if lora is None:
        return facts, source
    targets = targets_of(facts, lora)
    if lora.quantize != "none":
        _check_plain(model, targets)
    if targets[0].weights[0] not in source.names():
        source = WithAdapters(source, targets, lora, seed)
    return adapted(facts, lora), source


def _check_plain(model: nn.Module, targets: Iterable[Target]) -> None:
    for target in targets:
        linear = model.get_submodule(target.module)
        if not (target.of_experts or is_plain_linear(linear)):
            raise UserError(
                f"adapter.quantize: {target.module} is a {type(linear).__name__}, which multiplies in its own way",
                fix="leave it out of adapter.targets, or adapter.quantize: none",
            )


def _freeze(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _attach(module: Any, edit: Attach, scale: float) -> None:
    """Add one module for A and one for B; those of experts carry the names of the experts' matrices."""
    dtype = module.get_parameter(edit.leaf).dtype
    for holder, shape in zip((A, B), edit.shapes, strict=True):
        with torch.device("meta"):
            if len(shape) == 2:
                module.add_module(holder, nn.Linear(shape[1], shape[0], bias=False, dtype=dtype))
                continue
            if not hasattr(module, holder):
                module.add_module(holder, nn.Module())
            values = nn.Parameter(torch.empty(shape, dtype=dtype))
            module.get_submodule(holder).register_parameter(edit.leaf, values)
    if len(edit.shapes[0]) == 2:
        module.branch = lambda x: scale * module.lora_B(module.lora_A(x))
    else:
        module.branches = {**getattr(module, "branches", {}), edit.leaf: _branch_of_experts(module, edit.leaf, scale)}
    if edit.in_nf4:
        module.own_products = Nf4


def _branch_of_experts(module: Any, leaf: str, scale: float) -> Callable[[Linears, Tensor, Tensor], Tensor]:
    def branch(linears: Linears, x_SI: Tensor, counts_E: Tensor) -> Tensor:
        return _low_rank(linears, x_SI, counts_E, getattr(module.lora_A, leaf), getattr(module.lora_B, leaf), scale)

    return branch


def _low_rank(linears: Linears, x_SI: Tensor, counts_E: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Multiply rows sorted by expert with `a` [E, r, I] and `b` [E, O, r] of their expert: [S, O]."""
    plain = replace(linears, products={})  # in the compute dtype, like adapters of linears
    made_Sr = plain.grouped(x_SI, a, counts_E, is_transposed=False)
    return scale * plain.grouped(made_Sr, b, counts_E, is_transposed=False)


def builders(state: ParallelState) -> Builders:
    lora = state.live(Adapter).lora
    scale = lora.scale if lora else 0.0
    return {
        Freeze: lambda model, _: _freeze(model),
        Attach: lambda module, edit: _attach(module, edit, scale),
        SendGradient: lambda embedding, _: setattr(embedding, "forward", _with_gradient(embedding.forward)),
        RestFrozen: lambda model, _: _rest_frozen(model, state.dtype),
    }


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
                if name == "weight" and hasattr(module, "own_products"):
                    rows, numbers = parameter.shape
                    values = torch.empty(rows, nf4_bytes(numbers), dtype=torch.uint8, device=parameter.device)
                resting[parameter] = nn.Parameter(values, requires_grad=False)
            module._parameters[name] = resting[parameter]
