"""Checks that a user's optimizer may update a parallelized model, before it steps over its parameters.

Whether its update is right on what a rank holds is tried on small tensors (`training/optimizers/trial.py`).
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fivefold.core.errors import UserError
from fivefold.own_loop.batches import refusal
from fivefold.parallel.layout import Layout
from fivefold.parallel.offload.runtime import WALKING
from fivefold.parallel.parts import PartOfTensor, paused
from fivefold.torch_internals import first_after_step
from fivefold.training.optimizers.trial import check_runs, check_update

_LAYOUT, _REPLACED, _CHECKED = "fivefold_layout", "fivefold_replaced", "fivefold_checked"
_WINDOW = "fivefold_step"


def watch_optimizers(model: nn.Module, layout: Layout, before: Sequence[nn.Parameter]) -> None:
    """From now on, check any optimizer of this process before it steps over parameters of `model`, or over its
    parameters from `before`: a custom loop may never pass it to this library."""
    now = list(model.parameters())
    for parameter in now:
        setattr(parameter, _LAYOUT, layout)
    kept = set(map(id, now))
    for parameter in before:
        if id(parameter) not in kept:
            setattr(parameter, _REPLACED, True)
    _install()


@cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_hooks)


def _before_hooks(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Check an optimizer that is about to step. Its step begins behind its hooks before a step, and ends in front of
    those after it: hooks are the user's, and see what a loop sees."""
    check_parameters(optimizer, steps=True)
    for hook in vars(optimizer).pop(_WINDOW, ()):
        hook.remove()
    if spread := [
        parameter for group in optimizer.param_groups for parameter in group["params"] if hasattr(parameter, _LAYOUT)
    ]:
        begin = optimizer.register_step_pre_hook(partial(_begin, spread))
        end = optimizer.register_step_post_hook(_end)
        first_after_step(optimizer, end)
        setattr(optimizer, _WINDOW, (begin, end))


def _begin(spread: Sequence[Tensor], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    PartOfTensor.steps += 1

    def outside(given: Any) -> Any:
        return paused(spread)(given) if callable(given) else given

    return tuple(map(outside, args)), {key: outside(value) for key, value in kwargs.items()}


def _end(*_: Any) -> None:
    PartOfTensor.steps = max(PartOfTensor.steps - 1, 0)


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise `UserError` unless `optimizer` is a torch optimizer over parameters of `model`, and may update them."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        hint = "no GradScaler is needed: " if isinstance(optimizer, torch.amp.GradScaler) else ""
        raise refusal(
            f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            fix=f"{hint}pass the optimizer itself: torch.optim.AdamW(model.parameters(), lr=1e-4)",
        )
    check_parameters(optimizer)
    own = set(map(id, model.parameters()))
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise _not_the_models(optimizer)


def check_parameters(optimizer: torch.optim.Optimizer, *, steps: bool = False) -> None:
    """Raise `UserError` if a step of `optimizer` would be lost, or wrong on shards. `steps`: it is about to step.

    An optimizer over parameters that were never in a parallelized model is ignored.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(hasattr(parameter, _REPLACED) for parameter in parameters):
        raise _not_the_models(optimizer)
    layout: Layout | None = next(
        (getattr(parameter, _LAYOUT) for parameter in parameters if hasattr(parameter, _LAYOUT)), None
    )
    checked = (len(optimizer.param_groups), layout)
    away = [what for what in ("optimizer", "parameters") if layout and getattr(layout, f"offload_{what}")]
    if steps and away and not getattr(optimizer, WALKING, False):
        what = {"optimizer": "its state", "parameters": "what it updates"}[away[0]]
        raise refusal(
            f"{type(optimizer).__name__}.step() under {layout}: {what} is in host memory, and comes to the device "
            "part by part",
            fix=f"ff.train_step(model, optimizer, batch), which takes the step; or leave offload_{away[0]} out",
        )
    if layout is not None and getattr(optimizer, _CHECKED, None) != checked:
        check_update(optimizer, layout)
        check_runs(optimizer, parameters)
        setattr(optimizer, _CHECKED, checked)


def _not_the_models(optimizer: torch.optim.Optimizer) -> UserError:
    return refusal(
        f"the {type(optimizer).__name__} holds parameters that are not those of the parallelized model: its updates "
        "would be lost",
        fix="build it after the model: model = ff.parallelize(model, layout); "
        f"optimizer = torch.optim.{type(optimizer).__name__}(model.parameters(), ...)",
    )
