"""Folders of the code that this process runs: of modules, and of what is compiled here.

Code that another user puts there would run as this user. So a folder for code is private: only its owner writes to it.
"""

import os
import stat
import sys
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from fivefold.core.cache import cache_root, key_of
from fivefold.core.errors import UserError
from fivefold.core.system import cpuinfo

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_NO_PROGRAMS = getattr(os, "ST_NOEXEC", 0)
_CPU = ("model name", "flags", "Features")  # what code that is compiled for a CPU depends on


def code_folder(kind: str) -> Path:
    """Folder for code of one kind ("kernels"), which this user or root owns and nobody else writes to, on a disk that
    runs programs.

    The cache's folder if it qualifies, else one in a temporary folder. Raises `UserError` if there is none.
    Example: `/tmp/fivefold-1000/kernels`, for user 1000 of a cache that a team shares.
    """
    temporary = (Path(base) / f"fivefold-{os.getuid()}" for base in (tempfile.gettempdir(), "/tmp", "/var/tmp"))
    refused = list[str]()
    for root in (cache_root(), *temporary):
        try:
            if lacks := _lacks(root / kind):
                refused.append(lacks)
            else:
                return root / kind
        except OSError as error:
            refused.append(f"{root / kind}: {error.strerror or error}")
    raise UserError(
        f"no folder for compiled code that this user alone can change: {refused[0]}",
        fix="point FIVEFOLD_CACHE or TMPDIR to a folder of your own",
    )


def _lacks(folder: Path) -> str:
    """Return why `folder` cannot hold code, "" if it can. Creates the folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0):
        return f"{folder} is another user's"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} can be written by others"
    if os.statvfs(folder).f_flag & _NO_PROGRAMS:
        return f"programs cannot run from {folder}"
    return "" if os.access(folder, os.W_OK) or any(folder.iterdir()) else f"{folder} cannot be written"


def leave_out_current_folder() -> None:
    """Remove the current folder from the path of this process, if Python put it there, and of its children: its files
    are data, and a model folder may hold a `heapq.py`. `python -m` and `python -c` put it first."""
    with suppress(FileNotFoundError):  # a folder that was removed has no files
        if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
            del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"


def keep_compiled(env: MutableMapping[str, str] = os.environ) -> None:
    """Let torch keep what it compiles in the cache, apart for each kind of CPU, unless the user has named a folder for
    it or the cache cannot be written. By default torch leaves a folder in TMPDIR."""
    if INDUCTOR not in env:
        about = [line for line in cpuinfo().split("\n\n")[0].splitlines() if line.startswith(_CPU)]
        with suppress(UserError):
            if os.access(folder := code_folder("inductor"), os.W_OK):  # a cache that is only read has kernels
                env[INDUCTOR] = str(folder / key_of(*about))
