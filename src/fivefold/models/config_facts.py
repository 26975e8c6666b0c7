"""The facts of a model from its config alone. Torch is imported only if facts are neither shipped nor cached yet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.core.cache import key_of
from fivefold.core.shapes import read_model_config, shape_folder
from fivefold.models.facts import ModelFacts
from fivefold.models.facts_store import about_code, kept, shipped_facts


def facts_of_config(
    name: str | Path, overrides: Mapping[str, Any] | None = None, *, of_text: Mapping[str, Any] | None = None
) -> ModelFacts:
    """The facts of a model by its folder, its config.json, a built-in shape or a hub id; no weights are read.

    `overrides`, `of_text`: replaced keys of its config, as in `load_model_config`. Torch is imported only if facts are
    neither shipped nor cached yet. Raises `UserError` for a model that cannot be read or trained.
    """
    shape, changes = shape_folder(str(name)), [dict(mapping) for mapping in (overrides, of_text) if mapping]
    if shape is not None and not changes and (shipped := shipped_facts(shape)) is not None:
        return shipped

    def found() -> ModelFacts:
        from fivefold.models.build import build_meta, load_model_config
        from fivefold.models.discover import facts_of_deep

        return facts_of_deep(build_meta(load_model_config(name, overrides, of_text=of_text)))

    return kept(key_of("config", *about_code(), read_model_config(name), changes), found)
