"""Linears that get a forward of fivefold's, and the reasons. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fivefold.models.anatomy import is_within
from fivefold.parallel.plan import Edit, ParallelPlan

Role = Literal["column", "row", "dense", "latent"]  # see `ops/linear.py`


@dataclass(frozen=True)
class Multiply(Edit):
    kind = "forward"
    role: Role


@dataclass(frozen=True)
class MultiplyTogether(Edit):
    """Let linears that share an input multiply as one: the first for all."""

    kind = "forward"
    modules: tuple[str, ...]


class LinearPlan:
    """Linears of this rank's layers whose forwards are replaced."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan

    @cached_property
    def roles(self) -> dict[str, Role]:
        """Role of every linear that can have one. Routers and the head keep their own forwards."""
        plan, kinds = self._plan, self._plan.facts.partition.roles
        apart = [*(block.router for block in plan.facts.experts), *(block.name for block in plan.facts.experts)]
        names = [name for name in self._weights() if not is_within(name, apart)]
        found: dict[str, Role] = {
            name.removesuffix(".weight"): "latent" if name in kinds and kinds[name].kind == "latent" else "dense"
            for name in names
        }
        for block in plan.partition.tp_blocks:
            own: dict[str, Role] = {block.row: "row", **dict.fromkeys(block.columns, "column")}
            found |= {name: role for name, role in own.items() if name in found}
        return found

    def _weights(self) -> Iterator[str]:
        layers, branches = set(self._plan.placement.layers), self._plan.facts.branches
        for layer, cost in zip(self._plan.anatomy.layers, self._plan.facts.layer_costs, strict=True):
            for name in (f"{layer}.{matmul.name}" for matmul in cost.matmuls if layer in layers):
                if name.endswith(".weight"):
                    yield name
                    yield from branches.get(name.removesuffix(".weight"), ())

    def reasons(self, module: str, role: Role) -> Iterator[tuple[str, str]]:
        """Yield each reason for another forward of a linear, as (feature that asks, reason)."""
        parameters, weight = self._plan.facts.parameters, f"{module}.weight"
        if role == "row":
            yield "tp", "partial sums are added up, then the bias"
        if self._plan.matmuls.multiplies(module):
            yield self._plan.matmuls.key, self._plan.matmuls.why
        if self._plan.layout.schedule.splits_backward:
            yield "pp", "gradients of its weight are put off"
        if module in self._plan.facts.branches:
            yield "adapter", "what its adapter makes is added"
        if parameters[weight].packing:
            yield "adapter", "its weight rests in four bits"


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """Replace the forwards of linears that need it. Those of one input and a precision of their own go together."""
    linears = plan.feature(LinearPlan)
    for module, role in linears.roles.items():
        if reasons := dict(linears.reasons(module, role)):
            yield Multiply(module, ", ".join(reasons), "; ".join(reasons.values()), role)
    for group in plan.matmuls.inputs:
        modules = tuple(linear.name.removesuffix(".weight") for linear in group)
        if len(modules) > 1:
            why = f"multiplies for {' and '.join(modules[1:])} too"
            yield MultiplyTogether(modules[0], plan.matmuls.key, why, modules)
