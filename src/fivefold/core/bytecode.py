"""The bytecode of Python packages, kept in the cache where it is kept nowhere else.

uv installs packages without it, images of containers set PYTHONDONTWRITEBYTECODE, and site-packages may be read-only:
then every process compiles torch, transformers and sympy anew, 3.7 of the 5.8 CPU seconds that their import takes.
"""

import os
import stat
import sys
from importlib.util import find_spec
from pathlib import Path

from fivefold.core.cache import cache_root
from fivefold.core.errors import UserError

PACKAGES = ("torch", "transformers")  # they are large, and installed like the others
_PREFIX, _NONE = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


def keep() -> None:
    """From here on keep bytecode in the cache, in this process and in those that it starts, if it is kept nowhere else.

    A prefix that the user has set stays. So does what is, where the cache is not this user's alone: it runs.
    """
    if sys.pycache_prefix is not None or not any(map(_has_none, PACKAGES)):
        return
    try:
        folder = cache_root() / "bytecode"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder):
            return
    except (OSError, UserError):
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


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can write there."""
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
