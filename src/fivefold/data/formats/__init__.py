"""One file per format. A module here with a `FORMAT` (a `fivefold.data.source.Format`) is found by its being here."""

import importlib
import pkgutil

from fivefold.data.source import Format


def discover() -> tuple[Format, ...]:
    """Every format, sorted by module name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f"{__name__}.{name}").FORMAT for name in names)
