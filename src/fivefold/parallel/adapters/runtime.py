"""Adapters in a frozen model: branches of its linears and experts, its embedding, its frozen parameters."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.core.errors import UserError
from fivefold.models.facts import ModelFacts
from fivefold.models.hf_internals import is_plain_linear
from fivefold.ops.linear import Linears
from fivefold.parallel.adapters.facts import A, B, Target, targets_of
from fivefold.parallel.adapters.nf4 import Nf4
from fivefold.parallel.adapters.settings import Lora, nf4_bytes
from fivefold.parallel.adapters.spec import RestFrozen, SendGradient
from fivefold.parallel.edits import Builders


def attach(model: nn.Module, facts: ModelFacts, lora: Lora) -> None:
    """Add the adapters to a model, on the meta device, and freeze everything else. `facts`: those without adapters."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for target in targets_of(facts, lora):
        linear: Any = model.get_submodule(target.module)
        linear.lora_scale = lora.scale
        if target.of_experts:
            _attach_to_experts(linear, target, lora.rank)
            continue
        if lora.quantize != "none" and not is_plain_linear(linear):
            raise UserError(
                f"adapter.quantize: {target.module} is a {type(linear).__name__}, which multiplies in its own way",
                fix="leave it out of adapter.targets, or adapter.quantize: none",
            )
        dtype = next(linear.parameters()).dtype
        with torch.device("meta"):
            linear.add_module(A, nn.Linear(target.inputs, lora.rank, bias=False, dtype=dtype))
            linear.add_module(B, nn.Linear(lora.rank, target.outputs, bias=False, dtype=dtype))
        linear.branch = _branch(linear)
        if lora.quantize == "nf4":
            linear.own_products = Nf4


def _branch(linear: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: linear.lora_scale * linear.lora_B(linear.lora_A(x))


def _attach_to_experts(module: Any, target: Target, rank: int) -> None:
    """Add one module for all A and one for all B; their parameters carry the names of the experts' matrices."""
    leaf, dtype = target.parameter, module.get_parameter(target.parameter).dtype
    for holder, shape in zip((A, B), target.shapes(rank).values(), strict=True):
        if not hasattr(module, holder):
            module.add_module(holder, nn.Module())
        module.get_submodule(holder).register_parameter(
            leaf, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        )
    module.branches = {**getattr(module, "branches", {}), leaf: _branch_of_experts(module, leaf)}


def _branch_of_experts(module: Any, leaf: str) -> Callable[[Linears, Tensor, Tensor], Tensor]:
    def branch(linears: Linears, x_SI: Tensor, counts_E: Tensor) -> Tensor:
        a, b = getattr(module.lora_A, leaf), getattr(module.lora_B, leaf)
        return _low_rank(linears, x_SI, counts_E, a, b, module.lora_scale)

    return branch


def _low_rank(linears: Linears, x_SI: Tensor, counts_E: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Multiply rows sorted by expert with `a` [E, r, I] and `b` [E, O, r] of their expert: [S, O]."""
    plain = replace(linears, products={})  # in the compute dtype, like adapters of linears
    made_Sr = plain.grouped(x_SI, a, counts_E, is_transposed=False)
    return scale * plain.grouped(made_Sr, b, counts_E, is_transposed=False)


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
                if name == "weight" and hasattr(module, "own_products"):
                    rows, numbers = parameter.shape
                    values = torch.empty(rows, nf4_bytes(numbers), dtype=torch.uint8, device=parameter.device)
                resting[parameter] = nn.Parameter(values, requires_grad=False)
            module._parameters[name] = resting[parameter]
