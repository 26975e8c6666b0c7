"""Expert tensor parallelism (`expert_tp`): which part of every expert's parameters a tp rank holds.

An expert computes `down(act(gate_up(x)))` through I inner features. A rank holds some of these features: the columns of
`gate_up_proj` that make them and the rows of `down_proj` that read them. Its result is a partial sum over features.
`ExpertFeatures.order` says which columns make a feature. Example: I = 6 over tp2, gate before up. Rank 0 has the
features 0 to 2, so the columns 0 to 2 (gate) and 6 to 8 (up).

Each rank holds `down_proj_bias` for its share of the outputs, and adds it to its partial sum. So every number of the
bias lies on one rank and is added once.
"""

from collections.abc import Mapping

from fivefold.models.facts import ORDERS, Experts, ModelFacts
from fivefold.parallel.sharding import Split, split_even


def features_refusal(facts: ModelFacts, experts: Experts) -> str | None:
    """Why the features of these experts cannot be split over ranks, or None."""
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
