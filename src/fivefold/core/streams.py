"""Standard output and error that cannot show what is written: closed, full, or in a small encoding. No torch."""

import io
import logging
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, cast

CLOSED_PIPE = 141  # what a shell reports for a program with a closed pipe (128 + SIGPIPE)


def make_usable() -> None:
    """Open missing standard streams, and show `?` for a letter that a stream's encoding does not have.

    Otherwise the next file to be opened would get the closed descriptor, and prints would be written into it.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(opened := os.open(os.devnull, flags), number)
            if opened != number:
                os.close(opened)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def is_pipe() -> bool:
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def is_closed_pipe(error: BaseException | None, *, was_pipe: bool = False) -> bool:
    """True if an error means that nobody reads standard output any more. `was_pipe`: it was a pipe before; Rich puts
    the null device in the place of a closed one."""
    if not isinstance(error, BrokenPipeError):
        return False
    if was_pipe and not is_pipe():
        return True
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):
        return True


def is_unwritable(error: BaseException) -> bool:
    """True if an error means that standard output takes no more: its disk is full, or its terminal is gone."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    try:
        print(flush=True)  # drops the text that could not be written
    except (OSError, ValueError):
        return True
    return False


def let_go() -> None:
    """Discard what is still to be printed, so that the process ends without an error."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()


def is_lost() -> bool:
    """True if standard output failed inside `unseen_if_need_be`."""
    return isinstance(sys.stdout, _Forgiving) and sys.stdout.is_lost


@contextmanager
def unseen_if_need_be() -> Iterator[None]:
    """Discard what cannot be printed inside this context: the log says so once, and the work goes on."""
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Forgiving(before[0], "standard output"))
    sys.stderr = cast(TextIO, _Forgiving(before[1], "standard error"))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Forgiving:
    """Text stream that goes quiet when the one it wraps fails."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name, self.is_lost = stream, name, False

    def write(self, text: str) -> int:
        if not self.is_lost:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if not self.is_lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def _lose(self, error: Exception) -> None:
        self.is_lost = True
        with suppress(OSError, ValueError, AttributeError):  # its buffered text would fail again at exit
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self._name == "standard output":
            logging.getLogger(__name__).warning(
                "%s cannot be written (%s): the run goes on, and metrics.jsonl has what it would show",
                self._name,
                error,
            )

    def isatty(self) -> bool:
        return not self.is_lost and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:
        return self._stream.encoding
