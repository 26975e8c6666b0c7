"""fp64 everywhere: operations that models compute in fp32 on purpose would put a floor of 1e-7 under every proof."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn


@contextmanager
def exact() -> Iterator[None]:
    """Compute in fp64 inside the block what models compute in fp32 on purpose (norms, softmax)."""

    def instead(plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            return plain(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})

        return call

    with (
        patch.object(torch.Tensor, "to", instead(torch.Tensor.to)),
        patch.object(torch.Tensor, "type", instead(torch.Tensor.type)),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        patch.object(nn.functional, "softmax", instead(nn.functional.softmax)),
        patch.object(torch, "sum", instead(torch.sum)),
    ):
        yield


def exactly(precision: str) -> AbstractContextManager[None]:
    """`exact` if `precision` is fp64; else a no-op."""
    return exact() if precision == "fp64" else nullcontext()
