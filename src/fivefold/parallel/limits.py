"""What a model that has been traced allows of a layout: the facts that `legality` asks for."""

from collections.abc import Sequence
from math import gcd
from typing import Any

from torch import nn

from fivefold.core.errors import UserError
from fivefold.core.legality import ModelLimits
from fivefold.models.anatomy import Anatomy
from fivefold.models.partition import Partition
from fivefold.models.trace import Experts, Trace
from fivefold.parallel import stages
from fivefold.parallel.expert_features import feature_splits


def limits_of(
    model: Any, anatomy: Anatomy, traced: Trace, partition: Partition | None, *, expert_tp: bool = False
) -> ModelLimits:
    """The limits of `model`. Without a `partition` nothing is said of tensor parallelism, without `expert_tp` nothing
    of the features of its experts."""
    refusals = {"pp": stages.refusal(model, anatomy, traced)}
    if partition:
        refusals |= {"tp": partition.refusal, "sequence_parallel": partition.sequence_parallel_refusal}
    features = None
    if expert_tp and traced.experts:
        features, refusals["expert_tp"] = _features(model, traced.experts)
    counts = tuple(zip(*partition.heads, strict=True)) if partition and not partition.refusal else ()
    query, kv = (gcd(*each) for each in counts) if counts else (None, None)  # layers may differ: tp fits all of them
    return ModelLimits(
        name=type(model).__name__,
        query=query,
        kv=kv,
        attended=_attended(traced),
        fused=_fused(partition) if partition else None,
        layers=len(anatomy.layers),
        experts=min((each.experts for each in traced.experts), default=0),
        expert_features=features,
        refusals={axis: reason for axis, reason in refusals.items() if reason},
    )


def _attended(traced: Trace) -> tuple[int, int] | None:
    """The fewest query heads and the fewest key/value heads that an attention function is given."""
    events = [event for block in traced.blocks for event in block.events if event.kind == "attention"]
    counts = [tuple(each.shape[1] for each in event.inputs[:2]) for event in events]
    return (min(query for query, _ in counts), min(kv for _, kv in counts)) if counts else None


def _fused(partition: Partition) -> str | None:
    """A parameter that makes query heads and key/value heads at once."""
    fused = (name for name, role in partition.roles.items() if {"query", "kv"} <= {p.owner for p in role.deal or ()})
    return next(fused, None)


def _features(model: nn.Module, experts: Sequence[Experts]) -> tuple[int | None, str | None]:
    """(the features of an expert, why they cannot be split); of the layer that has the fewest."""
    sizes = []
    for each in experts:
        try:
            splits = feature_splits(each.name, model.get_submodule(each.name), 1)
        except UserError as error:
            return None, error.what.removeprefix("expert_tp: ")
        sizes.append(splits["down_proj"].blocks[0][0][1])
    return min(sizes), None
