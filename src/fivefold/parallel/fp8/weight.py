"""A weight cast to fp8 before FSDP gathers it: numbers of eight bits and one scale, which stand for a tensor of the
compute dtype. fp8 products use the two as they are; every other operation sees the dequantised weight.

An all-gather extension of FSDP2 makes it, as in torchao's float8 training.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.torch_internals import NO_TORCH_FUNCTION

Rounded = tuple[Tensor, Tensor]  # fp8 numbers, and the scale that they were multiplied by

_VIEWS = frozenset(
    (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.t.default,
     torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.as_strided.default)
)  # fmt: skip


class Fp8Weight(Tensor):
    """A weight [O, I] of `dtype`: `codes` [O, I] in e4m3 divided by `scale` [1, 1].

    `codes` may share storage that FSDP frees and fills again; `scale` is replaced then.
    """

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> "Fp8Weight":
        return Tensor._make_wrapper_subclass(cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    def restored(self) -> Tensor:
        """Dequantise the weight to a plain tensor."""
        return (self.codes.to(self.scale.dtype) / self.scale).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fp8Weight({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> "Fp8Weight":
        return Fp8Weight(inner["codes"], inner["scale"], dtype)

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _VIEWS:
            own: Fp8Weight = args[0]
            return Fp8Weight(func(own.codes, *args[1:], **(kwargs or {})), own.scale, own.dtype)
        plain = torch.utils._pytree.tree_map_only(Fp8Weight, Fp8Weight.restored, (args, kwargs or {}))
        return func(*plain[0], **plain[1])
