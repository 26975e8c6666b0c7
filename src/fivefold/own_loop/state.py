"""A parallelized model and its optimizer on disk, and as whole tensors."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fivefold import checkpoint
from fivefold.checkpoint import Checkpoint, Metadata, find_checkpoint
from fivefold.checkpoint.cut import WEIGHT
from fivefold.checkpoint.live import export_live, gathered
from fivefold.checkpoint.load import restore
from fivefold.checkpoint.manifest import MANIFEST
from fivefold.checkpoint.save import standing
from fivefold.core.alike import digests
from fivefold.core.errors import UserError
from fivefold.own_loop.batches import READ_MORE, leaves_inference_mode, refusal
from fivefold.own_loop.model import ParallelModel, check_parallel, check_spread
from fivefold.own_loop.optimizer import check_optimizer
from fivefold.parallel import parts, plain
from fivefold.parallel.placement import Placement
from fivefold.parallel.plain import check_alike, on_every_rank
from fivefold.parallel.state import state_of
from fivefold.training.optimizers.trial import IMPLEMENTATION


def gather(model: ParallelModel, *, gradients: bool = False) -> dict[str, Tensor]:
    """Every parameter by its Hugging Face name, whole, on the CPU of every rank; or its gradient, zeros without one.
    For a model with an adapter, the parameters of the adapter."""
    check_spread(model)
    return gathered(model, gradients=gradients)


def scatter(model: ParallelModel, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts of whole tensors, by the name of a parameter each: the inverse of `gather`.

    A part is computed with place by place, beside the parameter of its name or its gradient. Example, a mask that keeps
    the first 200 rows: `p.grad.mul_(ff.scatter(model, {name: mask})[name])`. Every rank gives the same values, of any
    type. Names of another pipeline rank are left out. Raises `UserError` for a name that no parameter has, or a shape
    that is not its own.
    """
    check_spread(model)
    placement, named = state_of(model).placement, dict(model.named_parameters())
    for name, whole in values.items():
        if (spec := placement.shards.get(name)) is None or tuple(whole.shape) != spec.shape:
            is_known = f"{name} has the shape {list(whole.shape)}, and the parameter {list(spec.shape)}" if spec else ""
            raise UserError(is_known or f"no parameter is called {name}", fix="names and shapes as ff.gather has them")
    return {name: _part(placement, name, named[name], values[name]) for name in values if name in named}


def _part(placement: Placement, name: str, parameter: Tensor, whole: Tensor) -> Tensor:
    own = torch.empty(placement.local_shape(name), dtype=whole.dtype, device=parameter.device)
    for global_region, local_region in placement.regions(name):
        own[local_region] = whole[global_region].to(own.device)
    return parts.part_like(parameter, own)


def save(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    *,
    state: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Save weights, optimizer state and the options of its parameter groups as the folder `path`, loadable under any
    layout. The folder appears once all of it is written and read back.

    `state`: any JSON value (a step, a scheduler's `state_dict()`), returned by `load`. `overwrite`: replace a
    checkpoint of that name, which `load` finds until the new one is there. Raises `UserError`, and `RunFailed` if it
    cannot be written.
    """
    check_parallel(model)

    def check() -> dict[str, Any]:
        if optimizer is not None:
            check_optimizer(optimizer, model)
        try:
            kept = json.loads(json.dumps(dict(state or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"state is not JSON: {error}", fix="numbers, texts, lists and dicts of them") from error
        return {"state": kept}

    about = on_every_rank(check)
    if optimizer is not None:
        about["optimizer"] = _described(model, optimizer)
    at = about["state"].get("step")
    count = at if isinstance(at, int) and at >= 0 else 0
    checkpoint.save(model, optimizer, Path(path), Metadata(step=count, state=about), overwrite=overwrite)
    return Path(path)


@leaves_inference_mode
def load(model: ParallelModel, optimizer: torch.optim.Optimizer | None, path: str | Path) -> dict[str, Any]:
    """Load the result of `save` at `path`, or the newest checkpoint of a run folder, under any layout. Returns the
    `state` given to `save`.

    The optimizer must be of the same class with the same parameters in the same groups; their options (rates, decay,
    betas) are replaced by the saved ones. Raises `UserError`, before anything changes, if that does not fit.
    """
    check_parallel(model)
    folder = standing(Path(path))

    def check() -> Checkpoint:
        opened = Checkpoint.described(folder) if (folder / MANIFEST).exists() else find_checkpoint(folder)
        if optimizer is not None:
            check_optimizer(optimizer, model)
            _check_fits(model, optimizer, opened)
        return opened

    opened = on_every_rank(check)
    check_alike(lambda: digests(opened.path, [opened.path / MANIFEST]), more=READ_MORE)
    saved = opened.state.get("optimizer") or {}
    restore(model, optimizer, opened, types=saved.get("types"))  # `types`: of earlier versions
    if optimizer is not None:
        for group, was in zip(optimizer.param_groups, saved.get("groups", ()), strict=False):
            for key, value in was["options"].items():
                if key not in IMPLEMENTATION:  # the implementation stays that of this optimizer
                    group[key] = _like(group.get(key), value)
    return dict(opened.state.get("state", opened.state))


def _described(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The class of an optimizer, and the options and parameter names (of all ranks) of each group."""
    own = [{"options": _options(group), "parameters": names} for group, names in _groups(model, optimizer)]
    everyone = plain.everywhere(own)
    groups = [
        {**group, "parameters": sorted({name for ranks in everyone for name in ranks[at]["parameters"]})}
        for at, group in enumerate(everyone[0])
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], list[str]]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(group, [names[id(parameter)] for parameter in group["params"]]) for group in optimizer.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that JSON supports; a tensor of one number as that number."""
    found = {}
    for key, value in group.items():
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        is_plain = value is None or isinstance(value, bool | int | str | list | tuple)
        if key not in ("params", "param_names") and (is_plain or (isinstance(value, float) and math.isfinite(value))):
            found[key] = value
    return found


def _like(now: Any, saved: Any) -> Any:
    """A saved option in the type of the current one: a tuple, a tensor."""
    if isinstance(now, tuple) and isinstance(saved, list):
        return tuple(saved)
    return torch.full_like(now, saved) if isinstance(now, Tensor) else saved


def _check_fits(model: nn.Module, optimizer: torch.optim.Optimizer, opened: Checkpoint) -> None:
    saved = opened.state.get("optimizer")
    if not saved and set(opened.kinds) <= {WEIGHT} and not opened.manifest.scalars:
        raise refusal(
            f"{opened.path} was saved without an optimizer: this one would begin anew",
            fix="load the weights alone: ff.load(model, None, path)",
        )
    if not saved:
        return
    if saved["class"] != type(optimizer).__name__:
        raise refusal(
            f"{opened.path} was saved with {saved['class']}, and this optimizer is {type(optimizer).__name__}",
            fix="build the optimizer that it was saved with, or load the weights alone: ff.load(model, None, path)",
        )
    groups = _groups(model, optimizer)
    if len(groups) != len(saved["groups"]):
        raise refusal(
            f"{opened.path} has {len(saved['groups'])} parameter groups, and the optimizer {len(groups)}",
            fix="build the optimizer with the groups that it was saved with",
        )
    for at, ((_, names), was) in enumerate(zip(groups, saved["groups"], strict=True)):
        here = {name for name, _ in model.named_parameters()}
        if different := sorted(set(names) ^ (set(was["parameters"]) & here)):
            raise refusal(
                f"{different[0]} is {'' if different[0] in names else 'not '}in parameter group {at}, and "
                f"{'was not' if different[0] in names else 'was'} when {opened.path} was saved",
                fix="build the optimizer with the groups that it was saved with",
            )


def export(model: ParallelModel, path: str | Path, *, dtype: str | None = None, force: bool = False) -> Path:
    """Write the whole model as the Hugging Face folder `path`, or its adapter as one of `peft`. Every rank calls this,
    and the first one writes.

    `dtype`: fp32, bf16, fp16 or fp64; None: the original type of the model if that has 16 bits, else the type it is
    trained in. `force` replaces an existing model folder.
    """
    check_parallel(model)
    export_live(model, Path(path), dtype=dtype, given=model.given_dtype, adapter=model.adapter, force=force)
    return Path(path)
