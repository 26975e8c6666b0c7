"""Detection of ranks that hang without being able to report it: the launcher misses their beat.

A watched rank writes a beat about every second. A stopped process writes none, nor does one whose threads cannot run.
If every rank waits for another, each writes beats and none makes progress. The forking process is watched by its
duties: it reports each exit at once.
"""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fivefold.launch.failure import failure_file, hang_flag, leave_failure, place
from fivefold.launch.processes import Workers

TELL = signal.SIGUSR2  # makes a worker write its stacks to `stack_file`
TELL_SECONDS = 2.0  # time for a rank to do so
_BEAT_BYTES = 128  # more than any beat takes
COMPUTES = 0.1  # the share of a core from which a rank counts as active
_STOPPED = ("T", "t")


class Frozen(Exception):
    """Left as the failure of a rank that stopped giving signs."""


def stack_file(folder: Path, rank: int) -> Path:
    """The file to which a worker writes its stacks, on request or in a crash."""
    return folder / f"stack-{rank}"


class Beat:
    """The status of a rank, in a file that the launcher reads."""

    def __init__(self, folder: str, rank: int) -> None:
        """Without a `folder` nothing is written, as there is no reader."""
        self._file = _beat_file(Path(folder), rank) if folder else None
        self._count = 0

    def write(self, *, still: float, waits: bool) -> None:
        """Write a beat. `still`: seconds without progress; `waits`: in a collective, for others."""
        self._count += 1
        self._put({"count": self._count, "still": still, "waits": waits})

    def end(self) -> None:
        self._put({})

    def _put(self, said: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        with suppress(OSError):  # the launcher is gone with its folder
            # Rewritten in place with a fixed length: works in a full temporary folder, and is read whole.
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, json.dumps(said).ljust(_BEAT_BYTES).encode(), 0)
            finally:
                os.close(descriptor)


class BeatWatch:
    """Watches the beats of `workers` in `folder`; `patience` is in seconds, 0 for never. `server`: the failure of the
    forking process, if any."""

    def __init__(self, folder: Path, workers: Workers, patience: float) -> None:
        self._folder, self._workers, self._patience = folder, workers, patience
        self._first = workers.first  # files are named by rank, and workers numbered on this node
        self._pause = min(1.0, patience / 10)
        self._looked = time.monotonic()
        self._beats: dict[int, str] = {}
        self._cpu: dict[int, float] = {}
        self._silent: dict[int, float] = {}  # seconds without a beat, while this process itself was running
        self._frozen: dict[int, str] = {}  # rank -> how it is frozen
        self._idle = 0.0  # seconds that the forking process has neglected a duty
        self.server = ""

    def found_frozen(self) -> bool:
        """Check, if it is time to. True if a rank was silent for too long, or all made no progress."""
        now = time.monotonic()
        if self._patience <= 0 or now - self._looked < self._pause:
            return bool(self._frozen or self.server)
        seconds, self._looked = min(now - self._looked, max(1.0, 2 * self._pause)), now
        running = self._workers.running
        for rank in running:
            self._silent[rank] = 0.0 if self._gives_sign(rank, seconds) else self._silent.get(rank, 0.0) + seconds
            if self._silent[rank] > self._patience:
                self._frozen[rank] = f"gave no sign for {self._patience:g} s{_why(self._workers.ids[rank])}"
        said = [self._said(rank) for rank in running]
        # A rank that waits for no other reports its own hang.
        if said and all(report and report["waits"] and report["still"] > self._patience for report in said):
            self._frozen |= {
                rank: f"stood still for {self._patience:g} s, as all ranks do"
                for rank in running
                if rank not in self._frozen
            }
        self._idle = self._idle + seconds if self._leaves_undone(running) else 0.0
        if self._idle > self._patience:
            why = _why(self._workers.server)
            self.server = f"the forking process gave no sign for {self._patience:g} s{why}"
        return bool(self._frozen or self.server)

    def tell(self, logs: Path) -> bool:
        """Leave a failure, with its stacks if available, for each frozen rank, and for each rank that does not answer
        after another rank found that it hangs; then end all. Returns True if there was one."""
        if not self._frozen and hang_flag(logs).exists():
            self._wait(lambda: all(failure_file(logs, self._first + rank).exists() for rank in self._workers.running))
            for rank in self._workers.running:
                if not failure_file(logs, self._first + rank).exists():
                    self._frozen[rank] = f"did not say where it stands{_why(self._workers.ids[rank])}"
        if self.server:
            self._workers.end(at_once=True)
        if not self._frozen:
            return False
        ranks = [rank for rank in self._frozen if rank in self._workers.running]
        self._workers.send(TELL, ranks)
        self._workers.send(signal.SIGCONT, ranks)
        self._wait(lambda: all(_ends_in_main(stack_file(self._folder, self._first + rank)) for rank in ranks))
        for rank in ranks:
            stack = _read(stack_file(self._folder, self._first + rank))
            where = f", in {place(stack)}" if stack else ""
            frozen = Frozen(self._frozen[rank] + where)
            leave_failure(logs, self._first + rank, frozen, stack=stack or "no stack could be had")
        self._workers.end(at_once=True)
        return bool(ranks)

    def _gives_sign(self, rank: int, seconds: float) -> bool:
        beat = _read(_beat_file(self._folder, self._first + rank))
        state, cpu = _state(self._workers.ids[rank])
        computes = cpu - self._cpu.get(rank, 0.0) > COMPUTES * seconds
        is_new = beat != self._beats.get(rank)
        self._beats[rank], self._cpu[rank] = beat, cpu
        # Before the first beat or after the last, a rank may be slow, but not stopped.
        if state == "Z" or beat.strip() in ("", "{}"):
            return state not in _STOPPED
        return is_new or computes

    def _leaves_undone(self, running: Sequence[int]) -> bool:
        """True if the forking process is stopped, or has not reported a process that has ended."""
        has_ended = any(_state(self._workers.ids[rank])[0] == "Z" for rank in running)
        return has_ended or _state(self._workers.server)[0] in _STOPPED

    def _said(self, rank: int) -> Mapping[str, Any]:
        with suppress(ValueError):
            said: dict[str, Any] = json.loads(self._beats.get(rank) or "{}")
            return said
        return {}

    def _wait(self, condition: Any) -> None:
        until = time.monotonic() + TELL_SECONDS
        while not condition() and time.monotonic() < until:
            time.sleep(0.05)


def _beat_file(folder: Path, rank: int) -> Path:
    return folder / f"beat-{rank}"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _ends_in_main(file: Path) -> bool:
    """True if the stacks are complete: those of the main thread come last, and end in the started module."""
    return _read(file).rstrip().endswith(("<module>", "_run_code", "_run_module_as_main"))


def _why(pid: int) -> str:
    """Why a process gives no sign, as far as the system shows."""
    reasons = {
        "T": ": its process is stopped (SIGSTOP)",
        "t": ": a debugger holds it",
        "D": ": it waits for a disk",
    }
    return reasons.get(_state(pid)[0], "")


def _state(pid: int) -> tuple[str, float]:
    """The letter of a process's state, and the CPU seconds it has used; empty if the system does not show it."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return words[0], (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
