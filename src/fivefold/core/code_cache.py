"""Where code that this process runs is kept: bytecode of packages, and libraries that were compiled here.

What another user could put there would run as this one. So it is a folder of the cache only where neither it nor a
folder above it can be changed by others; else a folder of the user's own among the temporary ones.
"""

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fivefold.core.cache import cache_root
from fivefold.core.errors import UserError

_NO_PROGRAMS = getattr(os, "ST_NOEXEC", 0)
_UNMAPPED = 65534  # whom a container sees as the owner of what belongs to users that it does not know


def code_folder(kind: str) -> Path:
    """A folder for code of one kind ("kernels") that only this user and root can change, on a disk that programs may
    run from: the cache's if it is such a one, else one in a temporary folder.

    Raises `UserError` where there is none. Example: `/tmp/fivefold-1000/kernels`, for user 1000 of a cache that a team
    shares.
    """
    temporary = (Path(each) / f"fivefold-{os.getuid()}" for each in (tempfile.gettempdir(), "/tmp", "/var/tmp"))
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
    """Why code is not kept in `folder`, which is made where others cannot interfere; "" where it is."""
    if why := _changed_by_others(folder):
        return why
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := _changed_by_others(folder):  # it may be that another user was first
        return why
    if os.statvfs(folder).f_flag & _NO_PROGRAMS:
        return f"programs cannot run from {folder}"
    return "" if os.access(folder, os.W_OK) or any(folder.iterdir()) else f"{folder} cannot be written"


def _changed_by_others(folder: Path) -> str:
    """What on the way to `folder` another user can change; "" for nothing."""
    itself = Path(os.path.realpath(folder))
    for part in _on_the_way_to(folder):
        try:
            found = part.lstat()
        except FileNotFoundError:  # this user will make it
            continue
        if found.st_uid not in (os.getuid(), 0) and (part == itself or not _is_unmapped(found.st_uid)):
            return f"{part} is another user's"
        is_sticky = found.st_mode & stat.S_ISVTX and part != itself  # its files can be removed by their owners alone
        if stat.S_ISLNK(found.st_mode) or is_sticky:  # the mode of a link says nothing
            continue
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)):
            return f"{part} can be written by others"
    return ""


def _on_the_way_to(folder: Path) -> Iterator[Path]:
    """`folder`, all that it is in, and all that the links among these lead to."""
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
    """Whether nobody but this user and root is in a group: that of root, or of the user's name, as Linux makes it."""
    try:
        user, found = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return group == 0
    return group == 0 or (found.gr_name == user and not set(found.gr_mem) - {user})


@cache
def _is_unmapped(user: int) -> bool:
    """Whether `user` stands for all users whom this container does not know, the machine's root among them."""
    try:
        known = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    except OSError:
        return False
    return user == _UNMAPPED and known[:3] != ["0", "0", str(2**32 - 1)]
