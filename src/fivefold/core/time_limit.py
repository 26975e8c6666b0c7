"""Time and memory limits for code from elsewhere."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType


class TooLong(Exception):
    """The time limit has passed."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise `TooLong` in this context after so many seconds of CPU time: on a busy machine it takes longer. This ends
    Python code, and native code that lets signals through.

    Nothing is limited outside the main thread, where Python handles no signals, or without such a timer (Windows).
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    is_over = False

    def late(number: int, _: FrameType | None) -> None:
        nonlocal is_over
        is_over = True
        raise TooLong

    before = signal.signal(signal.SIGPROF, late)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        yield
    except Exception as error:
        if is_over:  # a library may turn the exception into another: Jinja rewrites tracebacks
            raise TooLong from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


@cache
def _sizes(process: int) -> int:
    """Descriptor of this process's sizes, kept open: a limit is set for each of many conversations."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


@contextmanager
def with_memory(more: int) -> Iterator[None]:
    """Limit this process to `more` bytes of memory beyond what it has; `MemoryError` is raised beyond. Only in the main
    thread, so that no two undo each other's limit. Without /proc nothing is limited."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):  # ValueError: the previous limit is lower
        most = int(os.pread(_sizes(os.getpid()), 32, 0).split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
