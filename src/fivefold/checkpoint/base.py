"""The initial weights of a run, the base of its adapter: the checkpoint of an adapter contains the adapter alone."""

from collections.abc import Mapping
from typing import Any

from fivefold.checkpoint.agreement import WEIGHTS, check_weights
from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.models.build import weights_folder
from fivefold.models.sources import RandomInit, TensorSource, open_weights, weights_digest


def base_source(config: RunConfig, model: Any) -> TensorSource:
    """Base weights of a run's `model` on the meta device, without an adapter. Raises `UserError` if they are gone."""
    if config.model.init == "random":
        return RandomInit(model, config.train.seed)
    try:
        return open_weights(weights_folder(config.model.name_or_path), model)
    except UserError as error:
        if config.adapter.lora is None:
            raise
        raise UserError(
            f"the model that the adapter is beside, {config.model.name_or_path}, cannot be read: {error.what}",
            fix=error.fix or "put its folder back, or run the command where it is found",
        ) from error


def weights_beside(config: RunConfig) -> dict[str, str]:
    """Digests of the weights that a run reads at every start, by the key of their path: those of its adapter's base, of
    its reference, of its teacher."""
    given, keys = config.objective, dict[str, str]()
    if config.model.init == "pretrained" and (config.adapter.lora or given.compares):
        keys["model.name_or_path"] = config.model.name_or_path
    if given.compares and given.reference not in ("auto", "base"):
        keys["objective.reference"] = given.reference
    if given.name == "distill":
        keys["objective.teacher"] = given.teacher
    return {key: weights_digest(weights_folder(name)) for key, name in keys.items()}


def check_base(config: RunConfig, saved: Mapping[str, Any], where: str) -> None:
    """Raise `UserError` if an adapter's base weights are not those it was trained with; `saved`: the agreement of its
    checkpoint."""
    if config.model.init == "pretrained":
        key, name = "model.name_or_path", config.model.name_or_path
        digest = weights_digest(weights_folder(name))
        check_weights(saved, {f"{WEIGHTS}{key}": digest, key: name}, where=where)
