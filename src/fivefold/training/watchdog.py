"""Ends a run in which a collective hangs or a rank stands still, and says for each rank where it stands.

A collective that one rank never joins keeps the others waiting, on GPUs for ever. PyTorch's flight recorder knows which
collectives of this process are under way; a thread looks at it. A rank also may stand still where no collective is
under way, as in a save, and have the others wait as patiently as they wait for a slow disk. The same thread sees that
no thread of its process moves. The first rank that finds something raises a flag in the logs of the run, so that the
others tell where they are, too. A process that is stopped has no such thread: its launcher misses its beat
(`launch/watch.py`).
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

OTHERS_SECONDS = 2.0  # how long others have at most to see the flag before the launcher ends them


class Hung(Exception):
    """A collective was under way for too long."""


class StoodStill(Exception):
    """No thread of this process moved for too long."""


@contextmanager
def watching(logs: Path, rank: int, timeout: float, *, folder: str = "") -> Iterator[None]:
    """Inside, this process ends with `leave_failure` when a collective has been under way for `timeout` seconds.

    So it does when it stands still for as long outside of any collective, and when another rank says so. `folder`:
    `World.folder`, where the launcher looks for its beat. 0 seconds: nothing is watched.
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
    """What one rank knows of itself, beat by beat.

    Seconds are those that this thread has seen go by: a process that was stopped and goes on, or a machine that slept,
    has not waited for them.
    """

    def __init__(self, logs: Path, rank: int, timeout: float, ended: threading.Event, beat: Beat) -> None:
        self._logs, self._rank, self._timeout, self._ended, self._beat = logs, rank, timeout, ended, beat
        self._pause = min(1.0, timeout / 10)
        recorder = torch_internals.flight_recorder(dist.get_backend()) if dist.is_initialized() else None
        self._waits, self._moves = flight.Waits(recorder, timeout), Moves()

    def run(self) -> None:
        """Until the run has ended."""
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
                with suppress(OSError):  # who has removed the run folder, or filled its disk, hears of it on the screen
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
    """Where every thread of this process stands; the main thread comes last."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
