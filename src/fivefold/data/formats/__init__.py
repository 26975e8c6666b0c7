"""The formats. A `fivefold.data.source.Format` that a module here makes is found by its being here."""

import importlib
import pkgutil

from fivefold.data.source import Format


def discover() -> tuple[Format, ...]:
    """Every format, sorted by module name; those of a module as they stand in it."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(value for module in modules for value in vars(module).values() if isinstance(value, Format))
