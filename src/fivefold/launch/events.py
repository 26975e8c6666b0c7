"""Events of a run for the Python code that called `ff.train`: rows of steps and evaluations, and new checkpoints.

The first rank emits them. If this process is that rank, callbacks run directly. If it has started workers, they write
lines to a file, which a thread of this process follows. A callback that raises stops the run after a step, saved.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.1
STOP = "stop"  # next to the event file


@dataclass
class Listener:
    """The callbacks of a run, and the first error of one; after it no callback is called. `everywhere`: every rank that
    another launcher has started calls those of its own process, not the first rank alone."""

    on_step: Callable[[dict[str, Any]], object] | None = None
    on_eval: Callable[[dict[str, Any]], object] | None = None
    on_save: Callable[[Path], object] | None = None
    everywhere: bool = False
    error: BaseException | None = field(default=None, init=False)

    @property
    def stop_asked(self) -> bool:
        """True if the run has to stop after this step."""
        return self.error is not None

    def tell(self, kind: str, value: Any) -> None:
        """Call the callback of `kind`: step or eval with a row, save with a folder."""
        callback: Callable[[Any], object] | None = getattr(self, f"on_{kind}")
        if callback is None or self.error is not None:
            return
        try:
            callback(Path(value) if kind == "save" else value)
        except BaseException as error:  # raised again by `raising`
            self.error = error

    @contextmanager
    def raising(self) -> Iterator[None]:
        """After the block, raise the error of a callback; the run has stopped because of it."""
        try:
            yield
        except (SystemExit, KeyboardInterrupt):
            if self.error is None:
                raise
        if self.error is not None:
            raise self.error


class EventFile:
    """On the first rank of started workers: event lines for the launching process, and its request to stop."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._waiting = b""
        self._stop = path.with_name(STOP)

    def tell(self, kind: str, value: Any) -> None:
        """As `Listener.tell`. Lines that do not fit on a full disk are written with the next event."""
        value = str(value) if isinstance(value, Path) else value
        self._waiting += json.dumps({"kind": kind, "value": value}).encode() + b"\n"
        with suppress(OSError):
            while self._waiting:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]

    @property
    def stop_asked(self) -> bool:
        return self._stop.exists()


Events = Listener | EventFile  # event sink of the first rank


def events_of(request: Mapping[str, Any], *, is_first: bool) -> Events | None:
    """The event sink of this rank: a file for a worker, or the listener of this process."""
    asked = request.get("events")
    if not asked or not (is_first or getattr(asked, "everywhere", False)):
        return None
    return asked if isinstance(asked, Listener) else EventFile(Path(asked))


@contextmanager
def following(listener: Listener | None, folder: Path) -> Iterator[dict[str, str]]:
    """Inside, a thread passes the workers' events to `listener`, in order. Yields the entries for their request."""
    if listener is None:
        yield {}
        return
    path, is_over = folder / "events.jsonl", threading.Event()
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("", encoding="utf-8")
    path.with_name(STOP).unlink(missing_ok=True)
    thread = threading.Thread(target=_follow, args=(listener, path, is_over), daemon=True)
    thread.start()
    try:
        yield {"events": str(path)}
    finally:
        is_over.set()
        thread.join()
        path.unlink(missing_ok=True)
        path.with_name(STOP).unlink(missing_ok=True)


def _follow(listener: Listener, path: Path, is_over: threading.Event) -> None:
    with path.open("rb") as file:
        rest = b""
        while True:
            last = is_over.wait(POLL_SECONDS)
            *lines, rest = (rest + file.read()).split(b"\n")
            for line in lines:
                told = json.loads(line)
                listener.tell(told["kind"], told["value"])
            if listener.stop_asked:
                path.with_name(STOP).touch()
            if last:
                return
