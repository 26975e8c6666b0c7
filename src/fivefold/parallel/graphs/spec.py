"""What `torch.compile` makes of the layers of a plan. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fivefold.models.anatomy import is_within
from fivefold.models.facts import TPInput
from fivefold.parallel.chunks.spec import ChunkPlan
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.edits import Edit
from fivefold.parallel.plan import ParallelPlan


class GraphPlan:
    """Which compiled layers are one graph, and what these gather again in backward."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan

    def is_one_graph(self, layer: str) -> bool:
        """Whether a compiled layer is one graph. Attention that sends, experts, MLPs in pieces, and gradients of
        weights that are put off run outside of graphs; fp8 agrees on scales outside of its kernels."""
        layout, grid = self._plan.layout, self._plan.placement.grid
        parts = layout.schedule.splits_backward or layout.fp8 != "none" or grid.size("cp") > 1
        outside = (*(each.name for each in self._plan.facts.experts), *self._plan.feature(ChunkPlan).mlps)
        return not (parts or any(is_within(name, [layer]) for name in outside))

    def gathers_again(self, layer: str, entry: TPInput, shape: StepShape) -> bool:
        """Whether backward gathers again what enters a column/row pair of a compiled layer, so that forward keeps only
        this rank's tokens of it (Megatron's way, arXiv:2205.05198). A layer that is computed again has no use for that,
        nor has one in which nothing that reads this is trained. Where a layer is several graphs, products may stand
        outside of the graph that gathers: what enters is kept."""
        is_read = any(module in self._with_trained for module in entry.modules)
        is_one = shape.compiled and shape.gathers_again and self.is_one_graph(layer)
        return self._plan.splits_sequence and is_read and is_one and not shape.recompute.wraps(layer)

    @cached_property
    def _with_trained(self) -> frozenset[str]:
        """The modules that have a trained parameter, or one below them."""
        trained = (name.split(".") for name, each in self._plan.facts.parameters.items() if each.is_trained)
        return frozenset(".".join(parts[:size]) for parts in trained for size in range(1, len(parts)))


@dataclass(frozen=True)
class Outside(Edit):
    """A row runs outside of graphs. A graph saves its tensors when all of it has run; a second forward stops at the
    last saved tensor, which is the input of this row. So its product and its collective come once."""

    kind = "forward"


@dataclass(frozen=True)
class Compile(Edit):
    """A layer is compiled."""

    kind = "forward"


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """Layers are compiled."""
    graphs, again = plan.feature(GraphPlan), plan.recompute
    for block in plan.partition.of_layers(plan.placement.layers).tp_blocks if plan.compiled else ():
        layer = next(name for name in plan.placement.layers if is_within(block.row, [name]))
        if block.is_last and again.of(layer) == "full" and plan.reduces_rows and not graphs.is_one_graph(layer):
            yield Outside(block.row, "compile", "runs outside of graphs: a second forward stops before it")
    for layer in plan.placement.layers if plan.compiled else ():
        yield Compile(layer, "compile", "one graph" if graphs.is_one_graph(layer) else "several graphs")
