"""Detect from one of its threads whether this process makes progress: slow is not frozen. No torch.

A process is active if a Python thread has changed its position, or if it computes, reads or writes. The same holds if a
process that it started, such as a compiler, computes, or one that holds a file lock for which it waits, such as that of
tokens in the cache. A process waiting for the network counts as active: network clients have timeouts of their own.
Seconds of waiting for a disk count a tenth.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

COMPUTES = 0.1  # of a core: a run's display and polling threads take less
READS = 2**16  # bytes a second
NETWORK = {"fsspec", "huggingface_hub", "datasets", "wandb", "mlflow", "trackio"}
DISK_WAITS = 10  # seconds of waiting for a disk that count as one
DEPTH = 60  # frames of a thread that are looked at

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PROC = Path("/proc")


class Moves:
    """Compares the state of this process with the previous look. Belongs to one thread, whose own work is not counted.
    `still`: seconds since the process was last active."""

    def __init__(self) -> None:
        self._stacks: Any = None
        self._cpu, self._bytes, self._others = self._cpu_seconds(), _bytes(), dict[int, float]()
        self.still = 0.0

    def look(self, seconds: float) -> None:
        """Check for activity in the `seconds` since the last look."""
        if self._moved(seconds):
            self.still = 0.0
        else:
            self.still += seconds / DISK_WAITS if _waits_for_disk() else seconds

    def _moved(self, seconds: float) -> bool:
        stacks, on_network = _stacks()
        cpu, moved_bytes = self._cpu_seconds(), _bytes()
        moved = on_network or stacks != self._stacks
        moved |= cpu - self._cpu > COMPUTES * seconds or moved_bytes - self._bytes > READS * seconds
        self._stacks, self._cpu, self._bytes = stacks, cpu, moved_bytes
        return moved or self._other_computes(seconds)

    def _cpu_seconds(self) -> float:
        return time.process_time() - time.thread_time()

    def _other_computes(self, seconds: float) -> bool:
        before, self._others = self._others, _others(os.getpid())
        return any(cpu - before.get(pid, cpu) > COMPUTES * seconds for pid, cpu in self._others.items())


def _stacks() -> tuple[list[Any], bool]:
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
