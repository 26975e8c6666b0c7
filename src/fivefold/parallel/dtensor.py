"""DTensors: what FSDP makes of parameters and their gradients."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor; a tensor that is no DTensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(tensor: Tensor, values: Tensor) -> Tensor:
    """`tensor` with other values on this rank, in the same shape, wherever they lie: `DTensor.from_local` would move
    them to the device of the mesh."""
    if not isinstance(tensor, DTensor):
        return values
    return DTensor(values, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
