"""The bytecode of Python packages, kept in the cache where it is kept nowhere else.

uv installs packages without it, images of containers set PYTHONDONTWRITEBYTECODE, and site-packages may be read-only:
then every process compiles torch, transformers and sympy anew, 3.7 of the 5.8 CPU seconds that their import takes.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from fivefold.core.code_cache import code_folder
from fivefold.core.errors import UserError

PACKAGES = ("torch", "transformers")  # they are large, and installed like the others
_PREFIX, _NONE = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


def keep() -> None:
    """From here on keep bytecode in the cache, in this process and in those that it starts, if it is kept nowhere else.

    A prefix that the user has set stays.
    """
    if sys.pycache_prefix is not None or not any(map(_has_none, PACKAGES)):
        return
    try:
        folder = code_folder("bytecode")
    except UserError:
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ[_PREFIX] = str(folder)
    os.environ.pop(_NONE, None)


def _has_none(package: str) -> bool:
    """Whether a package has no bytecode, and will have none."""
    spec = find_spec(package)
    if spec is None or spec.cached is None or Path(spec.cached).exists():
        return False
    return sys.dont_write_bytecode or not os.access(Path(spec.cached).parents[1], os.W_OK)
