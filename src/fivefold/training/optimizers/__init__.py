"""The optimizers: `NAME.py` holds everything specific to the one of that name, as its `RULE`.

All other code asks the rule: what to build for a parallelized model, what one process computes, what a step must
change. Facts that need no torch, its keys in the run file and its kinds of state, are in `core/optimizers.py`. The
collectives of its step are in the plan (`parallel/features.py`).
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config import OptimizerSection
from fivefold.core.errors import UserError
from fivefold.core.optimizers import OPTIMIZERS, OptimizerFacts
from fivefold.parallel.placement import Placement
from fivefold.parallel.state import state_of

UNTOUCHED = "did not change at all"  # a finding only if it holds for all parts of a tensor


@dataclass(frozen=True)
class Weights:
    """The parameters of a whole model as optimizers group them: matrices of the blocks, other matrices (embeddings, the
    head, experts), and vectors (norms, biases), which do not decay."""

    blocks: Sequence[Tensor]
    matrices: Sequence[Tensor]
    vectors: Sequence[Tensor]


@dataclass(frozen=True)
class Unmoved:
    """This rank's part of a parameter, unchanged by a step.

    `group`, `state`: the optimizer's, for this parameter. `shape`: that of the whole parameter. `gradient`: the largest
    magnitude in this part of its gradient.
    """

    group: Mapping[str, Any]
    state: Mapping[str, Any]
    weight: Tensor
    shape: tuple[int, ...]
    gradient: float


class UpdateRule(ABC):
    """One optimizer: how it updates parameters, and everything else that depends on it.

    `digest`: a hash of the file that a run file names; "" for one of the library. `takes_decay`: weights may decay.
    """

    facts: OptimizerFacts
    digest = ""
    takes_decay = True

    @abstractmethod
    def build(self, model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
        """Build the optimizer over this rank's parts of the parameters of a parallelized model."""

    @abstractmethod
    def reference(self, weights: Weights, options: OptimizerSection, rate: float) -> list[torch.optim.Optimizer]:
        """Reference optimizers for a whole model in one process, from code outside this library; all of them step."""

    def state(self, placement: Placement) -> dict[str, list[str]]:
        """Map each kind of state to the parameters that have it."""
        matrices = set(placement.block_matrices)
        trained = [name for name in placement.shards if placement.facts.parameters[name].is_trained]
        return {
            kind: [name for name in trained if self.facts.keeps(kind, is_matrix=name in matrices)]
            for kind in self.facts.state
        }

    def overdue(self, part: Unmoved) -> str | None:
        """The reason why a parameter should have changed; None if it need not."""
        return None


_RULES: dict[str, UpdateRule] = {}


def rule_of(name: str) -> UpdateRule:
    if name not in _RULES:
        register(importlib.import_module(f"{__name__}.{name}").RULE)
    return _RULES[name]


def rule_for(options: OptimizerSection) -> UpdateRule:
    """The rule of a run's optimizer. Raises `UserError` if it is a class of the user's own that cannot be used."""
    if options.is_own:
        rule: UpdateRule = importlib.import_module(f"{__name__}.python").rule_at(options)
        return rule
    return rule_of(options.name)


def register(rule: UpdateRule) -> None:
    """Register a rule under its name, for the run file too."""
    OPTIMIZERS[rule.facts.name] = rule.facts
    _RULES[rule.facts.name] = rule


def build_optimizer(model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
    """Build the optimizer named in `options` over the parameters of a parallelized `model`.

    Raises `UserError` if the layout has state in a smaller type, and the optimizer has no `kept` states.
    """
    rule = rule_for(options)
    optimizer = rule.build(model, options)
    dtype = state_of(model).plan.layout.state_dtype
    if dtype != "fp32" and not hasattr(optimizer, "kept"):
        raise UserError(
            f"{rule.facts.name} keeps its state in fp32, and cannot keep it in {dtype}",
            fix="set optimizer.state_dtype: fp32, or optimizer.name: adamw",
            more="fivefold docs explain/memory",
        )
    return optimizer
