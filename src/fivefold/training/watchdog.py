"""Ends a run in which a collective hangs or a rank is frozen, and reports for each rank where it is.

If one rank never joins a collective, the others wait, on GPUs for ever. A thread polls PyTorch's flight recorder for
the collectives in flight in this process. A rank may also freeze outside of any collective, as in a save, and let the
others wait as they would for a slow disk. So the same thread checks that the other threads make progress. The first
rank that finds something raises a flag in the logs of the run, so that the others report where they are, too. In a
stopped process this thread does not run either: the launcher misses its heartbeat (`launch/watch.py`).
"""

import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from fivefold import torch_internals
from fivefold.launch.failure import failure_file, hang_flag, leave_failure, place
from fivefold.launch.watch import Beat
from fivefold.training import flight
from fivefold.training.moves import Moves

OTHERS_SECONDS = 2.0  # time for the others to see the flag before the launcher ends them


class Hung(Exception):
    """A collective was in flight for too long."""


class StoodStill(Exception):
    """No thread of this process made progress for too long."""


@contextmanager
def watching(logs: Path, rank: int, timeout: float, *, folder: str = "") -> Iterator[None]:
    """End this process with `leave_failure` if, inside the block, a collective is in flight for `timeout` seconds.

    The same happens if it is frozen for as long outside of any collective, or if another rank raises the flag.
    `folder`: `World.folder`, where the launcher looks for its heartbeat. A timeout of 0 disables the watchdog.
    """
    if timeout <= 0:
        yield
        return
    logs.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()
    watchdog = _Watchdog(logs, rank, timeout, ended, Beat(folder, rank))
    thread = threading.Thread(target=watchdog.run, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(OTHERS_SECONDS)


class _Watchdog:
    """Polls the collectives and the progress of one rank.

    Seconds are counted by this thread as it runs, so a process that was stopped, or a machine that slept, has not
    waited in that time.
    """

    def __init__(self, logs: Path, rank: int, timeout: float, ended: threading.Event, beat: Beat) -> None:
        self._logs, self._rank, self._timeout, self._ended, self._beat = logs, rank, timeout, ended, beat
        self._pause = min(1.0, timeout / 10)
        recorder = torch_internals.flight_recorder(dist.get_backend()) if dist.is_initialized() else None
        self._waits, self._moves = flight.Waits(recorder, timeout), Moves()

    def run(self) -> None:
        """Poll until the run has ended."""
        before = time.monotonic()
        while not self._ended.wait(self._pause):
            now = time.monotonic()
            seconds, before = min(now - before, max(1.0, 2 * self._pause)), now
            self._waits.look(seconds)
            self._moves.look(seconds)
            waits = self._waits.are_under_way
            self._beat.write(still=self._moves.still, waits=waits)
            stands = self._moves.still > self._timeout and not waits
            hangs = self._waits.are_stuck or stands
            if hangs:
                with suppress(OSError):  # the folder was removed, or its disk is full: the screen reports it
                    self._logs.mkdir(parents=True, exist_ok=True)
                    hang_flag(self._logs).touch()
            if (hang_flag(self._logs).exists() or hangs) and not self._ended.is_set():
                self._end(stands, waits)
        self._beat.end()

    def _end(self, stands: bool, waits: bool) -> None:
        if not failure_file(self._logs, self._rank).exists():
            stack = stacks()
            error: Exception = Hung(f"no answer in a collective for {self._timeout:g} s")
            if stands:
                error = StoodStill(f"stood still for {self._timeout:g} s in {place(stack)}")
            leave_failure(self._logs, self._rank, error, stack=stack, waits=waits, last=self._waits.told())
        time.sleep(min(3 * self._pause, OTHERS_SECONDS))
        os._exit(1)


def stacks() -> str:
    """Stack traces of all threads of this process; the main thread comes last."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
