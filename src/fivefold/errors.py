"""What goes wrong, in the words of the person at the keyboard.

Every error a user can cause is a `UserError`: what is wrong and where, the likely fix, where to read more.
The command line prints those three lines and exits with `exit_code`; a traceback appears only under `--debug`.
"""


class UserError(Exception):
    """A request that cannot be met as written (exit code 2)."""

    exit_code = 2

    def __init__(self, what: str, *, fix: str | None = None, more: str | None = None) -> None:
        super().__init__("\n".join(line for line in (what, fix, more) if line))
        self.what, self.fix, self.more = what, fix, more

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.fix, self.more))


class RunFailed(UserError):
    """The request was fine; the thing asked for failed (exit code 1)."""

    exit_code = 1


def _rebuild(kind: type[UserError], what: str, fix: str | None, more: str | None) -> UserError:
    return kind(what, fix=fix, more=more)
