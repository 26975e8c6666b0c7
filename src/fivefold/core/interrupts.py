"""Ctrl-C while a command still imports its modules, for up to seconds: it ends with a word, without a traceback.

What is imported may make another error of an interrupt, so that nothing is raised. No torch.
"""

import os
import signal
from contextlib import suppress
from functools import partial
from types import FrameType

INTERRUPTED = 130  # what a shell reports for a process ended by Ctrl-C


def end_at_once(*, word: str = "") -> None:
    """From now on Ctrl-C ends this process. One that ignores it, as under nohup, goes on doing so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, partial(_end, word))


def raise_again() -> None:
    """From now on Ctrl-C raises `KeyboardInterrupt`, as in any program of Python."""
    if isinstance(signal.getsignal(signal.SIGINT), partial):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(word: str, number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, word.encode())
    os._exit(INTERRUPTED)
