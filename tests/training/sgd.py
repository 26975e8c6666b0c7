"""An optimizer that the library does not have, SGD with momentum, and what ranks do that know it: its object is all
that has to be written."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fivefold.config import OptimizerSection
from fivefold.core.optimizers import OPTIMIZERS, OptimizerFacts
from fivefold.parallel.state import state_of
from fivefold.training import optimizers
from fivefold.training.optimizers import Unmoved, UpdateRule, Weights


class SGD(UpdateRule):
    """torch's own: it updates each element by its own gradient."""

    facts = OptimizerFacts(name="sgd", state={"momentum_buffer": "momentum"}, keys={"momentum": 0.9})

    def build(self, model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
        shards = state_of(model).placement.shards
        named = dict(model.named_parameters())
        return self._over(
            [p for name, p in named.items() if shards[name].dims > 1],
            [p for name, p in named.items() if shards[name].dims <= 1], options, options.learning_rate,
        )  # fmt: skip

    def reference(self, weights: Weights, options: OptimizerSection, rate: float) -> list[torch.optim.Optimizer]:
        return [self._over([*weights.blocks, *weights.matrices], weights.vectors, options, rate)]

    def overdue(self, part: Unmoved) -> str | None:
        if "momentum_buffer" not in part.state:
            return "has no optimizer state" if part.gradient else None
        swallowed = 4 * torch.finfo(part.weight.dtype).eps * float(part.weight.abs().max())
        return "did not take its gradient" if float(part.group["lr"]) * part.gradient > swallowed else None

    def _over(self, decayed: Any, others: Any, options: OptimizerSection, rate: float) -> torch.optim.Optimizer:
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.SGD([each for each in groups if each["params"]], lr=rate, momentum=options.momentum or 0.0)


@contextmanager
def known() -> Iterator[None]:
    """Inside, the library has it."""
    with patch.dict(OPTIMIZERS), patch.dict(optimizers._RULES):
        optimizers.register(SGD())
        yield


def knowing(body: Callable[..., Any], *args: Any, **options: Mapping[str, Any]) -> Any:
    """What `body` gives on a rank that knows it."""
    with known():
        return body(*args, **options)
