"""A model's own tensors as a source: for a model that already has its values."""

import torch
from torch import nn

from fivefold.models.experts import router_buffers
from fivefold.models.random_stream import Region


class ModelTensors:
    """The parameters of `model` as they are now, and what its routers keep; the model itself may be cut and sharded
    afterwards."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._tensors |= {name: model.get_buffer(name).clone() for name in router_buffers(model)}

    def names(self) -> set[str]:
        """Parameter names; tied parameters once."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of parameter `name`."""
        return tuple(self._tensors[name].shape)

    def read(self, name: str, region: Region) -> torch.Tensor:
        """The values of `region` (one slice per dimension), a view."""
        return self._tensors[name][region]
