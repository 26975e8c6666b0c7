"""A polite stop: SIGTERM and Ctrl-C are passed on to the loop, which ends after a step, the same one on every rank."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    by: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Inside, the first SIGTERM or SIGINT is noted; a second one does what it always did.

        Outside of the main thread nothing is noted.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before: dict[signal.Signals, Any] = {each: signal.getsignal(each) for each in SIGNALS}

        def note(number: int, _: FrameType | None) -> None:
            self.by = signal.Signals(number)
            restore()

        def restore() -> None:
            for each, handler in before.items():
                signal.signal(each, handler)

        for each in SIGNALS:
            signal.signal(each, note)
        try:
            yield self
        finally:
            restore()


class Stopped(SystemExit):
    """The run was stopped by a signal and saved; the exit code is the one shells give to it."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(128 + by)
