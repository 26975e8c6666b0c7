"""Where the inner features of experts lie in their parameters, so that each rank can have some of every expert.

An expert computes `down(act(gate_up(x)))` on I features of its own. A rank that has some of them has the columns of
`gate_up_proj` that make them and the rows of `down_proj` that read them, and its results are parts of a sum (Megatron's
expert tensor parallelism). Which columns make a feature is the gate's business: a model's `_apply_gate` is tried on a
few numbers, and what fits none of the orders below is refused.

`down_proj_bias` is added to the sum: each rank has, and adds, that of its share of the outputs, so that every number of
it is added once and lies on one rank.

Legend: E experts, D hidden size, I features of an expert, p inputs that the activation makes a feature of.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import UserError
from fivefold.parallel.sharding import Block, Blocks, Split, split_even

Order = Callable[[Block, int], Blocks]  # features [start, stop) of I -> the inputs that the activation makes them of

ORDERS: Mapping[str, tuple[int, Order]] = {  # name -> p, order
    "one by one": (1, lambda block, _: (block,)),
    "gate, then up": (2, lambda block, size: (block, (size + block[0], size + block[1]))),
    "gate beside up": (2, lambda block, _: ((2 * block[0], 2 * block[1]),)),
}
_FEATURES, _PARTS, _ROWS = 7, ((0, 4), (4, 7)), 64  # of what is tried


def feature_splits(name: str, module: Any, parts: int) -> dict[str, Split]:
    """Parameter of the experts `module` -> its cut into `parts`.

    Raises `UserError`, naming the reason, where a part of the features would not compute a part of the result.
    """
    parameters = {leaf: tuple(parameter.shape) for leaf, parameter in module.named_parameters()}
    first = "gate_up_proj" if module.has_gate else "up_proj"
    made, read = (2, 1) if module.is_transposed else (1, 2)  # dimensions of what is made, and of what is read
    unknown = parameters.keys() - {first, f"{first}_bias", "down_proj", "down_proj_bias"}
    if unknown or module.has_post_expert_norm:
        what = sorted(unknown)[0] if unknown else "its norm"
        raise _refused(name, f"{what} acts on what all features of an expert have made")
    size, outputs = parameters["down_proj"][read], parameters["down_proj"][made]
    inputs, order = _order(name, module)
    if parameters[first][made] != inputs * size:
        raise _refused(name, f"{first} makes {parameters[first][made]} numbers for {size} features")
    if size < parts:
        raise _refused(name, f"an expert has {size} features", fix=f"use tp {size} or less")
    blocks = split_even(size, parts)
    in_first = tuple(order(block, size) for block in blocks)
    splits = {
        first: Split(made, in_first),
        f"{first}_bias": Split(1, in_first),
        "down_proj": Split(read, tuple((block,) for block in blocks)),
        "down_proj_bias": Split(1, tuple((block,) for block in split_even(outputs, parts))),
    }
    return {leaf: splits[leaf] for leaf in parameters}


def _order(name: str, module: Any) -> tuple[int, Order]:
    """The order in which the activation of `module` reads its inputs, found by trying it: of a part of the features it
    must make what it makes of them among all."""
    activate, inputs = (module._apply_gate, 2) if module.has_gate else (module.act_fn, 1)
    x = 3 * torch.randn(_ROWS, inputs * _FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        whole = activate(x)
        for per_feature, order in ORDERS.values():
            if per_feature == inputs and all(_agrees(activate, order, x, whole, part) for part in _PARTS):
                return per_feature, order
    except Exception as error:  # the model's own code
        raise _refused(name, f"its activation cannot be tried ({type(error).__name__}: {error})") from error
    raise _refused(name, f"which of {inputs} inputs its activation makes a feature of is in no order that is known")


def _agrees(activate: Callable[[Tensor], Tensor], order: Order, x: Tensor, whole: Tensor, part: Block) -> bool:
    mine = torch.cat([x[:, start:stop] for start, stop in order(part, _FEATURES)], dim=1)
    expected, found = whole[:, slice(*part)], activate(mine)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def _refused(name: str, reason: str, fix: str = "set layout.expert_tp: false") -> UserError:
    return UserError(f"expert_tp: the features of {name} cannot be split: {reason}", fix=fix)
