"""What a signal does to a command.

While it still imports its modules, for up to seconds, Ctrl-C ends it with a word and without a traceback: what is
imported may make another error of an interrupt, so that nothing is raised. While it trains, SIGTERM and Ctrl-C are
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
ENDING = (*_STOPS, signal.SIGHUP, signal.SIGQUIT)  # what ends a process that does not heed it


def end_at_once(*, word: str = "") -> None:
    """From now on Ctrl-C ends this process. One that ignores it, as under nohup, goes on doing so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, partial(_end, word))


def raise_again() -> None:
    """From now on, where `end_at_once` was in force, Ctrl-C raises `KeyboardInterrupt`, as in any program of Python.

    Python drops what is raised in the callback of a weak reference, and every import has one: a command would go on as
    if nobody had asked it to stop. An interrupt that is dropped ends the process instead.
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
    """Whether this process was asked to stop, and by which signal."""

    by: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT are noted; a second Ctrl-C does what it always did, and a further SIGTERM nothing:
        schedulers send several (Slurm to the step and to the job), and none may cut a save short.

        Outside of the main thread nothing is noted.
        """
        import threading  # here: nothing is imported before Ctrl-C has a handler

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.getsignal(each) for each in _STOPS}

        def note(number: int, _: FrameType | None) -> None:
            self.by = self.by or signal.Signals(number)
            if number == signal.SIGINT:
                restore(signal.SIGINT)

        def restore(number: signal.Signals) -> None:
            signal.signal(number, before[number] or signal.SIG_DFL)

        for each in _STOPS:
            signal.signal(each, note)
        try:
            yield
        finally:
            for each in _STOPS:
                restore(each)


class Stopped(SystemExit):
    """A signal has stopped it (a run: once it is saved); the exit code is the one shells give to it."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(128 + by)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Inside, SIGTERM raises `Stopped` where it would end this process, so that what is to be cleaned up is. Outside of
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
