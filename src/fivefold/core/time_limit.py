"""Limits of time and memory for code that is not ours."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType


class TooLong(Exception):
    """The time is over."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Inside, `TooLong` is raised after so many seconds in which this process computed: a machine that others keep busy
    takes longer. It ends Python code, and what that calls where it lets signals through.

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

    before = signal.signal(signal.SIGPROF, late)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        yield
    except Exception as error:
        if is_over:  # what is raised amid a library may come out of it as something else: Jinja rewrites tracebacks
            raise TooLong from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


@cache
def _sizes(process: int) -> int:
    """The descriptor of the sizes of this process, open from then on: a limit is set for each of many conversations."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


@contextmanager
def with_memory(more: int) -> Iterator[None]:
    """Inside, this process takes at most `more` bytes of memory beyond what it has, and `MemoryError` is raised beyond.
    In the main thread alone, so that no two undo each other's limit. Without /proc nothing is limited."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):  # ValueError: the limit that there was is lower
        most = int(os.pread(_sizes(os.getpid()), 32, 0).split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
