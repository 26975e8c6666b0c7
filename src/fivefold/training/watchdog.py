"""Ends a run in which a collective hangs or a rank is frozen, and reports for each rank where it is.

If one rank never joins a collective, the others wait, on GPUs for ever. A thread polls PyTorch's flight recorder for
the collectives in flight in this process. A rank may also freeze outside of any collective, as in a save, and let the
others wait as they would for a slow disk. So the same thread checks that the other threads make progress. The first
rank that finds something raises a flag in the logs of the run, so that the others report where they are, too. In a
stopped process this thread does not run either: the launcher misses its heartbeat (`launch/watch.py`).

The flight recorder does not see collectives over shared memory on a CPU (`ops/cpu`); their entries are merged
in here. An entry is a dict as the recorder writes it, with three pitfalls. NCCL has a recorder of its own: gloo's is
empty under it. A send or receive within a batch stays "scheduled" and never retires: the later entry "nccl:coalesced"
stands for the batch. The CPU runs ahead of a GPU: the blocked collective is the first entry that is not done, not the
last.

A process makes progress if a Python thread has changed its position, or if it computes, reads or writes: slow is not
frozen. The same holds if a process that it started, such as a compiler, computes, or one that holds a file lock for
which it waits, such as that of tokens in the cache. A process waiting for the network counts as active: network clients
have timeouts of their own. Seconds of waiting for a disk count a tenth.
"""

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from fivefold import torch_internals
from fivefold.launch.failure import failure_file, hang_flag, leave_failure, place
from fivefold.launch.watch import Beat

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
        self._waits, self._moves = Waits(recorder, timeout), Moves()

    def run(self) -> None:
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
            leave_failure(self._logs, self._rank, error, stack=stack, waits=waits, last=self._waits.in_words())
        time.sleep(min(3 * self._pause, OTHERS_SECONDS))
        os._exit(1)


def stacks() -> str:
    """Stack traces of all threads of this process; the main thread comes last."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


# ---- collectives in flight -------------------------------------------------------------------------------------------

Entry = dict[str, Any]
Recorder = Callable[..., str | bytes]
PATIENT = ("checkpoint",)  # groups, by description, in which a long wait is normal: a rank may still be writing
_SOME = 0.1  # of the timeout: the age of an active collective from which on all entries are read


def entries(source: Recorder, *, only_active: bool = False) -> list[Entry]:
    """The latest collectives of this process, oldest first."""
    found: list[Entry] = list(json.loads(source(True, only_active)).get("entries", []))
    beside = [entry for carrier in torch_internals.carriers() for entry in carrier.entries(only_active=only_active)]
    return sorted([*found, *beside], key=lambda entry: entry.get("time_created_ns", 0)) if beside else found


class Waits:
    """Time this process has waited for collectives, in the seconds passed to `look`. So the time in which a process
    was stopped, or a change of the clock, does not count."""

    def __init__(self, source: Recorder | None, timeout: float) -> None:
        """`source`: a recorder, if there is one. A wait of more than `timeout` seconds counts as stuck."""
        self._source: Recorder = source or (lambda *_: "{}")
        self._timeout = timeout
        self._ages: dict[int, float] = {}  # seconds that collectives have been active, by the recorder's number
        self._done, self._idle = 0, 0.0  # time of the last completion, and seconds counted since
        self.are_under_way = self.are_stuck = False

    def look(self, seconds: float) -> None:
        """Look again after `seconds`. Reads all entries only if some are old: there may be thousands."""
        active = entries(self._source, only_active=True)
        self._ages = {call["record_id"]: self._ages.get(call["record_id"], -seconds) + seconds for call in active}
        is_old = any(age > _SOME * self._timeout for age in self._ages.values())
        found = entries(self._source) if is_old else []
        # Time in ns of the last completion; 0 if the recorder does not report it (gloo's does not).
        done = max((entry.get("time_discovered_completed_ns") or 0 for entry in found), default=0)
        self._done, self._idle = done, self._idle + seconds if done == self._done else 0.0
        first = next((entry for entry in under_way(found) if entry["process_group"][1] not in PATIENT), None)
        # A queued collective has waited only since the one before it was done.
        self.are_stuck = first is not None and self._ages.get(first["record_id"], 0.0) > self._timeout
        self.are_stuck &= not done or self._idle > self._timeout
        self.are_under_way = bool(under_way(found or active))

    def in_words(self) -> str:
        return in_words(entries(self._source))


def under_way(found: Sequence[Entry]) -> list[Entry]:
    """The collectives that are not done, oldest first. The first blocks; the others queue behind it."""
    batched: set[int] = set()  # groups in which a batch ends later
    waiting = []
    for entry in reversed(found):
        if entry["profiling_name"].endswith(":coalesced"):
            batched.add(entry["pg_id"])
        stands_for_nothing = entry["is_p2p"] and entry["pg_id"] in batched
        if not (entry["retired"] or stands_for_nothing):
            waiting.append(entry)
    return waiting[::-1]


def in_words(found: Sequence[Entry]) -> str:
    """A message for the user: the first collective in flight, or else the last one."""
    if not found:
        return "none was begun"
    waiting = under_way(found)
    entry, word, state = (waiting[0], "waits in", "under way") if waiting else (found[-1], "last", "done")
    name = entry["profiling_name"].partition(":")[2]
    return (
        f"{word}: {name} {entry['input_sizes']} of group {entry['process_group'][1]}, number {entry['op_id']}, {state}"
    )


# ---- progress --------------------------------------------------------------------------------------------------------

COMPUTES = 0.1  # of a core: a run's display and polling threads take less
READS = 2**16  # bytes a second
NETWORK = {"fsspec", "huggingface_hub", "datasets", "wandb", "mlflow", "trackio"}
DISK_WAITS = 10  # seconds of waiting for a disk that count as one
DEPTH = 60  # frames of a thread that are looked at

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class Moves:
    """Compares the state of this process with the previous look. Belongs to one thread, whose own work is not counted.
    `still`: seconds since the process was last active."""

    def __init__(self) -> None:
        self._places: Any = None
        self._cpu, self._bytes, self._others = self._cpu_seconds(), _bytes(), dict[int, float]()
        self.still = 0.0

    def look(self, seconds: float) -> None:
        """Check for activity in the `seconds` since the last look."""
        if self._moved(seconds):
            self.still = 0.0
        else:
            self.still += seconds / DISK_WAITS if _waits_for_disk() else seconds

    def _moved(self, seconds: float) -> bool:
        places, on_network = _positions()
        cpu, moved_bytes = self._cpu_seconds(), _bytes()
        moved = on_network or places != self._places
        moved |= cpu - self._cpu > COMPUTES * seconds or moved_bytes - self._bytes > READS * seconds
        self._places, self._cpu, self._bytes = places, cpu, moved_bytes
        return moved or self._other_computes(seconds)

    def _cpu_seconds(self) -> float:
        return time.process_time() - time.thread_time()

    def _other_computes(self, seconds: float) -> bool:
        before, self._others = self._others, _others(os.getpid())
        return any(cpu - before.get(pid, cpu) > COMPUTES * seconds for pid, cpu in self._others.items())


def _positions() -> tuple[list[Any], bool]:
    """Stack positions of all non-daemon threads, and whether one of them is in a network client."""
    watched = {thread.ident for thread in threading.enumerate() if not thread.daemon}
    places: list[Any] = []
    on_network = False
    for ident, top in sorted(sys._current_frames().items(), key=lambda item: item[0]):
        frame: FrameType | None = top if ident in watched else None
        for _ in range(DEPTH):
            if frame is None:
                break
            places.append((ident, id(frame), id(frame.f_code), frame.f_lasti))
            on_network |= str(frame.f_globals.get("__name__")).partition(".")[0] in NETWORK
            frame = frame.f_back
    return places, on_network


def _bytes() -> int:
    """Bytes read and written so far by all threads of this process but this one; 0 if the system does not report it."""
    with suppress(OSError, ValueError):
        return _read_and_written("self/io") - _read_and_written("thread-self/io")
    return 0


def _read_and_written(name: str) -> int:
    lines = (_PROC / name).read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _others(pid: int) -> dict[int, float]:
    """CPU seconds of those for which `pid` may wait, by process id: its descendants, holders of locks, and theirs."""
    parents, cpu = dict[int, int](), dict[int, float]()
    for task in _PROC.glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            words = (task / "stat").read_text().rpartition(")")[2].split()
            parents[int(task.name)] = int(words[1])
            cpu[int(task.name)] = (int(words[11]) + int(words[12])) / _TICKS
    holders = _holders(pid)
    below, found = {pid, *holders}, {holder: cpu[holder] for holder in holders if holder in cpu}
    while new := {child for child, parent in parents.items() if parent in below and child not in below}:
        below |= new
        found |= {child: cpu[child] for child in new}
    return found


def _holders(pid: int) -> set[int]:
    """Processes of this machine that hold a file lock for which `pid` waits."""
    holders, waits = dict[str, int](), set[str]()  # a lock's number -> its holder; the locks that `pid` waits for
    with suppress(OSError, IndexError, ValueError):
        for line in (_PROC / "locks").read_text().splitlines():
            number, *words = line.split()
            if words[0] != "->":
                holders[number] = int(words[3])
            elif int(words[4]) == pid:
                waits.add(number)
    return {holders[number] for number in waits & holders.keys()}


def _waits_for_disk() -> bool:
    with suppress(OSError, IndexError):
        tasks = list((_PROC / "self/task").iterdir())
        return any((task / "stat").read_text().rpartition(")")[2].split()[0] == "D" for task in tasks)
    return False
