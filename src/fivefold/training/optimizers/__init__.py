"""The optimizers: `NAME.py` holds all that is particular to the one of that name, as its `RULE`.

Whatever else has to know of an optimizer asks the rule: what is built for a parallelized model, what one process
computes, what a step must change. What can be known without torch, its keys in the run file, the kinds of its state and
of what, is in `core/optimizers.py`; the collectives of its step are in the plan (`parallel/calls.py`).
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config import OptimizerSection
from fivefold.core.optimizers import OPTIMIZERS, OptimizerFacts
from fivefold.parallel.placement import Placement

UNTOUCHED = "did not change at all"  # of a whole tensor: wrong only when it holds for all parts of it


@dataclass(frozen=True)
class Weights:
    """The parameters of a whole model, as optimizers tell them apart: matrices of the blocks, other matrices
    (embeddings, the head, experts), and vectors (norms, biases), which do not decay."""

    blocks: Sequence[Tensor]
    matrices: Sequence[Tensor]
    vectors: Sequence[Tensor]


@dataclass(frozen=True)
class Unmoved:
    """This rank's part of a parameter, after a step that left its bits as they were.

    `group`, `state`: the optimizer's, of this parameter. `shape`: of the whole parameter. `gradient`: the largest
    magnitude in this part of its gradient.
    """

    group: Mapping[str, Any]
    state: Mapping[str, Any]
    weight: Tensor
    shape: tuple[int, ...]
    gradient: float


class UpdateRule(ABC):
    """One optimizer: how parameters are updated, and what follows from it for everything else."""

    facts: OptimizerFacts

    @abstractmethod
    def build(self, model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
        """The optimizer over the parameters of a parallelized model, of which this rank has parts."""

    @abstractmethod
    def reference(self, weights: Weights, options: OptimizerSection, rate: float) -> list[torch.optim.Optimizer]:
        """What updates a whole model in one process, by code that is not this library's; each takes its step."""

    def state(self, placement: Placement) -> dict[str, list[str]]:
        """Kind of state -> the parameters that it is kept of."""
        matrices = set(placement.block_matrices)
        trained = [name for name in placement.shards if placement.facts.parameters[name].is_trained]
        return {
            kind: [name for name in trained if self.facts.keeps(kind, is_matrix=name in matrices)]
            for kind in self.facts.state
        }

    def overdue(self, part: Unmoved) -> str | None:
        """Why a parameter should have changed; None where it need not."""
        return None


_RULES: dict[str, UpdateRule] = {}


def rule_of(name: str) -> UpdateRule:
    """The rule of an optimizer that `OPTIMIZERS` names."""
    if name not in _RULES:
        register(importlib.import_module(f"{__name__}.{name}").RULE)
    return _RULES[name]


def register(rule: UpdateRule) -> None:
    """Make a rule known under its name, in the run file too."""
    OPTIMIZERS[rule.facts.name] = rule.facts
    _RULES[rule.facts.name] = rule


def build_optimizer(model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
    """The optimizer that `options` name, over every parameter of a parallelized `model`."""
    return rule_of(options.name).build(model, options)
