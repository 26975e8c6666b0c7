"""The worker processes of this machine: started, waited for, ended.

A process that imports what they run forks them (`fork_server.py`). They meet in a file of a folder that nobody else
may enter: no port is opened for it, and nothing that is read there is a pickle. Who would hear of the rendezvous over a
port could take the place of a rank.
"""

import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from fivefold.core import streams
from fivefold.core.interrupts import ENDING
from fivefold.launch.failure import WorkerDied
from fivefold.launch.world import server_environment, worker_environment

PAUSE_SECONDS = 0.05
GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL, for those that are left when one has ended
REPORT_SECONDS = 2.0  # how long the process that forks has to tell of those that were killed
CONSEQUENCE_SECONDS = 0.2  # how long others that fail are looked at: who failed first may be seen second
AT_ONCE = 3  # so many times Ctrl-C leave no time to anyone
POLITE = (130, 143)  # exit codes of a worker that was asked to stop, as shells report Ctrl-C and SIGTERM
_PIPE_BYTES = 2**20
PREFIX = "fivefold-"  # of our folders in the temporary one
_OWNER = ".owner"


class Workers:
    """Worker processes by rank, forked by a process that imports what they run: a context manager.

    The imports begin here, and go on while the caller does something else. `started` starts the workers, and again
    after they have ended.
    """

    def __init__(self, body: str, *, count: int) -> None:
        """`count` processes of `body`, named as `package.module:function`."""
        self.signals: list[signal.Signals] = []
        self.body, self.count = body, count
        self.ids: list[int] = []  # of the processes, by rank
        self._codes: dict[int, int] = {}

    def __enter__(self) -> "Workers":
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _open(self) -> None:
        """Start the process that forks."""
        self._reports, theirs = os.pipe()
        os.set_blocking(self._reports, False)
        self._heard = select.poll()  # `select` takes no descriptor from 1024 on, and Python code may have as many open
        self._heard.register(self._reports, select.POLLIN)
        command = [sys.executable, "-P", "-m", "fivefold.launch.fork_server", self.body, str(theirs)]
        # In a session of its own: Ctrl-C in the terminal comes to this process alone.
        self._server = subprocess.Popen(
            command, env=server_environment(self.count), stdin=subprocess.PIPE, pass_fds=[theirs],
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def _close(self) -> None:
        """End it, and with it those that it has forked."""
        self._server.kill()
        self._server.communicate()
        while len(self._codes) < self.count:  # it may have forked some of which nothing was heard yet
            self._listen(PAUSE_SECONDS)
        os.close(self._reports)

    @contextmanager
    def started(self, request: Path, folder: Path) -> Iterator[None]:
        """Inside, the workers run for the request in this file, and meet in `folder`; those that are left end with it.

        Signals that this process is sent meanwhile are noted and passed on, and the workers decide what becomes of
        them.
        """
        if self._server.poll() is not None:  # something has killed it, which ended the workers before these
            self._close()
            self._open()
        self.signals, self.ids, self._codes = [], [], {}
        places = [worker_environment(rank, self.count, folder) for rank in range(self.count)]
        start = {"request": str(request), "places": places, "unseen": streams.is_lost()}
        assert self._server.stdin is not None
        with self._hearing():
            try:
                with suppress(BrokenPipeError):  # it has ended: what it reported says so
                    self._server.stdin.write(f"{json.dumps(start)}\n".encode())
                    self._server.stdin.flush()
                yield
            finally:
                self.end()

    @property
    def server(self) -> int:
        """The id of the process that forks them."""
        return self._server.pid

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes of those that have ended, by rank; negative: the signal."""
        self._listen()
        return dict(self._codes)

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        ended = self.codes
        return [rank for rank in range(len(self.ids)) if rank not in ended]

    def turns(self) -> Iterator[None]:
        """One turn every few milliseconds until all have ended, or one has failed, or those that are left of a polite
        stop have had their time. Before they are forked, until a signal."""
        passed_on, deadline = 0, math.inf
        while (self.running or self._are_awaited) and time.monotonic() < deadline and not self._is_urgent:
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
            self._listen(PAUSE_SECONDS)

    def end(self, *, at_once: bool = False) -> None:
        """End those that still run: SIGTERM, then SIGKILL; `at_once`: SIGKILL, which a stopped process heeds too."""
        deadline = time.monotonic() + (0 if at_once else GRACE_SECONDS)
        if not at_once:
            self.send(signal.SIGTERM, self.running)
        while self.running and time.monotonic() < deadline and not self._is_urgent:
            self._listen(PAUSE_SECONDS)
        self.send(signal.SIGKILL, self.running)
        deadline = time.monotonic() + REPORT_SECONDS
        while self.running:
            self._listen(PAUSE_SECONDS)
            if time.monotonic() > deadline:  # it is stopped, or a worker waits for a disk
                self._server.kill()

    @property
    def _are_awaited(self) -> bool:
        return not (self.ids or self._codes or self.signals)

    @property
    def _is_urgent(self) -> bool:
        """Whether somebody insists. Schedulers send SIGTERM several times, which cuts no save short."""
        return self.signals.count(signal.SIGINT) >= AT_ONCE

    def send(self, number: signal.Signals, ranks: Sequence[int]) -> None:
        """Send a signal to some ranks."""
        for rank in set(ranks) & set(self.running):
            with suppress(ProcessLookupError):
                os.kill(self.ids[rank], number)

    def _listen(self, seconds: float = 0) -> None:
        """Hear what the process that forks has to say, for so long at most; nothing more when all have ended."""
        if len(self._codes) == self.count or not self._heard.poll(1000 * seconds):
            return
        told = os.read(self._reports, _PIPE_BYTES)  # lines are written whole, and no more fits into a pipe
        for numbers in map(json.loads, told.splitlines()):
            if self.ids:
                self._codes[numbers[0]] = numbers[1]
            else:
                self.ids = numbers
        if not told:  # it has been killed, and its workers cannot be waited for
            for rank in set(range(len(self.ids))) - set(self._codes):
                with suppress(ProcessLookupError):
                    os.kill(self.ids[rank], signal.SIGKILL)
            self._codes = dict.fromkeys(range(self.count), self._server.wait() or 1) | self._codes

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Note signals that would end this process; one that is ignored, as under nohup, stays so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.signal(each, self._note) for each in heard}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signals.append(signal.Signals(number))


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
    finally:
        if (folder / _OWNER).exists():
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
