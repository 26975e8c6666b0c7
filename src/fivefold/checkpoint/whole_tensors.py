"""Tensors that are written whole, and the type that they are written in."""

from typing import Protocol

import torch

from fivefold.core.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class WholeTensors(Protocol):
    """Tensors by name, each whole on the CPU; requested once, in the order of `ordered`."""

    @property
    def ordered(self) -> tuple[str, ...]:
        """Names in the model's order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        ...

    def whole(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        ...


def export_dtype(
    asked: str | None, *, came_in: str | torch.dtype | None = None, trained: torch.dtype = torch.float32
) -> torch.dtype:
    """The type of exported weights: `asked` (bf16, fp16, fp32, fp64); else the original type, from the config of the
    starting model; else the type trained in, fp32 except in tests. Raises `UserError` for an unknown one."""
    if asked is not None and asked not in DTYPES:
        raise UserError(f"dtype {asked!r} is not known", fix=f"choose one of {', '.join(DTYPES)}")
    if asked is not None:
        return DTYPES[asked]
    found = getattr(torch, came_in, None) if isinstance(came_in, str) else came_in
    return found if isinstance(found, torch.dtype) and found in DTYPES.values() else trained


def cast(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` in `dtype`; integers stay unchanged. Raises `UserError` if a weight is too large for it (fp16)."""
    if not values.is_floating_point():
        return values
    stored = values.to(dtype)
    if dtype is torch.float16 and bool((stored.isinf() & values.isfinite()).any()):
        raise UserError(f"{name} has values beyond fp16, which ends at 65,504", fix="choose bf16 or fp32")
    return stored
