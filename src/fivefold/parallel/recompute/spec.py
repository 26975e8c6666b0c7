"""Layers that are recomputed in backward, and what selective recompute saves of them. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fivefold.models.anatomy import is_within
from fivefold.parallel.edits import Edit
from fivefold.parallel.graphs.spec import GraphPlan
from fivefold.parallel.plan import ParallelPlan


class RecomputePlan:
    """Linears whose outputs selective recompute saves."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan

    @cached_property
    def linears(self) -> frozenset[str]:
        """Linears of all layers whose outputs selective recompute saves: all but routers and a layer's last one, which
        nothing after it reads again."""
        routers = {block.router for block in self._plan.facts.experts}
        last = {block.row for block in self._plan.facts.partition.tp_blocks if block.is_last}
        names = (
            f"{layer}.{matmul.name}".removesuffix(".weight")
            for layer, cost in zip(self._plan.anatomy.layers, self._plan.facts.layer_costs, strict=True)
            for matmul in cost.matmuls
        )
        return frozenset(name for name in names if name not in last and not is_within(f"{name}.", routers))

    def keeps(self, weight: str) -> bool:
        """True if selective recompute saves the product with a weight."""
        return weight.removesuffix(".weight") in self.linears


# ---- edits of modules ----------------------------------------------------------------------------------------------

Saves = Literal["output", "sum", "nothing"]


@dataclass(frozen=True)
class SaveAttention(Edit):
    """Let an attention module save its output for the second forward."""

    kind = "attribute"


@dataclass(frozen=True)
class SaveLinear(Edit):
    """Let a linear save its `output` for the second forward, the `sum` over tp of its outputs, or `nothing`."""

    kind = "forward"
    saves: Saves


@dataclass(frozen=True)
class Recompute(Edit):
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
    """Recompute layers that are one graph: their second forward joins the kernels of the backward, and leaves out what
    nothing there reads."""
    return (edit for edit in _edits_of_layers(plan) if edit.in_graph)


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """Recompute the other layers, with all of their graphs."""
    return (edit for edit in _edits_of_layers(plan) if not edit.in_graph)


def _edits_of_layers(plan: ParallelPlan) -> Iterator[Recompute]:
    why = {
        "selective": "all but products and attention is computed again in backward",
        "full": "its activations are computed again in backward",
    }
    for layer in filter(plan.recompute.wraps, plan.placement.layers):
        in_graph = plan.compiled and plan.feature(GraphPlan).is_one_graph(layer)
        mode = plan.recompute.of(layer)
        yield Recompute(layer, "recompute", why[mode], in_graph, mode == "selective")
