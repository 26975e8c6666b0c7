"""Speed on a CPU: kernels of attention, served to `models/kernels.py`, and collectives over shared memory, to which
`parallel/mesh.py` connects groups. Both are C, compiled at first use; without a compiler PyTorch and gloo serve."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

from fivefold.core.c_library import kept_library
from fivefold.core.errors import UserError, first_line


def library_or_lack(
    name: str, key: Sequence[object], *, build: Callable[[Path], object],
    load: Callable[[Path], ctypes.CDLL] = lambda library: ctypes.CDLL(str(library)),
) -> ctypes.CDLL | str:  # fmt: skip
    """The library `name` of this folder (see `kept_library`), or why there is none."""
    try:
        return kept_library("kernels", name, key, build=build, load=load)
    except (UserError, OSError, ValueError) as error:
        return first_line(error)
