"""The worker processes of this machine: started, waited for, ended.

Workers meet in a file of a folder that nobody else may enter: no port is opened for it, and nothing that is read there
is a pickle. Who would hear of the rendezvous over a port could take the place of a rank.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from fivefold.launch.restart import WorkerDied
from fivefold.launch.world import worker_environment

PAUSE_SECONDS = 0.05
GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL, for those that are left when one has ended
CONSEQUENCE_SECONDS = 0.2  # how long others that fail are looked at: who failed first may be seen second
AT_ONCE = 3  # so many signals, as Ctrl-C three times, leave no time to anyone
POLITE = (130, 143)  # exit codes of a worker that was asked to stop, as shells report Ctrl-C and SIGTERM
PREFIX = "fivefold-"  # of our folders in the temporary one
_OWNER = ".owner"


class Workers:
    """Worker processes by rank, and the signals that this process was sent meanwhile: a context manager.

    Signals that come in are passed on, and the workers decide what becomes of them. Leaving the context ends all that
    still run.
    """

    def __init__(self, command: Sequence[str], *, count: int, folder: Path) -> None:
        """`count` processes of `command`, which meet in `folder`."""
        self.signals: list[signal.Signals] = []
        self._command, self._count, self._folder = command, count, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Workers":
        self._hear()
        try:
            for rank in range(self._count):
                environment = worker_environment(rank, self._count, self._folder)
                # In sessions of their own: Ctrl-C in the terminal comes to this process, which passes it on.
                started = subprocess.Popen(
                    self._command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
                )
                self._processes.append(started)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            for each, handler in self._handlers.items():
                signal.signal(each, handler)

    @property
    def ids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes of those that have ended, by rank; negative: the signal."""
        return {rank: code for rank, process in enumerate(self._processes) if (code := process.poll()) is not None}

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        ended = self.codes
        return [rank for rank in range(len(self._processes)) if rank not in ended]

    def turns(self) -> Iterator[None]:
        """One turn every few milliseconds until all have ended, or one has failed, or those that are left of a polite
        stop have had their time."""
        passed_on, deadline = 0, math.inf
        while self.running and time.monotonic() < deadline and passed_on < AT_ONCE:
            for each in self.signals[passed_on:]:
                passed_on += 1
                # A closed terminal stops a run as politely as SIGTERM does.
                self.send(each if each == signal.SIGINT else signal.SIGTERM, self.running)
            codes = self.codes.values()
            is_polite = bool(self.signals) or any(code in POLITE for code in codes)
            if any(codes) and not is_polite:
                time.sleep(CONSEQUENCE_SECONDS)
                return
            if is_polite and codes:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            yield
            time.sleep(PAUSE_SECONDS)

    def end(self, *, at_once: bool = False) -> None:
        """End those that still run: SIGTERM, then SIGKILL; `at_once`: SIGKILL, which a stopped process heeds too."""
        deadline = time.monotonic() + (0 if at_once else GRACE_SECONDS)
        if not at_once:
            self.send(signal.SIGTERM, self.running)
        while self.running and time.monotonic() < deadline and len(self.signals) < AT_ONCE:
            time.sleep(PAUSE_SECONDS)
        self.send(signal.SIGKILL, self.running)
        for process in self._processes:
            process.wait()

    def send(self, number: signal.Signals, ranks: Sequence[int]) -> None:
        """Send a signal to some ranks."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                self._processes[rank].send_signal(number)

    def _hear(self) -> None:
        """Note signals that would end this process; one that is ignored, as under nohup, stays so."""
        if threading.current_thread() is not threading.main_thread():
            return

        def note(number: int, _: FrameType | None) -> None:
            self.signals.append(signal.Signals(number))

        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(each) is not signal.SIG_IGN:
                self._handlers[each] = signal.signal(each, note)


@contextmanager
def private_folder() -> Iterator[Path]:
    """A temporary folder that only this user may enter, removed afterwards."""
    folder = scratch_folder("workers")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def kept_if_one_dies(what: str) -> Iterator[Path]:
    """A `scratch_folder` that is removed afterwards; where a worker has died it stays, for the message names it."""
    folder = scratch_folder(what)
    try:
        yield folder
    except WorkerDied:
        keep(folder)
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def scratch_folder(what: str) -> Path:
    """A temporary folder that only this user may enter. It is this process's to remove, or to `keep`; where it was
    killed before it could, the next one does."""
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{what}-"))
    (folder / _OWNER).write_text(json.dumps(_identity(os.getpid())), encoding="utf-8")
    return folder


def keep(folder: Path) -> None:
    """Leave a `scratch_folder` to the user."""
    (folder / _OWNER).unlink(missing_ok=True)


def _sweep(place: Path) -> None:
    """Remove this user's folders whose process is gone."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            owner: dict[str, Any] = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
            if owner["host"] == os.uname().nodename and owner != _identity(int(owner["pid"])):
                shutil.rmtree(folder, ignore_errors=True)


def _identity(pid: int) -> Mapping[str, Any]:
    """What tells a process from a later one of the same number; without a start where there is none of that number."""
    start = ""
    with suppress(OSError):
        start = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    if not start:
        with suppress(OSError):
            os.kill(pid, 0)
            start = "runs"
    return {"host": os.uname().nodename, "pid": pid, "start": start}
