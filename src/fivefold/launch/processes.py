"""The worker processes of this machine: started, waited for, ended.

A server process that imports their modules forks them (`fork_server.py`). They meet in a file of a private folder: no
port is opened, and nothing read there is a pickle. Through a port, another process could take the place of a rank.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from fivefold.core import streams
from fivefold.core.interrupts import ENDING
from fivefold.launch.failure import WorkerDied
from fivefold.launch.world import NodeRanks, server_environment, worker_environment

PAUSE_SECONDS = 0.05
GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL, for the others when one has ended
WRITE_SECONDS = 60.0  # the same, while a worker writes the step that it holds to memory
REPORT_SECONDS = 2.0  # time for the forking process to report killed workers
CONSEQUENCE_SECONDS = 0.2  # time to collect other failures: the first to fail may be seen second
AT_ONCE = 3  # this many Ctrl-C end everything at once
POLITE = (130, 143)  # exit codes of a worker that was asked to stop, as shells report Ctrl-C and SIGTERM
_PIPE_BYTES = 2**20
PREFIX = "fivefold-"  # name prefix of our temporary folders
_OWNER = ".owner"
Awaits = Callable[[Sequence[int]], bool]  # whether one of these ranks, which are ended, still has something to write


class Workers:
    """Worker processes by rank, forked by a process that imports their modules: a context manager.

    The imports begin here and continue while the caller does something else. `started` starts the workers, repeatedly
    if needed, after the earlier ones have ended.
    """

    def __init__(self, body: str, *, count: int) -> None:
        """`count` processes of `body`, named as `package.module:function`."""
        self.signals: list[signal.Signals] = []
        self.body, self.count = body, count
        self.first = 0  # the rank of the first of them
        self.awaits: Awaits = lambda ranks: False
        self.ids: list[int] = []  # process ids by rank
        self._codes: dict[int, int] = {}

    def __enter__(self) -> "Workers":
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def import_first(self) -> None:
        """Wait until the workers' modules are imported: from then on they start at once."""
        while not self._has_imported and self._server.poll() is None:
            self._listen(PAUSE_SECONDS)

    def _open(self) -> None:
        self._has_imported = False
        self._reports, theirs = os.pipe()
        os.set_blocking(self._reports, False)
        self._heard = select.poll()  # `select` is limited to descriptors below 1024, and the caller may have more open
        self._heard.register(self._reports, select.POLLIN)
        command = [sys.executable, "-P", "-m", "fivefold.launch.fork_server", self.body, str(theirs)]
        # In a session of its own: Ctrl-C in the terminal reaches only this process.
        self._server = subprocess.Popen(
            command, env=server_environment(self.count), stdin=subprocess.PIPE, pass_fds=[theirs],
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def _close(self) -> None:
        self._server.kill()
        self._server.communicate()
        while len(self._codes) < self.count:  # it may have forked workers that are not reported yet
            self._listen(PAUSE_SECONDS)
        os.close(self._reports)

    @contextmanager
    def started(self, request: Path, folder: Path, among: NodeRanks | None = None) -> Iterator[None]:
        """Inside, the workers run for the request in this file, and meet in `folder`; the remaining ones end with the
        block. `among`: their ranks among those of several nodes.

        Signals to this process are noted and passed on meanwhile, and the workers decide how to react.
        """
        if self._server.poll() is not None:  # it was killed, which ended the workers of the previous start
            self._close()
            self._open()
        self.signals, self.ids, self._codes = [], [], {}
        self.first = among.first if among else 0
        places = [worker_environment(rank, self.count, folder, among) for rank in range(self.count)]
        start = {"request": str(request), "places": places, "unseen": streams.is_lost()}
        assert self._server.stdin is not None
        with self._hearing():
            try:
                with suppress(BrokenPipeError):  # it has ended: its reports show that
                    self._server.stdin.write(f"{json.dumps(start)}\n".encode())
                    self._server.stdin.flush()
                yield
            finally:
                self.end()

    @property
    def server(self) -> int:
        return self._server.pid

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes of the ended workers, by rank; negative: the signal."""
        self._listen()
        return dict(self._codes)

    @property
    def running(self) -> list[int]:
        ended = self.codes
        return [rank for rank in range(len(self.ids)) if rank not in ended]

    def turns(self) -> Iterator[None]:
        """One turn every few milliseconds until all have ended, or one has failed, or the grace period of a polite stop
        is over. Before the fork it waits until a signal."""
        passed_on, deadline = 0, math.inf
        while (self.running or self._are_awaited) and time.monotonic() < deadline and not self._is_urgent:
            for number in self.signals[passed_on:]:
                passed_on += 1
                # A closed terminal (SIGHUP) stops a run as politely as SIGTERM does.
                self.send(number if number == signal.SIGINT else signal.SIGTERM, self.running)
            codes = self.codes.values()
            is_polite = bool(self.signals) or any(code in POLITE for code in codes)
            if any(codes) and not is_polite:
                time.sleep(CONSEQUENCE_SECONDS)
                return
            if is_polite and codes:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            yield
            self._listen(PAUSE_SECONDS)

    def end(self, *, at_once: bool = False, grace: float | None = None) -> None:
        """End the running workers: SIGTERM, then SIGKILL after `grace` seconds, else GRACE_SECONDS, or up to
        WRITE_SECONDS while `awaits` is true. `at_once`: SIGKILL alone, as for stopped processes."""
        began = time.monotonic()
        deadline, last = began + (GRACE_SECONDS if grace is None else grace), began + WRITE_SECONDS
        if not at_once:
            self.send(signal.SIGTERM, self.running)
        while self.running and not (at_once or self._is_urgent):
            if (now := time.monotonic()) > last or (
                now > deadline and not self.awaits([self.first + rank for rank in self.running])
            ):
                break
            self._listen(PAUSE_SECONDS)
        self.send(signal.SIGKILL, self.running)
        deadline = time.monotonic() + REPORT_SECONDS
        while self.running:
            self._listen(PAUSE_SECONDS)
            if time.monotonic() > deadline:  # the server is stopped, or a worker waits for a disk
                self._server.kill()

    @property
    def _are_awaited(self) -> bool:
        return not (self.ids or self._codes or self.signals)

    @property
    def _is_urgent(self) -> bool:
        """True after `AT_ONCE` times Ctrl-C. Schedulers send SIGTERM several times, which cuts no save short."""
        return self.signals.count(signal.SIGINT) >= AT_ONCE

    def send(self, number: signal.Signals, ranks: Sequence[int]) -> None:
        for rank in set(ranks) & set(self.running):
            with suppress(ProcessLookupError):
                os.kill(self.ids[rank], number)

    def _listen(self, seconds: float = 0) -> None:
        """Read the reports of the forking process, waiting `seconds` at most; nothing more once all have ended."""
        if len(self._codes) == self.count or not self._heard.poll(1000 * seconds):
            return
        told = os.read(self._reports, _PIPE_BYTES)  # lines are written whole, and a pipe holds no more than this
        for numbers in map(json.loads, told.splitlines()):
            if not numbers:
                self._has_imported = True
            elif self.ids:
                self._codes[numbers[0]] = numbers[1]
            else:
                self.ids = numbers
        if not told:  # the server was killed, and its workers cannot be waited for
            for rank in set(range(len(self.ids))) - set(self._codes):
                with suppress(ProcessLookupError):
                    os.kill(self.ids[rank], signal.SIGKILL)
            self._codes = dict.fromkeys(range(self.count), self._server.wait() or 1) | self._codes

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Note signals that would end this process; an ignored one, as under nohup, stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in heard}
        try:
            yield
        finally:
            for handled, handler in before.items():
                signal.signal(handled, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signals.append(signal.Signals(number))


@contextmanager
def private_folder(what: str = "workers") -> Iterator[Path]:
    """A temporary folder that only this user may enter, removed afterwards."""
    folder = scratch_folder(what)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def kept_if_one_dies(what: str) -> Iterator[Path]:
    """A `scratch_folder` that is removed afterwards; it is kept if a worker died, as the message names it."""
    folder = scratch_folder(what)
    try:
        yield folder
    except WorkerDied:
        keep(folder)
        raise
    finally:
        if (folder / _OWNER).exists():
            shutil.rmtree(folder)


def scratch_folder(what: str, place: Path | None = None) -> Path:
    """A temporary folder that only this user may enter, in `place` (None: the usual one). This process has to remove or
    `keep` it; if it is killed before, the next process removes it."""
    place = place or Path(tempfile.gettempdir())
    _sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{what}-", dir=place))
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
    """Identifies a process among later ones with the same id; `start` is empty if no process has this id."""
    start = ""
    with suppress(OSError):
        start = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    if not start:
        with suppress(OSError):
            os.kill(pid, 0)
            start = "runs"
    return {"host": os.uname().nodename, "pid": pid, "start": start}
