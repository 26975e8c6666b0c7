"""Layers of every pipeline rank, and the places of everything around them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fivefold.core.schedule import balanced
from fivefold.models.facts import ModelFacts
from fivefold.parallel.layout import Layout


@dataclass(frozen=True)
class StagePlan:
    """Stages of every module with parameters of its own. Without a pipeline: all of them in the one stage of rank 0.

    `splits`: layers of each stage, first and past the last. `stages_of_module`: the stages that a module is part of.
    """

    layout: Layout
    layers: tuple[str, ...]
    splits: tuple[tuple[int, int], ...]
    stages_of_module: Mapping[str, tuple[int, ...]]

    @property
    def count(self) -> int:
        return len(self.splits)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank of a stage."""
        return self.layout.schedule.rank_of(stage, self.layout.pp)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank."""
        return tuple(stage for stage in range(self.count) if self.rank_of(stage) == rank)

    def layers_of(self, rank: int) -> tuple[str, ...]:
        """The layers of a pipeline rank."""
        return tuple(layer for stage in self.stages_of(rank) for layer in self.layers_of_stage(stage))

    def layers_of_stage(self, stage: int) -> tuple[str, ...]:
        """The layers of one stage."""
        return self.layers[slice(*self.splits[stage])]

    def holders(self, name: str) -> tuple[int, ...]:
        """Pipeline ranks that hold a parameter; a tied embedding may have two."""
        return tuple(dict.fromkeys(self.rank_of(stage) for stage in self.users(name)))

    def users(self, name: str) -> tuple[int, ...]:
        """Stages in which a parameter gets a gradient."""
        if self.count == 1:
            return (0,)
        owner = max((module for module in self.stages_of_module if name.startswith(f"{module}.")), key=len)
        return self.stages_of_module[owner]


def stage_plan(facts: ModelFacts, layout: Layout) -> StagePlan:
    """Divide the model into the stages of `layout`, which is legal for it."""
    anatomy = facts.anatomy
    if layout.pp == 1:
        return StagePlan(layout, anatomy.layers, ((0, len(anatomy.layers)),), {})
    count = layout.stages
    splits = tuple(pairwise(accumulate(_split(facts, layout, count), initial=0)))
    stages_of_module: dict[str, tuple[int, ...]] = {}
    for stage, (first, last) in enumerate(splits):
        stages_of_module |= dict.fromkeys(anatomy.layers[first:last], (stage,))
    first_too = (count - 1,) if anatomy.tied else ()
    stages_of_module |= dict.fromkeys(facts.before, (0,)) | dict.fromkeys((*facts.after, anatomy.head), (count - 1,))
    stages_of_module[anatomy.embedding] = (0, *first_too)
    return StagePlan(layout, anatomy.layers, splits, stages_of_module)


def _split(facts: ModelFacts, layout: Layout, count: int) -> tuple[int, ...]:
    """Layers of each stage; `auto` balances the weights that a token is multiplied with, the head's included."""
    if layout.split is not None:
        return layout.split
    costs = tuple(float(cost.active) for cost in facts.layer_costs)
    return balanced(costs, count, last=float(facts.head_cost))
