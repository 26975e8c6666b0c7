"""The memory of a node in which its workers keep a step: see `core/kept_steps.py`. No torch."""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fivefold.core.kept_steps import round_folder
from fivefold.launch.memory import room
from fivefold.launch.processes import scratch_folder

PLACE = Path("/dev/shm")
SPARE = 1 / 8  # the part of free memory that is left free
ENDING = "ending"  # in the folder where workers meet: the launcher ends them


class Memory:
    """A folder in the memory of this node that ends with this process: a context manager. `folder`: None on a machine
    without such a `place`, where nothing is kept."""

    def __init__(self, place: Path = PLACE) -> None:
        self._place = place
        self.folder: Path | None = None

    def __enter__(self) -> "Memory":
        with suppress(OSError):
            self.folder = scratch_folder("memory", self._place)
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def forget(self, but: int = 0) -> None:
        """Remove what is kept, but for one round."""
        for folder in self.folder.glob("round-*") if self.folder else ():
            if folder != round_folder(folder.parent, but):
                shutil.rmtree(folder, ignore_errors=True)

    def is_awaited(self, number: int, ranks: Sequence[int]) -> bool:
        """True if one of these ranks of a round may still write."""
        folder = self.folder and round_folder(self.folder, number)
        return folder is not None and any((folder / f"ready-{rank}").exists() for rank in ranks)


def free_bytes(folder: Path) -> int:
    """Bytes that may be written to a folder in memory; 0 if it has been removed."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    there = room()
    return int(min(found.f_bavail * found.f_frsize, there.free if there else 2**62) * (1 - SPARE))
