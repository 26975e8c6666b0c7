"""Graphs of `torch.compile` in the layers of a plan. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from fivefold.models.anatomy import is_within
from fivefold.models.facts import TPInput
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.step import LayerNumbers, LayerStep


class GraphPlan:
    """Compiled layers that are one graph, and the inputs that these gather again in backward."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan

    def is_one_graph(self, layer: str) -> bool:
        """True if a compiled layer is one graph. Attention that communicates, experts, and deferred weight gradients
        run outside of graphs; ranks agree on scales of matmuls outside of their kernels."""
        layout, grid = self._plan.layout, self._plan.placement.grid
        parts = layout.schedule.splits_backward or self._plan.matmuls.is_used or grid.size("cp") > 1
        return not (parts or any(is_within(block.name, [layer]) for block in self._plan.facts.experts))

    def gathers_again(self, layer: str, entry: TPInput, shape: StepShape) -> bool:
        """True if backward gathers the input of a column/row pair of a compiled layer again, so that forward saves only
        this rank's tokens of it (as in Megatron, arXiv:2205.05198). False for recomputed layers, and for inputs that
        only frozen modules read. False for layers of several graphs: matmuls may lie outside of the graph that gathers,
        so the input is saved."""
        is_read = any(module in self._with_trained for module in entry.modules)
        is_one = shape.compiled and shape.gathers_again and self.is_one_graph(layer)
        return self._plan.splits_sequence and is_read and is_one and not shape.recompute.wraps(layer)

    @cached_property
    def _with_trained(self) -> frozenset[str]:
        """Modules that have a trained parameter, or contain one that has."""
        trained = (name.split(".") for name, parameter in self._plan.facts.parameters.items() if parameter.is_trained)
        return frozenset(".".join(parts[:size]) for parts in trained for size in range(1, len(parts)))


@dataclass(frozen=True)
class Outside(Edit):
    """Run a row outside of graphs. A graph saves its tensors when all of it has run; a second forward stops at the last
    saved tensor, which is the input of this row. So its matmul and its collective run once."""

    kind = "forward"


@dataclass(frozen=True)
class CompileLayer(Edit):
    kind = "forward"


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    graphs, again = plan.feature(GraphPlan), plan.recompute
    for block in plan.partition.of_layers(plan.placement.layers).tp_blocks if plan.compiled else ():
        layer = next(name for name in plan.placement.layers if is_within(block.row, [name]))
        if block.is_last and again.of(layer) == "full" and plan.reduces_rows and not graphs.is_one_graph(layer):
            yield Outside(block.row, "compile", "runs outside of graphs: a second forward stops before it")
    for layer in plan.placement.layers if plan.compiled else ():
        yield CompileLayer(layer, "compile", "one graph" if graphs.is_one_graph(layer) else "several graphs")


# ---- bytes ---------------------------------------------------------------------------------------------------------


def layer_numbers(step: LayerStep, numbers: LayerNumbers) -> LayerNumbers:
    """Add the gradients that the backward of a layer has at once: of its widest tensor and of its inputs, and of the
    hidden states; for experts, of all their rows.

    A compiled layer in one graph has the gradients of gate, up and their product at once, and that of its output. If
    its graph ends at attention over cp, it frees the product before gate and up have gradients.
    """
    plan, shape, matmuls = step.plan, step.shape, step.cost.matmuls
    widest = max((max(matmul.inputs, matmul.outputs) * matmul.times for matmul in matmuls), default=0)
    at_once, hidden = 2, 2 * shape.hidden
    if shape.compiled and not plan.matmuls.is_used and all(matmul.times == 1 for matmul in matmuls):
        at_once, hidden = 1 if plan.placement.grid.size("cp") > 1 else 3, shape.hidden
    return replace(numbers, gradients=widest * at_once / plan.layout.tp, hidden=hidden)
