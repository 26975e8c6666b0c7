"""A capacity in the reference: one row, one token, one pick at a time, in the order of the text."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from fivefold.models import hf_internals


def routers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, int]]:
    """What stands beside a module of experts and has a row of weights for each of them; and how many there are."""
    found = []
    for name, module in model.named_modules():
        if hf_internals.is_experts(module):
            experts = len(next(module.parameters()))
            beside = [each for each in model.get_submodule(name.rpartition(".")[0]).children() if each is not module]
            found += [(each, experts) for each in beside if _has_row_for_each(each, experts)]
    return found


def _has_row_for_each(module: torch.nn.Module, experts: int) -> bool:
    return any(weight.ndim == 2 and len(weight) == experts for weight in module.parameters())


class Drops:
    """While a row is on, the routers of `model` give no weight to a pick whose expert has taken `factor` times its even
    share of the row already."""

    def __init__(self, model: torch.nn.Module, factor: float) -> None:
        self._factor = Fraction(str(factor))
        self._tokens: int | None = None
        self._taken: dict[int, list[int]] = {}
        for number, (router, experts) in enumerate(routers(model)):
            router.register_forward_hook(self._after(number, experts))

    def row(self, tokens: int | None) -> None:
        """A row of so many tokens begins; None: from now on nothing is dropped."""
        self._tokens, self._taken = tokens, {}

    def _after(self, number: int, experts: int) -> Callable[..., Any]:
        def hook(_module: Any, _args: Any, out: Any) -> Any:
            if self._tokens is None or not isinstance(out, tuple):
                return None
            logits, weights, index = out
            most = math.ceil(self._factor * index.shape[-1] * self._tokens / experts)
            taken = self._taken.setdefault(number, [0] * experts)
            kept = torch.zeros_like(weights)
            for token, picks in enumerate(index.tolist()):
                for pick, expert in enumerate(picks):
                    if taken[expert] < most:
                        taken[expert] += 1
                        kept[token, pick] = 1
            return logits, weights * kept, index

        return hook
