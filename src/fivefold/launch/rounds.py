"""One writer: what a round of nodes owns in the run folder, so that a rank of an earlier round changes nothing there.

A node may stand still (a laptop's lid, a virtual machine that moves) until the others have gone on without it, and then
wake in the middle of a save. No check before a write can help: it may have stood still between the two. So the first
rank of a round takes two folders, `.round-N` in the run folder and in `checkpoints`, which may be on another disk, by
renaming those of the round before, each in one call of the system. What is written anew, a checkpoint or a file, is
prepared there and renamed to its place: for a round that is over, no such path is there. Rows are appended to files
that each round replaces as it begins: what an earlier one has open is no longer the file of that name.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from fivefold.core import files

KEPT = 2  # rounds whose logs are kept
_ROOM = re.compile(r"\.round-(\d{6,})")


class RoundOver(Exception):
    """The other nodes have gone on without this rank, which was silent for too long."""


def room(folder: Path, number: int) -> Path:
    """Folder where round `number` prepares files of `folder`; 0, for a run without rounds: `folder` itself."""
    return folder / f".round-{number:06d}" if number else folder


def logs_of(run_dir: Path, number: int) -> Path:
    """The folder for logs and failures of round `number`; 0: of a run without rounds."""
    return run_dir / "logs" / f"round-{number}" if number else run_dir / "logs"


def last_round(folder: Path) -> int:
    """The last round that has written to `folder`; 0 if there was none."""
    return max(_rounds(folder), default=0)


def take(folder: Path, number: int) -> None:
    """Make `number` the one round that writes to `folder`. Raises `RoundOver` if it, or a later one, has been that."""
    is_taken = False
    while (last := last_round(folder)) < number:
        if not _rounds(folder):
            (folder / ".round-000000").mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another round was faster
            files.rename(folder / f".round-{last:06d}", room(folder, number))
            is_taken = True
    if not is_taken or last != number:
        raise RoundOver(f"round {last} writes to {folder}, and this is round {number}")


def check(folder: Path, number: int) -> None:
    """Raise `RoundOver` if round `number` no longer writes to `folder`. It may be over a moment later."""
    if number and not room(folder, number).is_dir():
        raise RoundOver(f"the other nodes have gone on without this one, which is of round {number}")


def clear_logs(run_dir: Path) -> None:
    """Remove the logs of all rounds but the last ones."""
    numbers = [folder.name.rpartition("-")[2] for folder in (run_dir / "logs").glob("round-*")]
    for number in sorted(int(text) for text in numbers if text.isdecimal())[:-KEPT]:
        shutil.rmtree(logs_of(run_dir, number), ignore_errors=True)


def _rounds(folder: Path) -> list[int]:
    with suppress(OSError):
        return [int(match[1]) for match in map(_ROOM.fullmatch, os.listdir(folder)) if match]
    return []
