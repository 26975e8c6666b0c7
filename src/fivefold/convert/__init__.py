"""A run file from the config of another trainer: axolotl, LLaMA-Factory, TRL.

The other trainer's defaults are written out, because defaults differ: the weight decay of TRL is 0, and that of a run
file 0.1. Every key of the other file keeps its meaning, is marked as changed next to its line, is listed without
counterpart, or is refused.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fivefold.config.runfile import RunFile
from fivefold.config.schema import RunConfig
from fivefold.convert import rules
from fivefold.convert.data import data
from fivefold.convert.given import Converted, Given, Schema, schema
from fivefold.core.errors import UserError

_RULES: tuple[Callable[[Given], rules.Keys], ...] = (
    rules.model, rules.objective, data, rules.adapter, rules.batch, rules.length, rules.optimizer, rules.noise,
    rules.schedule, rules.precision, rules.evaluation, rules.run, rules.best,
)  # fmt: skip
_FILES = {"axolotl": "axolotl", "LLaMA-Factory": "llamafactory", "TRL": "trl"}
_SFT_LOSSES = ("nll", "chunked_nll")  # of SFTConfig; they are one loss


def convert(path: Path, *, devices: int = 1) -> Converted:
    """The run file that trains as the config at `path` does, on `devices` devices.

    Raises `UserError` for a file that cannot be read, belongs to no known trainer, or asks for something that a run
    file does not support.
    """
    file = RunFile.read(path)
    trainer = _trainer(file.tree)
    if trainer is None:
        raise UserError(
            f"{file.name} is no config of {', '.join(_FILES)}: it names no model and no data as they do",
            fix="base_model is axolotl's; stage, cutoff_len LLaMA-Factory's; model_name_or_path, dataset_name TRL's",
        )
    given = Given(
        file.tree, _schema(file.tree, trainer, file.name), path.parent, devices, Converted(trainer, file.name)
    )
    for rule in _RULES:
        try:
            for key, value, *changed in rule(given):
                given.found.keys[key] = value
                if said := "; ".join(filter(None, changed)):
                    given.found.changed[key] = said
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise UserError(
                f"{file.name}: what it says of the {rule.__name__} cannot be read: {error}",
                fix=f"is it as {trainer} takes it?",
            ) from error
    given.finish()
    try:
        RunConfig.model_validate(given.found.tree)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"][:2]))
        what = f"{file.name}: {name} would be {given.found.keys.get(name)!r}: {first['msg']}"
        raise UserError(what, fix="change that there, or write the run file by hand") from error
    return given.found


def _trainer(tree: Mapping[str, Any]) -> str | None:
    if "base_model" in tree:
        return "axolotl"
    if {"stage", "finetuning_type", "cutoff_len", "dataset_dir"} & tree.keys():
        return "LLaMA-Factory"
    return "TRL" if "model_name_or_path" in tree else None


def _schema(tree: Mapping[str, Any], trainer: str, file: str) -> Schema:
    """The schema of the trainer; for TRL, the trainer is chosen by `loss_type` or by keys of its own."""
    if trainer != "TRL":
        return schema(_FILES[trainer])
    loss, own = tree.get("loss_type"), tree.keys()
    losses = loss if isinstance(loss, list) else [loss] if loss else []
    if losses == ["kto"] or {"desirable_weight", "undesirable_weight"} & own:
        return schema("trl", "kto")
    if losses and losses[0] not in _SFT_LOSSES:
        return schema("trl", "dpo")
    if "beta" in own and not losses:
        raise UserError(
            f"{file}: beta is a key of several objectives, and no other key says which it is",
            fix="loss_type: [sigmoid] is DPO, and loss_type: kto KTO; GRPO, ORPO and the others are not converted",
            more="fivefold docs howto/convert",
        )
    return schema("trl", "sft")
