"""A run file from the config of another trainer: axolotl, LLaMA-Factory, TRL.

What the other trainer does where its file is silent is written out, for defaults differ: the weight decay of TRL is 0,
and that of a run file 0.1. A key without a counterpart is named, with what to do instead.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fivefold.config.convert import rules
from fivefold.config.convert.data import data
from fivefold.config.convert.given import DEFAULTS, Converted, Given
from fivefold.config.runfile import RunFile
from fivefold.config.schema import RunConfig
from fivefold.core.errors import UserError

_RULES: tuple[Callable[[Given], rules.Keys], ...] = (
    rules.model, data, rules.objective, rules.adapter, rules.batch, rules.length, rules.optimizer, rules.schedule,
    rules.precision, rules.evaluation, rules.run,
)  # fmt: skip


def convert(path: Path, *, devices: int = 1) -> Converted:
    """The run file that trains as the config at `path` does, on so many devices.

    Raises `UserError` for a file that cannot be read, or is of no trainer that is known.
    """
    file = RunFile.read(path)
    trainer = _trainer(file.tree)
    if trainer is None:
        raise UserError(
            f"{file.name} is no config of {', '.join(DEFAULTS)}: it names no model and no data as they do",
            fix="base_model is axolotl's; stage, cutoff_len LLaMA-Factory's; model_name_or_path, dataset_name TRL's",
        )
    given = Given(file.tree, trainer, path.parent, devices, Converted(trainer, file.name))
    for rule in _RULES:
        try:
            given.found.keys.update(rule(given))
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise UserError(
                f"{file.name}: what it says of the {rule.__name__} cannot be read: {error}",
                fix=f"is it as {trainer} takes it?",
            ) from error
    given.leave_the_rest()
    _keep_valid(given.found)
    return given.found


def _trainer(tree: Mapping[str, Any]) -> str | None:
    if "base_model" in tree:
        return "axolotl"
    if {"stage", "finetuning_type", "cutoff_len", "dataset_dir"} & tree.keys():
        return "LLaMA-Factory"
    return "TRL" if "model_name_or_path" in tree else None


def _keep_valid(found: Converted) -> None:
    """Move what a run file does not take from `keys` to `left`."""
    while True:
        try:
            RunConfig.model_validate(found.tree)
            return
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"][:2]))
            if name not in found.keys:
                raise UserError(f"{found.file}: {name}: {first['msg']}", fix="write the run file by hand") from error
            found.left[name] = f"{found.keys.pop(name)!r} is no value of it: {first['msg']}"
