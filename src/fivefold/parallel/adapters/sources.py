"""Sources of weights beside adapters: their first values, a base in four bits, and both merged."""

from collections.abc import Collection, Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from fivefold.models import hf_internals
from fivefold.models.random_stream import RandomStream, Region, Uniform
from fivefold.models.sources import TensorSource
from fivefold.parallel.adapters.facts import A, B, Target
from fivefold.parallel.adapters.nf4 import round_trip
from fivefold.parallel.adapters.settings import Lora


class WithAdapters(TensorSource):
    """A model's weights with new adapters: A as in `peft` (Kaiming uniform), by name and place alone; B zero."""

    def __init__(self, base: TensorSource, targets: Iterable[Target], lora: Lora, seed: int) -> None:
        self._base, self._seed, self.unread = base, seed, base.unread
        self._own = dict[str, tuple[int, ...]]()
        for target in targets:
            self._own |= target.shapes(lora.rank)
        self.shapes = {**base.shapes, **self._own}

    def read(self, name: str, region: Region) -> Tensor:
        if name not in self._own:
            return self._base.read(name, region)
        shape = self._own[name]
        if f".{B}." in name:
            return torch.zeros(()).expand(shape)[tuple(region)].contiguous()
        most = 1 / sqrt(shape[-1])  # torch's kaiming_uniform_ with a = sqrt(5)
        return RandomStream(self._seed, name, shape).draw(region, Uniform(-most, most))


class Layered(TensorSource):
    """The tensors of `first`, and those of `base` that `first` lacks: adapters over the model that they belong to."""

    def __init__(self, first: TensorSource, base: TensorSource) -> None:
        self._first, self._base, self.unread = first, base, base.unread
        self.shapes = {**base.shapes, **first.shapes}

    def read(self, name: str, region: Region) -> Tensor:
        return (self._first if name in self._first.shapes else self._base).read(name, region)


class InNf4(TensorSource):
    """A model's weights; those in `names` are rounded to four bits and back."""

    def __init__(self, base: TensorSource, names: Collection[str]) -> None:
        self._base, self._names, self.shapes = base, frozenset(names), dict(base.shapes)

    def read(self, name: str, region: Region) -> Tensor:
        if name not in self._names:
            return self._base.read(name, region)
        rows, columns = region
        return round_trip(self._base.read(name, (rows, slice(0, self.shapes[name][1]))))[:, columns]


class Merged(TensorSource):
    """A model's weights with its adapters merged in: W + scale * B A, computed in fp32. `transposed`: linears whose
    weight is [I, O], and modules of experts [E, I, O]."""

    def __init__(self, base: TensorSource, adapters: TensorSource, lora: Lora, transposed: Collection[str]) -> None:
        self._base, self._adapters, self._lora, self._transposed = base, adapters, lora, transposed
        self.shapes = dict(base.shapes)

    def read(self, name: str, region: Region) -> Tensor:
        values, (module, _, leaf) = self._base.read(name, region), name.rpartition(".")
        a, b = f"{module}.{A}.{leaf}", f"{module}.{B}.{leaf}"
        if a not in self._adapters.shapes:
            return values
        *experts, out, inner = region
        if module in self._transposed:
            out, inner = inner, out
        every = slice(0, self._lora.rank)
        rows, columns = self._adapters.read(b, (*experts, out, every)), self._adapters.read(a, (*experts, every, inner))
        more = self._lora.scale * (rows.float() @ columns.float())
        return values.float() + (more.mT if module in self._transposed else more)


def transposed_modules(model: Any) -> list[str]:
    """Linears whose weight is [I, O], and modules of experts [E, I, O], by name."""
    of_linears = [name for name, is_transposed in linears(model).items() if is_transposed]
    return of_linears + [name for name, module in experts(model).items() if module.is_transposed]


def experts(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hf_internals.is_experts(module)}


def linears(model: Any) -> dict[str, bool]:
    """The model's linears, by name: True if the weight is [I, O]."""
    dims = {name: hf_internals.linear_dims(module) for name, module in model.named_modules()}
    return {name: order == (1, 0) for name, order in dims.items() if order is not None}
