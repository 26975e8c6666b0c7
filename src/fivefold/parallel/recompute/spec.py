"""Layers that are recomputed in backward: what they keep, and what selective recompute saves of them. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from fivefold.models.anatomy import is_within
from fivefold.models.facts import Matmul
from fivefold.parallel.graphs.spec import GraphPlan
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.step import LayerBytes, LayerNumbers, LayerStep


class RecomputePlan:
    """Linears whose outputs selective recompute saves."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan

    @cached_property
    def linears(self) -> frozenset[str]:
        """Linears of all layers that selective recompute saves: all but routers and a layer's last one."""
        routers = {block.router for block in self._plan.facts.experts}
        last = {block.row for block in self._plan.facts.partition.tp_blocks if block.is_last}
        names = (
            f"{layer}.{matmul.name}".removesuffix(".weight")
            for layer, cost in zip(self._plan.anatomy.layers, self._plan.facts.layer_costs, strict=True)
            for matmul in cost.matmuls
        )
        return frozenset(name for name in names if name not in last and not is_within(f"{name}.", routers))

    def keeps(self, weight: str) -> bool:
        return weight.removesuffix(".weight") in self.linears


# ---- edits of modules ----------------------------------------------------------------------------------------------

Saves = Literal["output", "sum", "nothing"]


@dataclass(frozen=True)
class SaveAttention(Edit):
    kind = "attribute"


@dataclass(frozen=True)
class SaveLinear(Edit):
    """Let a linear save its `output` for the second forward, the `sum` over tp of its outputs, or `nothing`."""

    kind = "forward"
    saves: Saves


@dataclass(frozen=True)
class RecomputeLayer(Edit):
    """Recompute a layer in backward. `in_graph`: inside of its graph. `is_selective`: save expensive results."""

    kind = "forward"
    in_graph: bool
    is_selective: bool


def edits_of_modules(plan: ParallelPlan) -> Iterator[Edit]:
    """Let modules of selectively recomputed layers save results. A graph cannot save these: it breaks there. (A layer
    that is one graph saves by `torch.compile`'s own means.)"""
    rows = {block.row: block.is_last for block in plan.partition.tp_blocks} if plan.reduces_rows else {}
    linears, why = plan.feature(RecomputePlan).linears, "what it gives is kept for the second forward"
    costs = dict(zip(plan.anatomy.layers, plan.facts.layer_costs, strict=True))
    for layer in filter(plan.recompute.keeps, plan.placement.layers):
        if plan.compiled and plan.feature(GraphPlan).is_one_graph(layer):
            continue
        for module in (name for name in plan.facts.attends if is_within(name, [layer])):
            yield SaveAttention(module, "recompute", why)
        for module, is_last in rows.items():
            if is_within(module, [layer]):
                saves: Saves = "nothing" if is_last else "sum"
                kept = "nothing is kept: the second forward ends before it" if is_last else "the sum over tp is kept"
                yield SaveLinear(module, "recompute", kept, saves)
        for weight in (f"{layer}.{matmul.name}" for matmul in costs[layer].matmuls if matmul.name.endswith(".weight")):
            module = weight.removesuffix(".weight")
            if module in linears and module not in rows:
                yield SaveLinear(module, "recompute", why, "output")


def edits_in_graphs(plan: ParallelPlan) -> Iterator[Edit]:
    """Recompute layers that are one graph: their second forward joins the kernels of the backward."""
    return (edit for edit in _edits_of_layers(plan) if edit.in_graph)


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """Recompute the other layers, with all of their graphs."""
    return (edit for edit in _edits_of_layers(plan) if not edit.in_graph)


def _edits_of_layers(plan: ParallelPlan) -> Iterator[RecomputeLayer]:
    why = {
        "selective": "all but products and attention is computed again in backward",
        "full": "its activations are computed again in backward",
    }
    for layer in filter(plan.recompute.wraps, plan.placement.layers):
        in_graph = plan.compiled and plan.feature(GraphPlan).is_one_graph(layer)
        mode = plan.recompute.of(layer)
        yield RecomputeLayer(layer, "recompute", why[mode], in_graph, mode == "selective")


def kept_bytes(step: LayerStep, numbers: LayerNumbers, layer: LayerBytes) -> LayerBytes:
    """Keep a recomputed layer's input, and its expensive results if selective. Backward has the rest once more."""
    shape, expensive = step.shape, 0
    if not shape.recompute.wraps(step.name):
        return layer
    if shape.recompute.keeps(step.name):
        expensive = step.bytes_of(expensive_numbers(step, numbers.exchanged))
    entered = shape.hidden_bytes // step.plan.sequence_ranks
    # A compiled norm reads the input itself, and saves no cast of it.
    again = layer.kept - expensive - entered * shape.compiled
    return replace(layer, kept=entered + expensive, working=layer.working + max(0, again))


def expensive_numbers(step: LayerStep, exchanged: float) -> float:
    """Elements per token that selective recompute saves in a layer: outputs of its linears and of attention, with one
    fp32 statistic of each query, and rows of experts. The last linear's output is saved only if it multiplies in a
    precision of its own, because such linears save their own products. `exchanged`: see `LayerNumbers`; queries are
    then saved twice, too."""
    plan, shape, recompute = step.plan, step.shape, step.plan.feature(RecomputePlan)
    tp, roles, attention = plan.layout.tp, plan.facts.partition.roles, step.cost.attention
    save_own = set() if plan.reduces_rows else {linear.name for linear in plan.matmuls.linears}
    statistic = max(4, shape.compute_bytes) / shape.compute_bytes
    inside = sum(heads.query * (heads.value_size + statistic) for heads in attention)
    outside = exchanged
    if exchanged:
        outside += sum(heads.query * heads.key_size for heads in attention) / tp
    for matmul in step.cost.matmuls:
        name, sizes = f"{step.name}.{matmul.name}", (matmul.outputs, matmul.inputs)
        role = roles.get(name)
        kind, dim = (role.kind, role.dim or 0) if role else ("", 0)
        if kind == "experts":
            outside += _expert_rows(step, name, matmul)
        elif not recompute.keeps(name):
            outside += matmul.outputs * (name in save_own)
        elif kind == "column":
            inside += sizes[dim]
        elif kind == "row":
            outside += sizes[1 - dim] / plan.sequence_ranks
        else:
            outside += matmul.outputs
    return outside + inside / tp


def _expert_rows(step: LayerStep, name: str, matmul: Matmul) -> float:
    """Elements per token saved for the expert matrices `name`. The first ones make features. The second ones make rows
    as wide as hidden states; rows that are sent are saved when they arrive, and when they come back."""
    plan, layout = step.plan, step.plan.layout
    features = next((experts.features for experts in plan.facts.experts if is_within(name, [experts.name])), None)
    if features is not None and name.endswith(features.first):
        return (matmul.outputs, matmul.inputs)[features.made - 1] * matmul.times / layout.tp
    rows = 3 if plan.placement.grid.size("ep") > 1 else 1
    return rows * step.shape.hidden * matmul.times / (1 if layout.expert_tp else layout.tp)
