"""The fields on which all ranks, and all nodes, of a run must agree."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fivefold.config import RunConfig
from fivefold.core.named_code import NamedCode
from fivefold.data.prepare import PreparedData

_PACKAGES = ("fivefold", "torch", "transformers", "safetensors", "tokenizers")


def fields(config: RunConfig, data: PreparedData) -> Mapping[str, Any]:
    """The fields by name: the keys of the run file, the rows, the tokenizer, the versions. Plain data."""
    return {
        **{
            f"{section}.{key}": value
            for section, values in config.model_dump(mode="json", by_alias=True).items()
            for key, value in values.items()
        },
        **{f"the hash of {key}": NamedCode.read(text, key).digest for key, text in config.code.items()},
        "the fingerprint of the rows": data.fingerprint,
        "the hash of the tokenizer": data.tokenizer.digest,
        "the version of python": platform.python_version(),
        **{f"the version of {package}": version(package) for package in _PACKAGES},
    }


def difference(mine: Mapping[str, Any], first: Mapping[str, Any]) -> str | None:
    """The first field that differs; None if all agree."""
    return next((name for name in {**first, **mine} if first.get(name) != mine.get(name)), None)
