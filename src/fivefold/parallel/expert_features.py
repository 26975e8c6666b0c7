"""Where the inner features of experts lie in their parameters, so that each rank can have some of every expert.

An expert computes `down(act(gate_up(x)))` on I features of its own. A rank that has some of them has the columns of
`gate_up_proj` that make them and the rows of `down_proj` that read them, and its results are parts of a sum (Megatron's
expert tensor parallelism). Which columns make a feature is a fact of the model (`ExpertFeatures.order`).

`down_proj_bias` is added to the sum: each rank has, and adds, that of its share of the outputs, so that every number of
it is added once and lies on one rank.
"""

from collections.abc import Mapping

from fivefold.core.errors import UserError
from fivefold.models.facts import ORDERS, Experts
from fivefold.parallel.sharding import Split, split_even


def feature_splits(experts: Experts, shapes: Mapping[str, tuple[int, ...]], parts: int) -> dict[str, Split]:
    """Parameter of a module of experts -> its cut into `parts`; `shapes`: of all of its parameters.

    Raises `UserError`, naming the reason, where a part of the features would not compute a part of the result.
    """
    name, features = experts.name, experts.features
    assert features is not None, "they are found with the facts"
    if features.refusal:
        raise _refused(name, features.refusal)
    first, made, read = features.first, features.made, features.read
    size, outputs = shapes["down_proj"][read], shapes["down_proj"][made]
    inputs, order = ORDERS[features.order]
    if shapes[first][made] != inputs * size:
        raise _refused(name, f"{first} makes {shapes[first][made]} numbers for {size} features")
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
    return {leaf: splits[leaf] for leaf in shapes}


def _refused(name: str, reason: str, fix: str = "set layout.expert_tp: false") -> UserError:
    return UserError(f"expert_tp: the features of {name} cannot be split: {reason}", fix=fix)
