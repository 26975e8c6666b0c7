"""A limit of time for code that is not ours."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooLong(Exception):
    """The time is over."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Inside, `TooLong` is raised after so many seconds. Python code, and what it calls that lets signals through.

    Outside of the main thread, in which alone Python hears signals, and where there is no such timer (Windows),
    nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    is_over = False

    def late(number: int, _: FrameType | None) -> None:
        nonlocal is_over
        is_over = True
        raise TooLong

    before = signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    except Exception as error:
        if is_over:  # what is raised amid a library may come out of it as something else: Jinja rewrites tracebacks
            raise TooLong from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
