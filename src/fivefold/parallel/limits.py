"""Limits that a traced model sets to a layout: the facts that `legality` asks for. No torch."""

from math import gcd

from fivefold.core.model_limits import ModelLimits
from fivefold.models.anatomy import is_within
from fivefold.models.facts import ORDERS, Experts, ModelFacts, Partition


def limits_of(facts: ModelFacts) -> ModelLimits:
    """The limits of a model."""
    partition, attends = facts.partition, facts.attends.values()
    counts = tuple(zip(*partition.heads, strict=True)) if not partition.refusal else ()
    query, kv = (gcd(*each) for each in counts) if counts else (None, None)  # layers may differ: tp fits all of them
    reasons = [reason for each in facts.experts if (reason := features_refusal(facts, each))]
    refusals = {
        "pp": _stages_refusal(facts), "tp": partition.refusal, "sequence_parallel": partition.sequence_parallel_refusal,
        "expert_tp": next(iter(reasons), None),
    }  # fmt: skip
    return ModelLimits(
        name=facts.model_class,
        query=query,
        kv=kv,
        attended=(min(each.query for each in attends), min(each.kv for each in attends)) if attends else None,
        fused=_fused(partition),
        layers=len(facts.anatomy.layers),
        experts=min((each.experts for each in facts.experts), default=0),
        expert_features=None if reasons else min((_features(facts, each) for each in facts.experts), default=None),
        refusals={axis: reason for axis, reason in refusals.items() if reason},
    )


def _stages_refusal(facts: ModelFacts) -> str | None:
    """Reason why no layout can cut the model into pipeline stages; None if one can."""
    name, anatomy = facts.model_class, facts.anatomy
    if facts.carried:
        return f"in {name}, {facts.carried}, and a stage is sent no more"
    places = (*anatomy.layers, *facts.before, *facts.after, anatomy.head, anatomy.embedding)
    for parameter in facts.parameters:
        if not is_within(parameter, places):
            return f"{parameter} of {name} is in none of its layers, nor in the modules before or after them"
    if twice := set(facts.before) & set(facts.after):
        return f"{sorted(twice)[0]} of {name} runs both before and after its layers"
    return None


def _fused(partition: Partition) -> str | None:
    """Parameter that makes query heads and key/value heads at once, if any."""
    fused = (name for name, role in partition.roles.items() if {"query", "kv"} <= {p.owner for p in role.groups or ()})
    return next(fused, None)


def _features(facts: ModelFacts, experts: Experts) -> int:
    """Number of features of an expert."""
    assert experts.features is not None, "they are found with the facts"
    return facts.parameters[f"{experts.name}.down_proj"].shape[experts.features.read]


def features_refusal(facts: ModelFacts, experts: Experts) -> str | None:
    """Reason why the features of these experts cannot be split over ranks, or None."""
    features, name = experts.features, experts.name
    assert features is not None, "they are found with the facts"
    reason = features.refusal
    if reason is None:
        made = facts.parameters[f"{name}.{features.first}"].shape[features.made]
        size = facts.parameters[f"{name}.down_proj"].shape[features.read]
        if made != ORDERS[features.order][0] * size:
            reason = f"{features.first} makes {made} numbers for {size} features"
    return f"the features of {name} cannot be split: {reason}" if reason else None
