"""DTensors: what FSDP makes of parameters and their gradients."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor; a tensor that is no DTensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
