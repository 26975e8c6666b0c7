"""The run folder while a run writes to it: locked, watched, and made again when someone removes it."""

import os
from collections.abc import Callable
from pathlib import Path

from fivefold.core.files import replace
from fivefold.launch.folder import LOCK, FolderLock


class HeldFolder:
    """Rank 0's hold on its run folder; on other ranks nothing is taken, and nothing done."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self._lock = run_dir, None
        self._files: dict[str, bytes] = {}
        self._is_lost = False

    _lock: FolderLock | None

    def take(self) -> None:
        """Keep other runs from writing to it. Raises `UserError` when one does already."""
        self._lock = FolderLock(self.run_dir)

    def release(self) -> None:
        """Let others write."""
        if self._lock:
            self._lock.release()
        self._lock = None

    def remember(self, *names: str) -> None:
        """Keep the contents of these small files, to write them again if the folder is removed."""
        self._files |= {name: (self.run_dir / name).read_bytes() for name in names}

    def look(self, say: Callable[[str], None]) -> None:
        """See whether the folder is there; one that was removed is made again, with the files that were remembered.

        Raises `UserError` when another run has taken its place. What cannot be written is said, once.
        """
        if self._lock is None or self._lock.is_at(self.run_dir / LOCK):
            return
        gone = {name: content for name, content in self._files.items() if not (self.run_dir / name).exists()}
        try:
            (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
            lock, self._lock = self._lock, FolderLock(self.run_dir)
            lock.release()
            for name, content in gone.items():
                replace(self.run_dir / name, content)
        except OSError as error:
            if not self._is_lost:
                say(f"WARNING: {self.run_dir} was removed, and cannot be made again: {error.strerror or error}")
            self._is_lost = True
            return
        self._is_lost = False
        if not gone:  # the lock alone
            return
        there = "its checkpoints are gone, and the next one is saved on time"
        if any(os.scandir(self.run_dir / "checkpoints") if (self.run_dir / "checkpoints").is_dir() else ()):
            there = "its checkpoints are there"
        say(f"WARNING: {self.run_dir} was removed while this run writes to it; it is made again: {there}")
