"""fivefold: train any Hugging Face causal language model, unchanged, in five dimensions of parallelism."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.api import Run, export, generate, train, verify
    from fivefold.config import RunConfig, load_config
    from fivefold.errors import RunFailed, UserError
    from fivefold.layout import Layout
    from fivefold.parallel.apply import parallelize

    __version__: str

# Public name -> the module it lives in. Nothing is imported before it is used, torch least of all.
_HOMES = {
    "Layout": "fivefold.layout",
    "Run": "fivefold.api",
    "RunConfig": "fivefold.config",
    "RunFailed": "fivefold.errors",
    "UserError": "fivefold.errors",
    "export": "fivefold.api",
    "generate": "fivefold.api",
    "load_config": "fivefold.config",
    "parallelize": "fivefold.parallel.apply",
    "train": "fivefold.api",
    "verify": "fivefold.api",
}

__all__ = [
    "Layout",
    "Run",
    "RunConfig",
    "RunFailed",
    "UserError",
    "export",
    "generate",
    "load_config",
    "parallelize",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("fivefold.version").version_of("fivefold")
    if name not in _HOMES:
        raise AttributeError(f"module 'fivefold' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
