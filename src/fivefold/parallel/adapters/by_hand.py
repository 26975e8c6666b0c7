"""LoRA on the unmodified model: the reference for `parallel/adapters/facts.py`.

Linears get forward hooks. Experts run the model's own loop, with W replaced by W + scale B A for each expert.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models.build import meta_of_folder
from fivefold.models.discover import facts_of
from fivefold.models.hf_internals import is_experts
from fivefold.models.random_stream import Region
from fivefold.models.sources import TensorSource
from fivefold.parallel.adapters.facts import targets_of
from fivefold.parallel.adapters.nf4 import LEVELS
from fivefold.parallel.adapters.settings import NF4_BLOCK, Lora


class Drawn(TensorSource):
    """Random fp32 matrices for the adapter of the model in a folder. A zero would hide the gradient of the other."""

    def __init__(self, folder: Path, lora: Lora, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed + 1_000_039)
        self.values = dict[str, Tensor]()
        for target in targets_of(facts_of(meta_of_folder(folder)), lora):
            for name, size in target.shapes(lora.rank).items():
                self.values[name] = torch.randn(size, generator=generator) * size[-1] ** -0.5
        self.shapes = {name: tuple(values.shape) for name, values in self.values.items()}

    def read(self, name: str, region: Region) -> Tensor:
        return self.values[name][region]


def in_nf4(weight: Tensor) -> Tensor:
    """Round a weight to four bits (NF4), in fp32: the nearest of 16 levels times the largest of its block of 64."""
    levels = torch.tensor(LEVELS, device=weight.device)
    blocks = weight.float().reshape(-1, NF4_BLOCK)
    scales = blocks.abs().amax(dim=-1, keepdim=True)
    nearest = ((blocks / scales).unsqueeze(-1) - levels).abs().argmin(dim=-1)
    return (levels[nearest] * scales).view_as(weight)


class _Matrices(nn.Module):
    """Holds parameters under their names in a model; computes nothing."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


def put_adapter(model: Any, lora: Lora, values: Mapping[str, Tensor], compute: torch.dtype) -> None:
    """Add an adapter to linears and experts of `model`. The rest is frozen, and rounded to the compute dtype."""
    scale = lora.scale
    for name in values if lora.quantize == "nf4" else ():
        if name.endswith(".lora_A.weight"):
            weight = model.get_parameter(name.replace(".lora_A.weight", ".weight"))
            weight.data = in_nf4(weight.data).to(weight.dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(compute).to(parameter.dtype)
    of_module: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, value in values.items():
        module, matrix, leaf = name.rsplit(".", 2)
        of_module.setdefault(module, {}).setdefault(matrix, {})[leaf] = value
    for name, matrices in of_module.items():
        module = model.get_submodule(name)
        dtype = next(module.parameters()).dtype
        for matrix, held in matrices.items():
            module.add_module(matrix, _Matrices({leaf: tensor.to(dtype) for leaf, tensor in held.items()}))
        if is_experts(module):
            module.forward = partial(_beside_experts, module, module.forward, scale)
        else:
            module.register_forward_hook(partial(_beside_linear, scale, lora.dropout))


def _beside_linear(scale: float, p: float, module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Add scale B A dropout(x) to the output of a linear."""
    x = F.dropout(args[0], p, module.training)
    return out + scale * F.linear(F.linear(x, module.lora_A.weight), module.lora_B.weight)


def _beside_experts(module: Any, plain: Callable[..., Tensor], scale: float, *args: Any, **kwargs: Any) -> Tensor:
    """Run the forward of experts with the weights W + scale B A."""
    others = {}
    for name, a in module.lora_A.named_parameters():
        more = torch.stack([scale * (b @ a) for a, b in zip(a, module.lora_B.get_parameter(name), strict=True)])
        others[name] = module.get_parameter(name) + (more.transpose(1, 2) if module.is_transposed else more)
    with patch.dict(module.__dict__, others):  # attribute lookup finds these before the parameters
        return plain(*args, **kwargs)
