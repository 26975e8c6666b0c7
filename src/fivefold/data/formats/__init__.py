"""The formats. Each `fivefold.data.source.Format` instance in a module here is registered automatically."""

import importlib
import pkgutil

from fivefold.data.source import Format


def discover() -> tuple[Format, ...]:
    """Every format, sorted by module name; within a module, in its order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(value for module in modules for value in vars(module).values() if isinstance(value, Format))
