"""Bugs of what a layer keeps for its second forward."""

from typing import Any
from unittest.mock import patch

from torch import Tensor

from fivefold.ops import keep
from tests.verification.faults.fault import fault

_IN_BACKWARD = [("gradient of output", r"layers\.")]


@fault(
    "a kept product rounded to bf16",
    known="saved tensors that are packed in fewer bits",
    layout="tp2+selective",
    expects=_IN_BACKWARD,
)
def kept_rounded() -> Any:
    plain = keep._Held.taken

    def taken(held: keep._Held) -> Tensor:
        own = plain(held)
        return own.bfloat16().type(own.dtype) if own.is_floating_point() else own

    return patch.object(keep._Held, "taken", taken)


@fault(
    "a kept product of one linear stands for that of the next",
    known="caches of recompute that count calls: pytorch #175258",
    layout="shard2+selective",
    expects=_IN_BACKWARD,
)
def kept_of_another() -> Any:
    plain = keep._Block._taken

    def taken(block: keep._Block) -> Any:
        first = next(iter(block.values), None)
        shapes = [_shape(each) for each in list(block.values)[:2]]
        if len(shapes) == 2 and shapes[0] is not None and shapes[0] == shapes[1]:
            block.values.popleft()
            block.values.insert(1, first)
        return plain(block)

    return patch.object(keep._Block, "_taken", taken)


def _shape(value: Any) -> tuple[int, ...] | None:
    """Of a product that is kept."""
    held = value[0] if isinstance(value, tuple) and value else value
    return tuple(held.own.shape) if isinstance(held, keep._Held) else None
