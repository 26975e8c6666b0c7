"""Bugs of adapters: of their product and its scale, of what is frozen, of what ranks hold of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.models.facts import Role
from fivefold.ops import linear as linears
from fivefold.parallel import lower
from fivefold.parallel.adapters import facts as adapter_facts
from fivefold.parallel.adapters import nf4, runtime
from fivefold.parallel.adapters.settings import Lora, nf4_numbers
from fivefold.training import step as training_step
from fivefold.training.optimizers import adamw
from tests.verification.faults.fault import Model, fault

LORA = Model(adapter=True)
OUTPUT = [("output", r"(proj|c_attn|layers\.0)")]


@fault(
    "the product of an adapter is not scaled on one rank",
    known="a scale that is an attribute of a module, and lost where a rank makes the module anew",
    layout="shard2", expects=OUTPUT, model=LORA,
)  # fmt: skip
def scale_lost_on_one_rank() -> Any:
    plain = runtime._attach
    return patch.object(
        runtime, "_attach", lambda module, edit, scale: plain(module, edit, scale if dist.get_rank() != 1 else 1.0)
    )


@fault(
    "an adapter is scaled by alpha, not by alpha / rank",
    known="the alpha of one package read as the scale of another",
    layout="single", expects=OUTPUT, model=LORA,
)  # fmt: skip
def scale_not_divided_by_rank() -> Any:
    return patch.object(Lora, "scale", property(lambda lora: lora.alpha))


@fault(
    "the adapter of a row is added behind the sum over tensor ranks",
    known="an adapter module around a parallel linear: each rank adds the product of its own inputs",
    layout="tp2", expects=OUTPUT, model=LORA,
)  # fmt: skip
def adapter_of_a_row_not_summed() -> Any:
    def biased(linear: Any, multiply: Any, reduce: Any) -> Any:
        def forward(x: Tensor) -> Tensor:
            out = reduce(multiply(x))
            if hasattr(linear, "branch"):
                more = linear.branch(x)
                size = out.shape[1]
                at = dist.get_rank() * size if size < more.shape[1] else 0
                out = out + more[:, at : at + size]
            return out if linear.bias is None else out + linear.bias

        return forward

    return patch.object(linears, "_biased", biased)


def _without_sums(leaf: str) -> Any:
    """Gradients of such a matrix are not summed over tensor ranks."""
    plain = lower.gradient_sums

    def sums(*given: Any, **options: Any) -> dict[str, str]:
        return {name: axis for name, axis in plain(*given, **options).items() if not name.endswith(leaf)}

    return patch.object(lower, "gradient_sums", sums)


@fault(
    "the gradient of A of a column is that of a rank's own outputs",
    known="A is whole on every rank, and treated as replicated",
    layout="tp2", expects=[("gradient, reduced", r"lora_A")], model=LORA,
)  # fmt: skip
def gradient_of_a_column_a_not_summed() -> Any:
    return _without_sums("lora_A.weight")


@fault(
    "the gradient of B of a row is that of a rank's own inputs",
    known="B is whole on every rank, and treated as replicated",
    layout="tp2+nosp", expects=[("gradient, reduced", r"lora_B")], model=LORA,
)  # fmt: skip
def gradient_of_a_row_b_not_summed() -> Any:
    return _without_sums("lora_B.weight")


@fault(
    "B beside q, k and v in one projection is cut into halves",
    known="a merged projection cut as if it were one",
    layout="tp2", expects=[("weight|shards|output", r"")], model=Model("phi3", adapter=True),
)  # fmt: skip
def b_of_a_merged_projection_cut_into_halves() -> Any:
    plain = adapter_facts._roles

    def roles(of: Role | None) -> tuple[Role | None, Role | None]:
        a, b = plain(of)
        is_merged = of is not None and of.kind == "column" and len({each.owner for each in of.groups or ()}) > 1
        return a, replace(b, groups=None) if b is not None and is_merged else b

    return patch.object(adapter_facts, "_roles", roles)


@fault(
    "B is left out of the gradient norm",
    known="a norm over one group of parameters",
    layout="single", expects=[("gradient norm|gradient, clipped", r"")], model=LORA,
)  # fmt: skip
def adapters_left_out_of_the_norm() -> Any:
    plain = training_step.local_gradients

    def some(model: nn.Module) -> list[tuple[str, Tensor]]:
        return [each for each in plain(model) if "lora_B" not in each[0]]

    norm = training_step.squared_norm

    def squared(model: nn.Module) -> Tensor:
        with patch.object(training_step, "local_gradients", some):
            return norm(model)

    return patch.object(training_step, "squared_norm", squared)


@fault(
    "frozen weights decay",
    known="a decay that is applied to all parameters, those without a gradient too",
    layout="single", expects=[("update", r"")], model=LORA,
)  # fmt: skip
def frozen_weights_decay() -> Any:
    plain = adamw.RULE.build

    def build(model: nn.Module, options: Any, *rest: Any) -> torch.optim.Optimizer:
        optimizer = plain(model, options, *rest)

        def decay(*_: Any) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    if not parameter.requires_grad:
                        parameter.mul_(1 - 1e-3)

        optimizer.register_step_post_hook(decay)
        return optimizer

    return patch.object(type(adamw.RULE), "build", lambda rule, *given: build(*given))


@fault(
    "the weights beside adapters are trained as well",
    known="freezing that misses parameters made later",
    layout="single", expects=[("gradient.*|coverage|collectives", r"")], model=LORA,
)  # fmt: skip
def base_not_frozen() -> Any:
    plain = runtime._freeze

    def freeze(model: nn.Module) -> None:
        plain(model)
        for name, parameter in model.named_parameters():
            if name.endswith("q_proj.weight"):
                parameter.requires_grad_(True)

    return patch.object(runtime, "_freeze", freeze)


# ---- beside experts --------------------------------------------------------------------------------------------------

MIXTRAL = Model("mixtral", adapter=True, of_experts=True)
OF_EXPERTS = [("output", r"mlp\.experts")]


def _beside_experts(change: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, float]]) -> Any:
    """The adapters of experts are changed where they multiply: A, B and the scale."""
    plain = runtime._low_rank

    def low_rank(linears: Any, x_SI: Tensor, counts_E: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return plain(linears, x_SI, counts_E, *change(a, b, scale))

    return patch.object(runtime, "_low_rank", low_rank)


@fault(
    "an expert has the A of its neighbour",
    known="two matrices of all experts, of which one is laid out by experts first and one by experts last",
    layout="shard2.ep2", expects=OF_EXPERTS, model=MIXTRAL,
)  # fmt: skip
def a_of_another_expert() -> Any:
    return _beside_experts(lambda a, b, scale: (a.roll(1, 0), b, scale))


@fault(
    "the adapters of experts are not scaled",
    known="a scale that a layer of its own applies, left out of a grouped product",
    layout="single", expects=OF_EXPERTS, model=MIXTRAL,
)  # fmt: skip
def scale_lost_for_experts() -> Any:
    return _beside_experts(lambda a, b, scale: (a, b, 1.0))


@fault(
    "the gradient of an expert's A is that of a tp rank's own features",
    known="A is whole on every rank of expert tensor parallelism, and treated as replicated",
    layout="tp2+etp", expects=[("gradient, reduced", r"experts\.lora_A\.gate_up_proj")], model=MIXTRAL,
)  # fmt: skip
def gradient_of_an_experts_a_not_summed() -> Any:
    return _without_sums("experts.lora_A.gate_up_proj")


# ---- a base in four bits ---------------------------------------------------------------------------------------------

WIDE = (("hidden_size", 128), ("head_dim", 32), ("intermediate_size", 256))
QLORA = Model(adapter=True, quantize="nf4", changes=WIDE)


@fault(
    "the two numbers of a byte change places",
    known="codes packed with the first in the low half, read with the first in the high half",
    layout="shard2", expects=[("weight", r"proj")], model=QLORA,
)  # fmt: skip
def halves_of_a_byte_change_places() -> Any:
    plain = nf4._pairs
    return patch.object(nf4, "_pairs", lambda device: plain(device).flip(-1))


@fault(
    "one of the 16 levels is that of an even spacing",
    known="FP4's or int4's levels, taken for those of NF4",
    layout="single", expects=[("weight", r"proj")], model=QLORA,
)  # fmt: skip
def level_of_another_type() -> Any:
    plain, level = nf4._pairs, nf4.LEVELS[3]
    return patch.object(nf4, "_pairs", lambda device: torch.where(plain(device) == level, -0.4, plain(device)))


@fault(
    "a rank of tp has the scales of other columns",
    known="a row that is cut, and whose scales are not",
    layout="tp2", expects=[("weight", r"proj")], model=QLORA,
)  # fmt: skip
def scales_of_other_columns() -> Any:
    plain = nf4.restored

    def turned(packed: Tensor, dtype: torch.dtype) -> Tensor:
        half = nf4_numbers(packed.shape[-1]) // 2
        if half > 32 and dist.get_rank() == 1:
            packed = torch.cat([packed[:, :half], packed[:, half:].roll(4, -1)], dim=-1)
        return plain(packed, dtype)

    return patch.object(nf4, "restored", turned)


@fault(
    "weights are restored once, and backward goes through what was not rounded",
    known="a gradient of the input by the weights in 16 bits that were kept beside those in four",
    layout="single", expects=[("gradient of output", r"")], model=QLORA,
)  # fmt: skip
def backward_through_another_rounding() -> Any:
    plain = nf4.Nf4.gradients

    def rounded(self: Any, grads: Any, weights: Any, kept: Any, **options: Any) -> Any:
        back, later = plain(self, grads, weights, kept, **options)
        return back if back is None else back * 1.01, later

    return patch.object(nf4.Nf4, "gradients", rounded)
