"""Ends a run in which a collective hangs or a rank stands still, and says for each rank where it stands.

A collective that one rank never joins keeps the others waiting, on GPUs for ever. PyTorch's flight recorder knows which
collectives of this process are under way; a thread looks at it. A rank also may stand still where no collective is
under way, as in a save, and have the others wait as patiently as they wait for a slow disk. The same thread sees that
no thread of its process moves. The first rank that finds something raises a flag in the logs of the run, so that the
others tell where they are, too. A process that is stopped has no such thread: its launcher misses its beat
(`launch/watch.py`).
"""

import faulthandler
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fivefold.launch.failure import failure_file, hang_flag, leave_failure, place
from fivefold.launch.watch import Beat
from fivefold.training.moves import Moves

PATIENT = ("checkpoint",)  # groups, by description, whose members may be waited for: a rank still writes
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
        self._recorder, self._moves = _recorder(), Moves()
        self._ages: dict[Any, float] = {}  # seconds that collectives have been under way, by the recorder's number

    def run(self) -> None:
        """Until the run has ended."""
        before = time.monotonic()
        while not self._ended.wait(self._pause):
            now = time.monotonic()
            seconds, before = min(now - before, max(1.0, 2 * self._pause)), now
            entries = _entries(self._recorder) if self._recorder else []
            under_way = [entry for entry in entries if _is_under_way(entry)]
            self._ages = {
                each["record_id"]: self._ages.get(each["record_id"], -seconds) + seconds for each in under_way
            }
            self._moves.look(seconds)
            self._beat.write(still=self._moves.still, waits=_last(under_way) if under_way else "")
            hung = any(self._ages[each["record_id"]] > self._timeout for each in under_way if not _is_patient(each))
            stands = self._moves.still > self._timeout and not under_way
            if hung or stands:
                hang_flag(self._logs).touch()
            if hang_flag(self._logs).exists() and not self._ended.is_set():
                self._end(stands, entries, waits=bool(under_way))
        self._beat.end()

    def _end(self, stands: bool, entries: list[dict[str, Any]], *, waits: bool) -> None:
        if not failure_file(self._logs, self._rank).exists():
            stack = stacks()
            error: Exception = Hung(f"no answer in a collective for {self._timeout:g} s")
            if stands:
                error = StoodStill(f"stood still for {self._timeout:g} s in {place(stack)}")
            leave_failure(self._logs, self._rank, error, stack=stack, waits=waits, last=_last(entries))
        time.sleep(min(3 * self._pause, OTHERS_SECONDS))
        os._exit(1)


def _recorder() -> Any:
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, "_dump_fr_trace_json", None)


def _entries(recorder: Any) -> list[dict[str, Any]]:
    """The latest collectives of this process, oldest first."""
    return list(json.loads(recorder()).get("entries", []))


def _is_under_way(entry: dict[str, Any]) -> bool:
    return not entry["retired"]


def _is_patient(entry: dict[str, Any]) -> bool:
    """Whether it may take as long as it likes."""
    return entry["process_group"][1] in PATIENT


def _last(entries: list[dict[str, Any]]) -> str:
    if not entries:
        return "last: none was begun"
    last = entries[-1]
    state = "under way" if _is_under_way(last) else "done"
    name = last["profiling_name"].partition(":")[2]
    return f"last: {name} {last['input_sizes']} of group {last['process_group'][1]}, number {last['op_id']}, {state}"


def stacks() -> str:
    """Where every thread of this process stands; the main thread comes last."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
