"""The first weights of a run: what an adapter's checkpoint, which holds the adapter alone, lies beside."""

from typing import Any

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.models.build import weights_folder
from fivefold.models.sources import RandomInit, SafetensorsFolder, TensorSource


def base_source(config: RunConfig, model: Any) -> TensorSource:
    """Of a run's `model` on the meta device, without an adapter. Raises `UserError` where they are no longer there."""
    if config.model.init == "random":
        return RandomInit(model, config.train.seed)
    try:
        return SafetensorsFolder(weights_folder(config.model.name_or_path), model)
    except UserError as error:
        if config.adapter.lora is None:
            raise
        raise UserError(
            f"the model that the adapter is beside, {config.model.name_or_path}, cannot be read: {error.what}",
            fix=error.fix or "put its folder back, or run the command where it is found",
        ) from error
