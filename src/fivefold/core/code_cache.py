"""Folders for code that this process runs: bytecode of packages, and libraries compiled here.

Code that another user puts there would run as this user. So the cache is used only if others can change neither the
folder nor a parent of it; otherwise a folder of the user's own among the temporary ones.
"""

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from fivefold.core.cache import cache_root, key_of
from fivefold.core.cpuinfo import cpuinfo
from fivefold.core.errors import UserError

_NO_PROGRAMS = getattr(os, "ST_NOEXEC", 0)
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_CPU = ("model name", "flags", "Features")  # what code that is compiled for a CPU depends on
_UNMAPPED = 65534  # the owner that a container shows for files of users it does not know


def code_folder(kind: str) -> Path:
    """Folder for code of one kind ("kernels"), writable only by this user and root, on a disk that runs programs.

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


def keep_compiled(env: MutableMapping[str, str] = os.environ) -> None:
    """Let torch keep what it compiles in the cache, apart for each kind of CPU, unless the user has named a folder for
    it or the cache cannot be written. By default torch leaves a folder in TMPDIR."""
    if INDUCTOR not in env:
        about = [line for line in cpuinfo().split("\n\n")[0].splitlines() if line.startswith(_CPU)]
        with suppress(UserError):
            if os.access(folder := code_folder("inductor"), os.W_OK):  # a cache that is only read has kernels
                env[INDUCTOR] = str(folder / key_of(*about))


def _lacks(folder: Path) -> str:
    """Return why `folder` cannot hold code, "" if it can. Creates the folder where others cannot interfere."""
    if why := _changed_by_others(folder):
        return why
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := _changed_by_others(folder):  # another user may have been first
        return why
    if os.statvfs(folder).f_flag & _NO_PROGRAMS:
        return f"programs cannot run from {folder}"
    return "" if os.access(folder, os.W_OK) or any(folder.iterdir()) else f"{folder} cannot be written"


def _changed_by_others(folder: Path) -> str:
    """Name the first path on the way to `folder` that another user can change; "" if there is none."""
    itself = Path(os.path.realpath(folder))
    for part in _on_the_way_to(folder):
        try:
            found = part.lstat()
        except FileNotFoundError:  # this user will create it
            continue
        if found.st_uid not in (os.getuid(), 0) and (part == itself or not _is_unmapped(found.st_uid)):
            return f"{part} is another user's"
        is_sticky = found.st_mode & stat.S_ISVTX and part != itself  # only owners can remove its files
        if stat.S_ISLNK(found.st_mode) or is_sticky:  # a link's own mode is meaningless
            continue
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)):
            return f"{part} can be written by others"
    return ""


def _on_the_way_to(folder: Path) -> Iterator[Path]:
    """Yield `folder` and its parents, and the same for the target of each link among them."""
    left, seen = [Path(os.path.abspath(folder)), Path(os.path.realpath(folder))], set[Path]()
    while left:
        at = left.pop(0)
        for part in (*reversed(at.parents), at):
            if part in seen:
                continue
            seen.add(part)
            yield part
            if part.is_symlink():
                left.append(Path(os.path.abspath(os.path.realpath(part.parent) / part.readlink())))


def _is_own_group(group: int) -> bool:
    """True if only this user and root are in a group: root's, or the one of the user's name that Linux makes."""
    try:
        user, found = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return group == 0
    return group == 0 or (found.gr_name == user and not set(found.gr_mem) - {user})


@cache
def _is_unmapped(user: int) -> bool:
    """True if `user` stands for all users unknown to this container, including the machine's root."""
    try:
        known = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    except OSError:
        return False
    return user == _UNMAPPED and known[:3] != ["0", "0", str(2**32 - 1)]
