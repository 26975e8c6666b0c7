"""Operators whose results each depend on at most one number of each tensor: on a part they give a part of the result
for the whole. Torch's tag says so, not a list of operators that do otherwise: an unknown one is not trusted.
"""

from functools import cache
from typing import Any

import torch

from fivefold.torch_internals import of_one

# Not tagged as pointwise: they keep every number at its place, or create or fill tensors.
_SAME_PLACES = {
    "copy", "_to_copy", "clone", "where", "masked_fill", "rsub", "fill", "zero", "scalar_tensor", "_fused_adam",
    "_fused_adamw", "_fused_adagrad", "_fused_sgd",
}  # fmt: skip
_NEW = ("ones", "zeros", "full", "empty", "new_")
# They pick or join numbers: a pick by position takes other numbers of a part than of the whole.
_PICKS = {
    "index", "index_select", "index_put", "index_copy", "index_fill", "gather", "take", "masked_select", "nonzero",
    "cat", "stack",
}  # fmt: skip
_RANDOM = ("rand", "normal", "bernoulli", "uniform")
# Views of all numbers in their order: the transpose of a part is no part of the transpose.
_WHOLE_VIEWS = {
    "detach", "alias", "view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "expand", "lift_fresh",
}  # fmt: skip


@cache
def keeps_places(operator: Any) -> bool:
    """True if each result depends on the numbers at its own place alone, so that it may be computed on a part."""
    name, plain = operator.overloadpacket.__name__, _plain(operator)
    if plain in _SAME_PLACES or plain in _WHOLE_VIEWS or plain.startswith(_NEW):
        return True
    packet = getattr(torch.ops.aten, plain, operator.overloadpacket)
    if name != plain + "_" * name.endswith("_"):  # foreach operators: `max` reduces each tensor, `maximum` does not
        overloads = packet.overloads()  # by getattr: `__getattr__` would make new ones, which DTensor does not know
        return "dim" not in overloads and any(_is_pointwise(getattr(packet, overload)) for overload in overloads)
    return _is_pointwise(operator) or _is_pointwise(getattr(packet, str(operator).rpartition(".")[2], operator))


@cache
def mixes_nothing(operator: Any) -> bool:
    """True if each result depends on at most one number of each tensor, wherever that stands. Drawing is mixing
    nothing."""
    return keeps_places(operator) or _plain(operator) in _PICKS or _plain(operator).startswith(_RANDOM)


def _plain(operator: Any) -> str:
    return of_one(operator.overloadpacket.__name__).removesuffix("_")


def _is_pointwise(operator: Any) -> bool:
    is_drawn = torch.Tag.nondeterministic_seeded in operator.tags  # ranks would draw the same for different parts
    return torch.Tag.pointwise in operator.tags and not is_drawn and operator.overloadpacket.__name__ != "equal"
