"""The fields on which all ranks, and all nodes, of a run must agree."""

from collections.abc import Mapping
from typing import Any

from fivefold.config import RunConfig
from fivefold.core.alike import UNREAD, WHOLE, digests, program
from fivefold.core.named_code import NamedCode
from fivefold.core.run_folder import steps
from fivefold.data.prepare import PreparedData
from fivefold.data.tokenizer import tokenizer_files
from fivefold.models import hf_internals
from fivefold.models.build import config_values, load_model_config, weights_folder
from fivefold.models.sources import folder_digests
from fivefold.parallel.adapters.peft_folder import adapter_digests


def keys(config: RunConfig) -> dict[str, Any]:
    """The keys of the run file, and the code that it names. Raises `UserError`."""
    tree = config.model_dump(mode="json", by_alias=True)
    return {
        **{f"{section}.{key}": value for section, values in tree.items() for key, value in values.items()},
        **{f"the hash of {key}": NamedCode.read(text, key).digest for key, text in config.code.items()},
    }


def fields(config: RunConfig, data: PreparedData, of_disk: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields by name: `keys`, those of `files` as `of_disk`, the rows. Of two that differ, the first is the cause.
    Plain data."""
    return {
        **keys(config),
        **(of_disk or {}),
        "the hash of the tokenizer": data.tokenizer.digest,
        "the fingerprint of the rows": {**data.files, WHOLE: data.fingerprint},
    }


def begins(config: RunConfig) -> bool:
    """True if no checkpoint is here to go on from, so that first weights are read."""
    return not steps(config.run_dir / "checkpoints")


def files(config: RunConfig, data: PreparedData, *, begins: bool) -> dict[str, Any]:
    """The fields that only machines with disks of their own can differ in: the versions and files of packages, the
    files of the tokenizer, of the model and of the others that the objective names. `begins`: as the first rank sees
    it. Raises `UserError`."""
    model, given = config.model, config.objective
    base = f"model.name_or_path {model.name_or_path}"
    folder = data.tokenizer.folder
    read: dict[str, Any] = {
        **program(),
        "the tokenizer": digests(folder, tokenizer_files(folder)),
        f"{base}: config.json": config_values(load_model_config(model.name_or_path, model.overrides)),
    }
    if model.init == "pretrained":
        place = weights_folder(model.name_or_path, files=("*.json",))
        read[f"{base}: generation_config.json"] = config_values(hf_internals.generation_config(place))
        is_read = begins or config.adapter.lora or given.compares
        read[f"{base}: weights"] = folder_digests(weights_folder(model.name_or_path)) if is_read else UNREAD
    if config.adapter.path:
        read[f"adapter.path {config.adapter.path}"] = adapter_digests(config.adapter.path) if begins else UNREAD
    if given.compares and given.reference not in ("auto", "base"):
        read[f"objective.reference {given.reference}"] = folder_digests(weights_folder(given.reference))
    if given.name == "distill":
        teacher = weights_folder(given.teacher)
        read[f"objective.teacher {given.teacher}: config.json"] = config_values(load_model_config(teacher))
        read[f"objective.teacher {given.teacher}: the tokenizer"] = digests(teacher, tokenizer_files(teacher))
        read[f"objective.teacher {given.teacher}"] = folder_digests(teacher)
    return read
