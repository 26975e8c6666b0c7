"""The engines. Each module here holds one `fivefold.jobs.job.Engine` as `ENGINE`, and is found by being here.

A module imports nothing heavy, and its engine's own package only inside of functions.
"""

import importlib
import pkgutil
from difflib import get_close_matches

from fivefold.core.errors import UserError
from fivefold.jobs.job import Engine


def names() -> tuple[str, ...]:
    """Names of all engines, sorted; nothing is imported."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def engine(name: str) -> Engine:
    """Return the engine of this name. Raises `UserError` if there is none."""
    if name not in names():
        near = get_close_matches(name, names(), n=1)
        raise UserError(
            f"--to {name} is no engine",
            fix=f"did you mean --to {near[0]}?" if near else f"--to {', '.join(names())}",
            more="fivefold docs start/cluster",
        )
    chosen: Engine = importlib.import_module(f"{__name__}.{name}").ENGINE
    return chosen
