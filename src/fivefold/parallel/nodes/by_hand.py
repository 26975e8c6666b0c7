"""Gathers in eight bits in the reference: each weight as every rank has it, by NumPy.

It shares only the length of a block with `wire.py`.
"""

import numpy as np
import torch
from torch import Tensor

from fivefold.core.state_dtypes import block_length


def sent(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a parameter, cast to `dtype`, as a gather does."""
    cast = weight.to(dtype)
    length = block_length(weight.shape[-1]) if weight.ndim > 1 else 0
    if not length:
        return cast
    blocks = cast.cpu().to(torch.float64 if dtype == torch.float64 else torch.float32).numpy().reshape(-1, length)
    step = np.max(np.abs(blocks), axis=1, keepdims=True) / 127
    codes = np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    return torch.from_numpy(codes * step).view(weight.shape).to(dtype).to(weight.device)
