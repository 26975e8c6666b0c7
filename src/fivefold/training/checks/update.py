"""Checks of the optimizer's step: it changes the parameters, at the rate of the schedule, once for each step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.parallel.dtensor import local
from fivefold.parallel.state import ParallelState, state_of
from fivefold.training.checks.findings import Finding, ranks_text, seen_anywhere
from fivefold.training.checks.state import device_of, hashes, largest
from fivefold.training.optimizers import UNTOUCHED, Unmoved, UpdateRule
from fivefold.training.optimizers.states import restored_state


@dataclass
class Update:
    """Weights and gradients, per parameter, of this rank as the optimizer began its step; None if it never did."""

    bits: Tensor | None = None  # hashes of the weights, int64
    gradients: Tensor | None = None  # the largest magnitude after clipping; -1 without a gradient


@contextmanager
def observing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Update]:
    """Record for `moved` the weights and gradients when the optimizer's step begins inside the block. Local."""
    update, device = Update(), device_of(model)

    def note(*_: Any) -> None:
        parameters = _parameters(model)
        update.bits = hashes([None if p is None else local(p) for p in parameters], device)
        update.gradients = largest([None if p is None or p.grad is None else local(p.grad) for p in parameters], device)

    hook = optimizer.register_step_pre_hook(note)
    try:
        yield update
    finally:
        hook.remove()


def moved(model: nn.Module, optimizer: torch.optim.Optimizer, update: Update, *, rule: UpdateRule) -> list[Finding]:
    """Findings for parameters that should have changed in the step inside `observing` and did not.

    A parameter should change if (a) it has a gradient but no group of the optimizer holds it, or (b) by the optimizer's
    `rule` the update exceeds rounding. A skipped step changes nothing, and is not checked.
    """
    parameters, state, mine = _parameters(model), state_of(model), dict[tuple[int, str], bool]()
    labels = [*state.placement.shards, "the optimizer"]
    if update.bits is None or update.gradients is None:
        mine[len(parameters), "took no step"] = True
    else:
        bits = hashes([None if p is None else local(p) for p in parameters], device_of(model))
        gradients = update.gradients.tolist()
        for at in (bits == update.bits).nonzero().flatten().tolist():
            shape, parameter = state.placement.shards[labels[at]].shape, parameters[at]
            if parameter is not None and (why := _overdue(optimizer, rule, parameter, shape, gradients[at])):
                mine[at, why] = gradients[at] > 0
    return [
        Finding("moved", labels[at], f"{why} on {ranks_text(by_rank)}")
        for (at, why), by_rank in seen_anywhere(mine, device_of(model)).items()
        if why != UNTOUCHED or (any(by_rank.values()) and by_rank.keys() >= _holders(state, labels[at]))
    ]


def _parameters(model: nn.Module) -> list[Tensor | None]:
    """Every parameter of the whole model, in order; None for those of other pipeline ranks."""
    named = dict(model.named_parameters())
    return [named.get(name) for name in state_of(model).placement.shards]


def _overdue(
    optimizer: torch.optim.Optimizer, rule: UpdateRule, parameter: Tensor, shape: tuple[int, ...], gradient: float
) -> str | None:
    """The reason why this rank's unchanged part of a parameter should have changed; None if it need not."""
    group = next((group for group in optimizer.param_groups if any(p is parameter for p in group["params"])), None)
    if gradient < 0 or not local(parameter).numel() or (group and float(group["lr"]) == 0):
        return None
    if group is None:
        return "is in no group of the optimizer" if gradient else None
    state = restored_state(optimizer, parameter)
    return rule.overdue(Unmoved(group, state, local(parameter), shape, gradient))


def _holders(state: ParallelState, name: str) -> set[int]:
    """The ranks that hold a part of a parameter."""
    return {rank for rank in range(dist.get_world_size()) if state.placement.regions(name, rank)}


def rates(
    model: nn.Module, optimizer: torch.optim.Optimizer, expected: float, *, updates: int | None = None
) -> list[Finding]:
    """Findings for learning rates other than the first rank's `expected`, and for a wrong count of updates.

    `updates`: steps of the run that were not skipped, resumed ones included; None: unknown. AdamW keeps its own count.
    """
    device = device_of(model)
    first = torch.tensor([expected], dtype=torch.float64, device=device)
    dist.broadcast(first, 0)
    wanted = first.item()
    used = [(f"of group {at}", float(group["lr"])) for at, group in enumerate(optimizer.param_groups)]
    mine = {("the learning rate", f"{of} is {rate}, not {wanted},"): True for of, rate in used if rate != wanted}
    counts = [torch.as_tensor(state["step"], device=device) for state in optimizer.state.values() if "step" in state]
    if updates is not None and counts and (counted := int(torch.stack(counts).max())) != updates:
        mine["the optimizer", f"counts {counted} updates, not {updates},"] = True
    seen = seen_anywhere(mine, device)
    return [Finding("rates", where, f"{detail} on {ranks_text(by_rank)}") for (where, detail), by_rank in seen.items()]
