"""What a run tells of itself: the screen, the places of `log.to`, samples, its history, and Python callbacks.

The first rank tells. On every other rank a `RunLog` is never opened, and its methods do nothing.
"""

import signal
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from fivefold.config import RunConfig
from fivefold.core import history
from fivefold.core.errors import UserError
from fivefold.core.files import replace
from fivefold.core.json_lines import JsonLines
from fivefold.launch.events import Events
from fivefold.training import record
from fivefold.training.display import Line, PlainDisplay, open_display
from fivefold.training.held_folder import HeldFolder
from fivefold.training.metrics import Row, Sink, open_sinks
from fivefold.training.stop import Stopped


class RunLog:
    """`events`: where Python callbacks are told, if anybody listens. `seconds_before`: what earlier starts of this run
    took, up to the step that this one goes on from."""

    def __init__(self, folder: HeldFolder) -> None:
        self.events: Events | None = None
        self.seconds_before = 0.0
        self._folder, self._run_dir = folder, folder.run_dir
        self._display: PlainDisplay | None = None
        self._sinks: list[Sink] = []
        self._history: history.Log | None = None
        self._samples: JsonLines | None = None

    def open(
        self, stack: ExitStack, config: RunConfig, lines: list[Line], about: Mapping[str, Any], *,
        step: int, total_steps: int,
    ) -> None:  # fmt: skip
        """Show `lines` and begin to write, after `step` steps; `stack` closes all of it. `about`: what the history
        keeps of this start."""
        replace(self._run_dir / "run.yaml", config.to_yaml().encode())
        self._display = stack.enter_context(open_display(total_steps=total_steps, start=step))
        self._display.header(lines)
        self._sinks = open_sinks(config, last_step=step, say=self._display.note)
        for sink in self._sinks:
            stack.push(partial(_close_sink, sink))
            if isinstance(sink, JsonLines):
                self.seconds_before = sink.last.get("perf/elapsed_seconds", 0.0)
        stack.callback(self._close_samples)
        if step < total_steps:
            self._history = history.Log(self._run_dir, self._display.note)
            self._history.write("start", step, **about, header=lines)
        self._folder.remember("run.yaml", record.NAME)

    def close(self, step: int, error: BaseException | None) -> None:
        """Note in the history how this start ends after `step` steps, in whatever way a process can tell of."""
        if self._history:
            self._history.write("end", step, what="finished" if error is None else _how(error))
            self._history.close()

    def _close_samples(self) -> None:
        if self._samples:
            self._samples.close()

    def note(self, text: str) -> None:
        """Say something that needs attention."""
        if self._display:
            self._display.note(text)

    def happened(self, event: str, step: int, what: str) -> None:
        """Keep an event of this step in the history."""
        if self._history:
            self._history.write(event, step, what=what)

    def tell(self, kind: str, value: Any) -> None:
        """Tell the callbacks, if there are any."""
        if self.events:
            self.events.tell(kind, value)

    @property
    def stop_asked(self) -> bool:
        """Whether a callback asks to stop."""
        return self.events is not None and self.events.stop_asked

    def row(self, row: Row) -> None:
        """Write and show a row of metrics."""
        self.look_at_folder()
        for sink in self._sinks:
            sink.write(row)
        if self._display:
            self._display.step(row)

    def evaluated(self, step: int, loss: float) -> None:
        """Show a validation loss."""
        if self._display:
            self._display.evaluated(step, loss)

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """Write and show a sample. `samples.jsonl` is first cut back to the steps before this one."""
        if self._display:
            if self._samples is None:
                path = self._run_dir / "samples.jsonl"
                self._samples = JsonLines(path, last_step=step - 1, say=self.note)
            self._samples.write({"step": step, "prompt": prompt, "text": text})
            self._display.sampled(step, prompt, text)

    def look_at_folder(self) -> None:
        """Make the run folder again where someone removed it."""
        if self._display:
            self._folder.look(self.note)

    def closing(self, lines: list[Line]) -> None:
        """Say where everything is, and what to type next."""
        if self._display:
            self._display.closing(lines)


def _close_sink(sink: Sink, kind: type[BaseException] | None, *_: object) -> None:
    """As the run ends. One that was asked to stop has not failed."""
    sink.close(failed=kind is not None and not issubclass(kind, Stopped))


def _how(error: BaseException) -> str:
    """The end of a start, in a line."""
    if isinstance(error, Stopped):
        return f"stopped by {signal.Signals(int(error.code or 0) - 128).name}"
    if isinstance(error, UserError):
        return error.what
    return f"{type(error).__name__}: {error}".rstrip(": ")
