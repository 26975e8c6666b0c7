"""The outputs of a run: the screen, the sinks of `log.to`, samples, its history, and Python callbacks.

Only the first rank reports. On the other ranks a `RunLog` is never opened, so nothing is shown or written.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from fivefold.config import RunConfig
from fivefold.core import history
from fivefold.core.errors import UserError
from fivefold.core.files import replace
from fivefold.core.interrupts import Stopped
from fivefold.core.json_lines import JsonLines, Row
from fivefold.core.run_folder import step_folder, steps
from fivefold.launch import rounds
from fivefold.launch.events import Events, Listener
from fivefold.launch.folder import LOCK, FolderLock
from fivefold.training import record
from fivefold.training.display import Line, Sample, open_display, unseen
from fivefold.training.trackers import TRACKERS, TrackerSink


class RunLog:
    """The outputs of a run. `display`: the screen. `events`: the Python callbacks. `folder`: the run folder.

    `seconds_before`: time that earlier starts of this run took, up to the step that this one resumes from. `began`: the
    clock at this start.
    """

    def __init__(self, run_dir: Path, events: Events | None = None, *, round: int = 0) -> None:
        """`round`: see `World`."""
        self.events: Events = events or Listener()  # without callbacks
        self.folder = HeldFolder(run_dir, round)
        self.seconds_before, self.began = 0.0, time.monotonic()
        self._written = 0  # the last step with a row of an earlier start
        self.display = unseen()
        self._sinks: list[JsonLines | TrackerSink] = []
        self._samples: JsonLines | None = None
        self._history: history.Log | None = None

    def open(
        self, stack: ExitStack, config: RunConfig, lines: list[Line], about: Mapping[str, Any], *,
        step: int, total_steps: int, total_tokens: float | None = None, is_unfinished: bool = False,
    ) -> None:  # fmt: skip
        """Show `lines` and begin to write, after `step` steps; `stack` closes all of it. `about`: the history's record
        of this start. `total_tokens`: those of all steps, about. `is_unfinished`: something is left to do of `step`."""
        room = self.folder.room
        replace(config.run_dir / "run.yaml", config.to_yaml().encode(), room=room)
        self.display = stack.enter_context(open_display(total_steps=total_steps, total_tokens=total_tokens, start=step))
        self.display.header(lines)
        say = self.display.note
        # Before rows are written or truncated: a tracker may fail to start, and all read an earlier attempt's last row.
        trackers = [TrackerSink(name, config, last_step=step, say=say) for name in TRACKERS if name in config.log.to]
        rows = JsonLines(config.run_dir / "metrics.jsonl", last_step=step, say=say, room=room)
        self.seconds_before = rows.last.get("perf/elapsed_seconds", 0.0)
        self._written = int(rows.last.get("step", 0))
        self._sinks = [rows, *trackers]
        if config.sample.is_on:
            self._samples = JsonLines(config.run_dir / "samples.jsonl", last_step=step, say=say, room=room)
        for sink in (*self._sinks, self._samples):
            stack.push(partial(_close_sink, sink))
        if step < total_steps or is_unfinished:
            self._history = history.Log(config.run_dir, say, room=room)
            self._history.write("start", step, **about, header=lines)
        self.folder.remember("run.yaml", record.NAME)

    def close(self, step: int, error: BaseException | None) -> None:
        """Record in the history, once, how this start ended after `step` steps."""
        if self._history:
            self._history.write("end", step, what="finished" if error is None else _how(error))
            self._history.close()
            self._history = None

    def happened(self, event: str, step: int, what: str) -> None:
        if self._history:
            self._history.write(event, step, what=what)

    def row(self, row: Row) -> None:
        """Write and show a row of metrics, unless an earlier start has."""
        if row["step"] <= self._written:
            return
        self.folder.look(self.display.note)
        for sink in self._sinks:
            sink.write(row)
        self.display.step(row)

    def sampled(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if self._samples:
                self._samples.write(sample.row)
            self.display.sampled(sample.step, sample.prompt, sample.text)
        for sink in self._sinks:
            if isinstance(sink, TrackerSink) and samples:
                sink.samples(samples)


def _close_sink(sink: JsonLines | TrackerSink | None, kind: type[BaseException] | None, *_: object) -> None:
    """Close a sink as the run ends. A run stopped on request has not failed."""
    if sink:
        sink.close(failed=kind is not None and not issubclass(kind, Stopped))


def _how(error: BaseException) -> str:
    """One line on how a start ended."""
    if isinstance(error, Stopped):
        return f"stopped by {signal.Signals(int(error.code or 0) - 128).name}"
    if isinstance(error, UserError):
        return error.what
    return f"{type(error).__name__}: {error}".rstrip(": ")


class HeldFolder:
    """Rank 0's lock on its run folder; other ranks take none, and their calls do nothing. A removed folder is made
    again. `saved`: the step of the newest checkpoint that this run knows of. `round`: see `World`; the nodes of a run
    share the lock, and one round of them writes."""

    def __init__(self, run_dir: Path, round: int = 0) -> None:
        self.run_dir, self.round = run_dir, round
        self._lock: FolderLock | None = None
        self._files: dict[str, bytes] = {}
        self._is_lost = False
        self.saved = 0

    def take(self) -> None:
        """Lock the folder. Raises `UserError` if another run has it, `RoundOver` if a later round writes."""
        self._lock = FolderLock(self.run_dir, is_shared=self.round > 0)
        if self.round:
            rounds.take(self.run_dir, self.round)
            rounds.take(self.run_dir / "checkpoints", self.round)

    @property
    def room(self) -> Path | None:
        """The folder of this round in which new files are prepared; None without rounds."""
        return rounds.room(self.run_dir, self.round) if self.round else None

    def release(self) -> None:
        if self._lock:
            self._lock.release()
        self._lock = None

    def remember(self, *names: str) -> None:
        """Keep the contents of these small files, to restore them if the folder is removed."""
        self._files |= {name: (self.run_dir / name).read_bytes() for name in names}

    def look(self, say: Callable[[str], None]) -> None:
        """Check that the folder exists. A removed one is made again, with the remembered files. A removed checkpoint is
        reported.

        Raises `UserError` if another run has taken its place, `RoundOver` if a later round has. A folder that cannot be
        written is reported once.
        """
        if self._lock is None:
            return
        rounds.check(self.run_dir, self.round)
        saved = self.saved
        if self._lacks_checkpoint():
            self.saved = 0
        if self._lock.is_at(self.run_dir / LOCK):
            if self.saved != saved:
                say(f"WARNING: step {saved} was removed from {self.run_dir}/checkpoints; the next one is saved on time")
            return
        gone = {name: content for name, content in self._files.items() if not (self.run_dir / name).exists()}
        try:
            (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
            lock, self._lock = self._lock, FolderLock(self.run_dir, is_shared=self.round > 0)
            lock.release()
            for name, content in gone.items():
                replace(self.run_dir / name, content)
        except OSError as error:
            if not self._is_lost:
                say(f"WARNING: {self.run_dir} was removed, and cannot be made again: {error.strerror or error}")
            self._is_lost = True
            return
        self._is_lost = False
        if not gone:  # only the lock was removed
            return
        there = "its checkpoints are gone, and the next one is saved on time"
        if any(os.scandir(self.run_dir / "checkpoints") if (self.run_dir / "checkpoints").is_dir() else ()):
            there = "its checkpoints are there"
        say(f"WARNING: {self.run_dir} was removed while this run writes to it; it is made again: {there}")

    def _lacks_checkpoint(self) -> bool:
        folder = self.run_dir / "checkpoints"
        if not self.saved or (folder / step_folder(self.saved)).is_dir():
            return False
        return max(steps(folder), default=0) < self.saved  # the run itself removes it once there is a newer one
