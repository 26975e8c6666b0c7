"""Where the inner features of experts lie in their parameters, so that each rank can have some of every expert.

An expert computes `down(act(gate_up(x)))` on I features of its own. A rank that has some of them has the columns of
`gate_up_proj` that make them and the rows of `down_proj` that read them, and its results are parts of a sum (Megatron's
expert tensor parallelism). Which columns make a feature is a fact of the model (`ExpertFeatures.order`).

`down_proj_bias` is added to the sum: each rank has, and adds, that of its share of the outputs, so that every number of
it is added once and lies on one rank.
"""

from collections.abc import Mapping

from fivefold.models.facts import ORDERS, Experts, ModelFacts
from fivefold.parallel.sharding import Split, split_even


def features_refusal(facts: ModelFacts, experts: Experts) -> str | None:
    """Why a part of the features would not compute a part of the result; None where it does."""
    features, name = experts.features, experts.name
    assert features is not None, "they are found with the facts"
    reason = features.refusal
    if reason is None:
        made = facts.parameters[f"{name}.{features.first}"].shape[features.made]
        size = facts.parameters[f"{name}.down_proj"].shape[features.read]
        if made != ORDERS[features.order][0] * size:
            reason = f"{features.first} makes {made} numbers for {size} features"
    return f"the features of {name} cannot be split: {reason}" if reason else None


def feature_splits(experts: Experts, shapes: Mapping[str, tuple[int, ...]], parts: int) -> dict[str, Split]:
    """Parameter of a module of experts -> its cut into `parts`, which is legal; `shapes`: of all of its parameters."""
    features = experts.features
    assert features is not None, "they are found with the facts"
    first, made, read = features.first, features.made, features.read
    size, outputs = shapes["down_proj"][read], shapes["down_proj"][made]
    blocks = split_even(size, parts)
    in_first = tuple(ORDERS[features.order][1](block, size) for block in blocks)
    splits = {
        first: Split(made, in_first),
        f"{first}_bias": Split(1, in_first),
        "down_proj": Split(read, tuple((block,) for block in blocks)),
        "down_proj_bias": Split(1, tuple((block,) for block in split_even(outputs, parts))),
    }
    return {leaf: splits[leaf] for leaf in shapes}
