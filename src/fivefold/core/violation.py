"""Reasons why a layout cannot run, with arithmetic and the nearest values that fit. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from fivefold.core.errors import UserError


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
    more: str = "docs/explain/layouts.md"

    @property
    def error(self) -> UserError:
        """The violation as an error for the user."""
        return UserError(self.what, fix=self.fix, more=self.more)


def refuse(found: Iterable[Violation]) -> None:
    """Raise the first of `found`, if there is any, as a `UserError`."""
    for violation in found:
        raise violation.error
