"""LoRA beside the unmodified model, by hooks: the reference of what `models/adapter_facts.py` describes."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.lora import NF4_BLOCK
from fivefold.models.adapter_facts import targets_of
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.discover import facts_of
from fivefold.models.random_stream import Region
from fivefold.models.sources import TensorSource
from fivefold.ops.nf4 import LEVELS
from fivefold.verification.proof_case import ProofCase


class Drawn(TensorSource):
    """Random matrices for the adapters of a case, fp32. None is zero, or it would hide the gradient of the other."""

    def __init__(self, case: ProofCase) -> None:
        assert case.adapter is not None
        generator = torch.Generator().manual_seed(case.seed + 1_000_039)
        self.values = dict[str, Tensor]()
        for each in targets_of(facts_of(build_meta(load_model_config(case.folder))), case.adapter):
            sizes = (case.adapter.rank, each.inputs), (each.outputs, case.adapter.rank)
            for name, size in zip(each.weights, sizes, strict=True):
                self.values[name] = torch.randn(size, generator=generator) * size[1] ** -0.5
        self.shapes = {name: tuple(values.shape) for name, values in self.values.items()}

    def read(self, name: str, region: Region) -> Tensor:
        """See `TensorSource`."""
        return self.values[name][region]


def in_nf4(weight: Tensor) -> Tensor:
    """A weight once it has been in four bits, fp32: the nearest of 16 levels times the largest of its block of 64."""
    levels = torch.tensor(LEVELS, device=weight.device)
    blocks = weight.float().reshape(-1, NF4_BLOCK)
    scales = blocks.abs().amax(dim=-1, keepdim=True)
    nearest = ((blocks / scales).unsqueeze(-1) - levels).abs().argmin(dim=-1)
    return (levels[nearest] * scales).view_as(weight)


class _Matrix(nn.Module):
    """Holds a parameter under the name that it has in a model, and computes nothing."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values.clone())


def put(model: Any, case: ProofCase, values: Mapping[str, Tensor], compute: torch.dtype) -> None:
    """Put the adapters of a case beside the linears of `model`. All else is frozen, and rests in the type that it
    computes in."""
    assert case.adapter is not None
    scale = case.adapter.scale
    for name in values if case.adapter.quantize == "nf4" else ():
        if name.endswith(".lora_A.weight"):
            weight = model.get_parameter(name.replace(".lora_A.weight", ".weight"))
            weight.data = in_nf4(weight.data).to(weight.dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(compute).to(parameter.dtype)
    for name, a in values.items():
        if not name.endswith(".lora_A.weight"):
            continue
        linear = model.get_submodule(name.removesuffix(".lora_A.weight"))
        dtype = next(linear.parameters()).dtype
        linear.lora_A, linear.lora_B = (
            _Matrix(each.to(dtype)) for each in (a, values[name.replace(".lora_A.", ".lora_B.")])
        )
        linear.register_forward_hook(
            lambda module, args, out: (
                out + scale * F.linear(F.linear(args[0], module.lora_A.weight), module.lora_B.weight)
            )
        )
