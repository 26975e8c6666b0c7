"""What goes wrong, in the words of the person at the keyboard.

Every error a user can cause is a `UserError`: what is wrong and where, the likely fix, where to read more.
The command line prints those three lines and exits with `exit_code`; a traceback appears only under `--debug`.
"""

from collections.abc import Iterator, Mapping
from typing import Any


class UserError(Exception):
    """A request that cannot be met as written (exit code 2)."""

    exit_code = 2

    def __init__(self, what: str, *, fix: str | None = None, more: str | None = None) -> None:
        super().__init__("\n".join(line for line in (what, fix, more) if line))
        self.what, self.fix, self.more = what, fix, more

    def to_json(self) -> dict[str, str | None]:
        """Plain data that `from_json` makes an equal error of, in another process."""
        return {"type": type(self).__name__, "what": self.what, "fix": self.fix, "more": self.more}

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> "UserError":
        """The error that `to_json` described; a `UserError` where its type is not known here."""
        kind = next((each for each in _kinds(UserError) if each.__name__ == told["type"]), UserError)
        return kind(told["what"], fix=told["fix"], more=told["more"])

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.fix, self.more))


class RunFailed(UserError):
    """The request was fine; the thing asked for failed (exit code 1)."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """What an error of another library says, without the pages that may follow; its type where it says nothing."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(said.strip().splitlines()), type(error).__name__)


def _kinds(kind: type[UserError]) -> Iterator[type[UserError]]:
    """`kind` and every type made from it."""
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


def _rebuild(kind: type[UserError], what: str, fix: str | None, more: str | None) -> UserError:
    return kind(what, fix=fix, more=more)
