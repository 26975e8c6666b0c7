"""DTensors, which FSDP makes of parameters and their gradients."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fivefold.torch_internals import assign


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, apart from autograd; a plain tensor is its own shard. (A parameter in host memory
    could not be detached, because it claims to be on the device.)"""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def with_local(tensor: Tensor, values: Tensor) -> Tensor:
    """`tensor` with other values on this rank, on any device: `from_local` would move them to the mesh's device."""
    if not isinstance(tensor, DTensor):
        return values
    return DTensor(values, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def put_local(tensor: Tensor, values: Tensor) -> None:
    """Replace a DTensor's values on this rank, by values on any device. It reports the device of its making."""
    assert isinstance(tensor, DTensor), "parameters of a parallelized model are DTensors"
    assign(tensor, _local_tensor=values)


def zeros_by_block(like: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Zeros, one for each `length` of a row of `like`, sharded like it, on the device that it reports."""
    if length == 1:
        return torch.zeros_like(like, dtype=dtype, device=like.device)
    own, shape = local(like), (*like.shape[:-1], like.shape[-1] // length)
    zeros = torch.zeros(*own.shape[:-1], shape[-1], dtype=dtype, device=like.device)
    if not isinstance(like, DTensor):
        return zeros
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
