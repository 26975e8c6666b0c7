"""Expert parallelism: edits of modules, and collectives between ranks. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.core.model_limits import ModelLimits
from fivefold.models.anatomy import is_within
from fivefold.models.facts import ORDERS, Experts, ModelFacts
from fivefold.parallel.collectives import Call
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.step import Step
from fivefold.parallel.tensor.spec import Cut


def limited(limits: ModelLimits, facts: ModelFacts) -> ModelLimits:
    """Add the experts of a model and their features, and the reason why these cannot be split."""
    experts = min((block.experts for block in facts.experts), default=0)
    if reasons := [reason for block in facts.experts if (reason := _features_refusal(facts, block))]:
        return replace(limits, experts=experts).refusing({"expert_tp": reasons[0]})
    features = min((_features(facts, block) for block in facts.experts), default=None)
    return replace(limits, experts=experts, expert_features=features)


def _features(facts: ModelFacts, experts: Experts) -> int:
    assert experts.features is not None, "they are found with the facts"
    return facts.parameters[f"{experts.name}.down_proj"].shape[experts.features.read]


def _features_refusal(facts: ModelFacts, experts: Experts) -> str | None:
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


def calls(step: Step) -> Iterator[Call]:
    """Collectives that send tokens to the ranks of their experts, and the results back.

    The bytes of the all-to-alls assume balanced routing. They are exact only when summed over ranks.
    """
    plan, shape = step.plan, step.shape
    layout = plan.layout
    for block in plan.experts:
        layer = step.layer_of(block.name)
        tokens = shape.rows * shape.tokens // (1 if layout.expert_tp else layout.tp)
        rows = tokens * block.top_k * shape.hidden * shape.compute_bytes
        yield from step.forwards("ep", "all_to_all", block.experts * 8, block.name, is_kept=True)  # how many rows come
        for _ in ("there", "back"):
            yield from step.forwards("ep", "all_to_all", rows, block.name, is_kept=True)
            yield step.call("ep", "all_to_all", rows, "backward", layer)
        if layout.expert_tp:
            yield from _summed_over_tp(step, block, layer)
        elif not plan.splits_sequence:
            yield from _shared_over_tp(step, block, layer)


def _summed_over_tp(step: Step, experts: Experts, layer: str) -> Iterator[Call]:
    """Collectives of `expert_tp`: of the tokens that enter, their gradients, and the sum over tp. A recomputed forward
    stops before the sum if nothing follows it in the layer."""
    shape, site = step.shape, experts.name
    tokens, hidden = shape.rows * shape.tokens, shape.hidden_bytes
    weights = tokens * experts.top_k * max(4, shape.compute_bytes)
    if not step.plan.splits_sequence:
        yield from step.forwards("tp", "all_reduce", hidden, site, is_last=experts.is_last, is_kept=True)
        yield step.call("tp", "all_reduce", hidden, "backward", layer)
        yield step.call("tp", "all_reduce", weights, "backward", layer)
        return
    for size in (hidden, weights, tokens * experts.top_k * 8):  # the last: indices of experts, int64
        yield from step.forwards("tp", "all_gather", size, site)
    yield step.call("tp", "all_gather", hidden, "backward", layer)
    yield from step.forwards("tp", "reduce_scatter", hidden, site, is_last=experts.is_last, is_kept=True)
    yield step.call("tp", "reduce_scatter", hidden, "backward", layer)
    yield step.call("tp", "reduce_scatter", weights, "backward", layer)


def _shared_over_tp(step: Step, experts: Experts, layer: str) -> Iterator[Call]:
    """Collectives of `+nosp`: tp ranks each send their share of the tokens, and results are gathered, padded."""
    shape, tp = step.shape, step.plan.layout.tp
    longest = -(-shape.rows * shape.tokens // tp) * tp
    rows = longest * shape.hidden * shape.compute_bytes
    yield from step.forwards("tp", "all_gather", rows, experts.name, is_last=experts.is_last, is_kept=True)
    yield step.call("tp", "all_gather", rows, "backward", layer)
    yield step.call("tp", "all_gather", longest * experts.top_k * max(4, shape.compute_bytes), "backward", layer)


@dataclass(frozen=True)
class SendRows(Edit):
    kind = "forward"
    experts: Experts


@dataclass(frozen=True)
class RouteInFp32(Edit):
    kind = "forward"


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    placement = plan.placement
    part = placement.grid.shard_index(placement.rank, "ep").part
    for block in plan.facts.experts:
        for name, spec in placement.shards.items():
            if spec.over == "ep" and is_within(name, [block.name]) and spec.local_shape(part) != spec.shape:
                leaf, shape = name.removeprefix(f"{block.name}."), spec.local_shape(part)
                yield Cut(block.name, "ep", f"{leaf}: {shape} of {spec.shape}", name, shape)
        yield SendRows(block.name, "ep", "rows of tokens go to the ranks of their experts", block)
    for router in plan.fp32_routers:
        yield RouteInFp32(router, "router", "scores are computed in fp32")
