"""Errors in the words of the person at the keyboard.

Every error a user can cause is a `UserError`: what is wrong and where, the likely fix, where to read more.
The command line prints those three lines and exits with `exit_code`; a traceback appears only under `--debug`.
A `Violation` is a reason why a layout cannot run, with arithmetic and the nearest values that fit.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class UserError(Exception):
    """A request that cannot be met as written (exit code 2)."""

    exit_code = 2

    def __init__(self, what: str, *, fix: str | None = None, more: str | None = None) -> None:
        super().__init__("\n".join(line for line in (what, fix, more) if line))
        self.what, self.fix, self.more = what, fix, more

    def to_json(self) -> dict[str, str | None]:
        """Plain data from which `from_json` rebuilds an equal error in another process."""
        return {"type": type(self).__name__, "what": self.what, "fix": self.fix, "more": self.more}

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> "UserError":
        """Rebuild the error from `to_json`; a plain `UserError` if its type is not known here."""
        kind = next((subclass for subclass in _kinds(UserError) if subclass.__name__ == told["type"]), UserError)
        return kind(told["what"], fix=told["fix"], more=told["more"])

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.fix, self.more))


class RunFailed(UserError):
    """The request was fine; the thing asked for failed (exit code 1)."""

    exit_code = 1


class NodesDiffer(UserError):
    """Nodes read unlike things. Every rank raises it, and every node reports it in its own log."""


def first_line(error: BaseException) -> str:
    """First line of another library's error message; the error's type if the message is empty."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(said.strip().splitlines()), type(error).__name__)


def _kinds(kind: type[UserError]) -> Iterator[type[UserError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _kinds(subclass)


def _rebuild(kind: type[UserError], what: str, fix: str | None, more: str | None) -> UserError:
    return kind(what, fix=fix, more=more)


@dataclass(frozen=True)
class Violation:
    """One reason why a layout cannot run.

    `about`: the field of the layout, or `global_batch_size`, that has to change. `legal`: nearby values of it that fit;
    empty if it is not a number.
    """

    about: str
    what: str
    fix: str
    legal: tuple[int, ...] = ()
    more: str = "fivefold docs explain/layouts"

    @property
    def error(self) -> UserError:
        return UserError(self.what, fix=self.fix, more=self.more)


def refuse(found: Iterable[Violation]) -> None:
    """Raise the first of `found`, if there is any, as a `UserError`."""
    for violation in found:
        raise violation.error
