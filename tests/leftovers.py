"""What a run of the tests must not leave behind: a process (and with it a port), or a file.

The process that starts a run marks its environment, which all that it starts inherits, and gives it a folder for
temporary files. At the end no other process may carry the mark, and nothing may be in the folder, in shared memory or
in the working tree that was not there before.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = "FIVEFOLD_TEST_RUN"
PATIENCE = 10.0  # seconds for what is about to end
SHARED_MEMORY = Path("/dev/shm")
# Of the last runs; compiled code; torchrun's logs; sockets of a process of xdist that took too long to end.
STAYS = ("pytest-of-", "torchinductor_", "torchelastic_", "pymp-")


@dataclass
class Leftovers:
    """Of one run. `folder`: of its temporary files; `before`: what was in shared memory and in the working tree."""

    folder: Path
    before: frozenset[str]

    @staticmethod
    def begin() -> "Leftovers":
        """Mark the environment of this process."""
        folder = Path(tempfile.mkdtemp(prefix="fivefold-tests-"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        os.environ[MARK] = str(folder)
        return Leftovers(folder, frozenset(_others()))

    def found(self) -> list[str]:
        """A line for each thing that is there and should not be."""
        end = time.monotonic() + PATIENCE
        while (processes := list(marked(str(self.folder)))) and time.monotonic() < end:
            time.sleep(0.1)
        files = [str(path) for path in self.folder.iterdir() if not path.name.startswith(STAYS)]
        return [*processes, *sorted(files), *sorted(set(_others()) - self.before)]

    def end(self, *, keep: bool) -> None:
        """Remove the folder, unless tests failed whose files may be wanted."""
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def marked(mark: str) -> Iterator[str]:
    """The other processes whose environment has the mark (none where there is no /proc)."""
    wanted = f"{MARK}={mark}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and wanted in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield f"process {process.name}: {command[:200]}"
        except OSError:  # it has ended, or is another user's
            continue


def _others() -> Iterator[str]:
    """Files of this user in shared memory, and those of the working tree."""
    if SHARED_MEMORY.is_dir():
        with os.scandir(SHARED_MEMORY) as found:
            yield from (each.path for each in found if each.stat(follow_symlinks=False).st_uid == os.getuid())
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [each for each in folders if not (each.startswith(".") or each == "__pycache__")]
        yield from (os.path.join(folder, each) for each in files)
