"""What selective recompute keeps. No torch."""

from collections.abc import Iterator
from functools import cached_property

from fivefold.models.anatomy import is_within
from fivefold.parallel.edits import Edit
from fivefold.parallel.plan import ParallelPlan


class RecomputePlan:
    """The linears whose results selective recompute keeps."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan

    @cached_property
    def linears(self) -> frozenset[str]:
        """The linears of all layers whose results selective recompute keeps: all but routers and a layer's last one,
        which nothing behind it reads again."""
        routers = {each.router for each in self._plan.facts.experts}
        last = {block.row for block in self._plan.facts.partition.tp_blocks if block.is_last}
        names = (
            f"{layer}.{matmul.name}".removesuffix(".weight")
            for layer, cost in zip(self._plan.anatomy.layers, self._plan.facts.layer_costs, strict=True)
            for matmul in cost.matmuls
        )
        return frozenset(name for name in names if name not in last and not is_within(f"{name}.", routers))

    def keeps(self, weight: str) -> bool:
        """Whether selective recompute keeps the product with a weight."""
        return weight.removesuffix(".weight") in self.linears


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """Layers are computed again in backward."""
    why = {
        "selective": "all but products and attention is computed again in backward",
        "full": "its activations are computed again in backward",
    }
    for layer in filter(plan.recompute.wraps, plan.placement.layers):
        yield Edit(layer, "forward", "recompute", why[plan.recompute.of(layer)])
