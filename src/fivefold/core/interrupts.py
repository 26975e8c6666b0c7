"""Signal handling of a command.

While it imports its modules, for up to seconds, Ctrl-C ends it with a message and without a traceback. Nothing is
raised then, because imported code may turn an interrupt into another error. While it trains, SIGTERM and Ctrl-C are
passed on to the loop, which ends after a step, the same one on every rank. No torch.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

INTERRUPTED = 130  # what a shell reports for a process ended by Ctrl-C
_STOPS = (signal.SIGTERM, signal.SIGINT)
ENDING = (*_STOPS, signal.SIGHUP, signal.SIGQUIT)  # signals that end a process without a handler


def end_at_once(*, word: str = "") -> None:
    """Make Ctrl-C end this process from now on, with `word`. A process that ignores it, as under nohup, still does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, partial(_end, word))


def raise_again() -> None:
    """Undo `end_at_once`: make Ctrl-C raise `KeyboardInterrupt` again, as in any Python program.

    Python drops exceptions raised in the callback of a weak reference, and every import has one: the command would go
    on as if nobody had asked it to stop. A dropped interrupt ends the process instead.
    """
    end = signal.getsignal(signal.SIGINT)
    if isinstance(end, partial):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = partial(_dropped, end, sys.unraisablehook)


def _dropped(end: Callable[..., None], otherwise: Callable[..., None], error: "sys.UnraisableHookArgs") -> None:
    if issubclass(error.exc_type, KeyboardInterrupt):
        end(signal.SIGINT, None)
    otherwise(error)


def _end(word: str, number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, word.encode())
    os._exit(INTERRUPTED)


class StopRequest:
    """Request to stop this process: the signal it came `by`, or None."""

    by: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note SIGTERM and SIGINT inside this context. A second Ctrl-C acts as before; a further SIGTERM does nothing.

        Schedulers send several (Slurm to the step and to the job), and none may cut a save short. Outside the main
        thread nothing is noted."""
        import threading  # here: nothing is imported before Ctrl-C has a handler

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _STOPS}

        def note(number: int, _: FrameType | None) -> None:
            self.by = self.by or signal.Signals(number)
            if number == signal.SIGINT:
                restore(signal.SIGINT)

        def restore(number: signal.Signals) -> None:
            signal.signal(number, before[number] or signal.SIG_DFL)

        for stop in _STOPS:
            signal.signal(stop, note)
        try:
            yield
        finally:
            for stop in _STOPS:
                restore(stop)


class Stopped(SystemExit):
    """Exit after a signal (of a run: once it is saved), with the exit code that shells give to it."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(128 + by)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise `Stopped` on SIGTERM inside this context if SIGTERM would end this process, so that cleanup runs. Outside
    the main thread nothing changes."""
    import threading  # here: nothing is imported before Ctrl-C has a handler

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(signal.Signals(number))

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
