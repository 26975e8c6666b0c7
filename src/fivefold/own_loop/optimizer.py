"""Whether a user's optimizer may update a parallelized model: it is tried on small tensors, not looked up by name.

A rank holds parts of tensors. AdamW, SGD and their kin update each element by its own gradient, so that parts give
what the whole gives. Muon, Adafactor, LBFGS and all that look at rows, norms or whole matrices do not: they are refused
where a rank has only parts of a tensor.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fivefold.core.errors import UserError, first_line
from fivefold.core.layout import Layout
from fivefold.own_loop.batches import refusal
from fivefold.parallel.dtensor import local
from fivefold.parallel.offload import WALKING

_LAYOUT, _REPLACED, _CHECKED = "fivefold_layout", "fivefold_replaced", "fivefold_checked"
_CLOSE = 1e-9  # of fp64: what kernels for other lengths may differ by


def watch_optimizers(model: nn.Module, layout: Layout, before: Sequence[nn.Parameter]) -> None:
    """From now on, any optimizer of this process that is about to step over parameters of `model`, or over those it had
    `before`, is checked first: a loop of one's own may never pass it to this library."""
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
    register_optimizer_step_pre_hook(lambda optimizer, *_: check_parameters(optimizer, steps=True))


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise `UserError` unless `optimizer` is one of torch's kind, over parameters of `model`, that may update them."""
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
    """Raise `UserError` where a step of `optimizer` would be lost, or wrong on parts of tensors. `steps`: it takes one.

    An optimizer over parameters that were never in a parallelized model is left alone.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(hasattr(parameter, _REPLACED) for parameter in parameters):
        raise _not_the_models(optimizer)
    layout: Layout | None = next((getattr(each, _LAYOUT) for each in parameters if hasattr(each, _LAYOUT)), None)
    checked = (len(optimizer.param_groups), layout)
    away = [what for what in ("optimizer", "parameters") if layout and getattr(layout, f"offload_{what}")]
    if steps and away and not getattr(optimizer, WALKING, False):
        what = {"optimizer": "its state", "parameters": "what it updates"}[away[0]]
        raise refusal(
            f"{type(optimizer).__name__}.step() under {layout}: {what} is in host memory, and comes to the device "
            "part by part",
            fix=f"ff.train_step(model, optimizer, batch), which takes the step; or leave offload_{away[0]} out",
        )
    if layout is None or getattr(optimizer, _CHECKED, None) == checked:
        return
    reason = None if getattr(optimizer, "is_elementwise", False) else why_not_elementwise(optimizer)
    if reason and not _holds_whole_tensors(layout):
        raise refusal(
            f"{type(optimizer).__name__} under {layout}: {reason}, and a rank holds parts of tensors",
            fix="use an optimizer that updates each element by its own gradient (torch.optim.AdamW), or a layout of "
            "whole tensors (dp); where you know that it does: optimizer.is_elementwise = True",
        )
    _check_runs(optimizer, parameters)
    setattr(optimizer, _CHECKED, checked)


def _holds_whole_tensors(layout: Layout) -> bool:
    """Whether every rank has all parameters, each whole: in copies over dp_replicate alone."""
    return layout.world == layout.dp_replicate


def _check_runs(optimizer: torch.optim.Optimizer, parameters: Sequence[Any]) -> None:
    """Raise `UserError` where the optimizer needs operations that torch does not have for DTensors: parameters are."""
    like = next((each for each in parameters if isinstance(each, DTensor)), None)
    if like is None:
        return

    def as_its_own(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor.to(like.device), like.device_mesh, like.placements, run_check=False)

    try:
        for group in optimizer.param_groups:
            _steps(optimizer, _options(group), _WHOLE, lambda x: (x,), as_its_own)
    except Exception as error:
        raise refusal(
            f"{type(optimizer).__name__} cannot update parameters that are DTensors, as those of a parallelized model "
            f"are: {first_line(error)[:120]}",
            fix="use another optimizer: torch.optim.AdamW(model.parameters(), lr=1e-4)",
        ) from error


def _not_the_models(optimizer: torch.optim.Optimizer) -> UserError:
    return refusal(
        f"the {type(optimizer).__name__} holds parameters that are not those of the parallelized model: its updates "
        "would be lost",
        fix="build it after the model: model = ff.parallelize(model, layout); "
        f"optimizer = torch.optim.{type(optimizer).__name__}(model.parameters(), ...)",
    )


# ---- tried on small tensors ------------------------------------------------------------------------------------------


def why_not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer of this type and these options does not update elements one by one; None where it does.

    One like it takes three steps over a small matrix, and one over each of its halves, as ranks do: they must come out
    the same.
    """
    cuts: tuple[Callable[[Tensor], Sequence[Tensor]], ...] = (
        lambda x: (x,),
        lambda x: torch.split(x, 4, 0),
        lambda x: torch.split(x, 3, 1),
    )
    for group in optimizer.param_groups:
        try:
            found = [_steps(optimizer, _options(group), _WHOLE, cut) for cut in cuts]
        except Exception as error:  # whatever a class of someone else's does
            return f"it cannot be tried on a small tensor ({type(error).__name__}: {first_line(error)[:80]})"
        if torch.equal(found[0], _WHOLE):
            return "its steps change nothing in a small tensor"
        if any(float((each - found[0]).abs().max()) > _CLOSE for each in found[1:]):
            return "its update of an element depends on others of the tensor"
    return None


_WHOLE = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Those of a group, at a rate that shows: a warm-up may begin at zero."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")} | {"lr": 0.01}


def _steps(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], whole: Tensor,
    cut: Callable[[Tensor], Sequence[Tensor]], made: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:  # fmt: skip
    """`whole` after three steps over its parts, put together again; `made`: what a part becomes as a parameter."""
    result = whole.clone()
    parts = [nn.Parameter(made(part.clone())) for part in cut(whole)]
    known = inspect.signature(type(optimizer).__init__).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in known.values())
    arguments = {key: value for key, value in optimizer.defaults.items() if key in known or takes_all}
    arguments |= {"lr": 0.01} if "lr" in known else {}
    twins = [type(optimizer)([{**options, "params": [part]}], **arguments) for part in parts]
    for step in range(3):
        gradient = (whole * (3 + step)).sin() + 0.1 * step
        for twin, part, own in zip(twins, parts, cut(gradient), strict=True):
            part.grad = made(own.clone())
            twin.step()
    for view, part in zip(cut(result), parts, strict=True):
        view.copy_(local(part))
    return result
