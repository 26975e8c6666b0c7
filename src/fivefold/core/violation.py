"""Why a layout cannot run: what is wrong, with its arithmetic and the nearest values that fit. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from fivefold.core.errors import UserError


@dataclass(frozen=True)
class Violation:
    """One reason why a layout cannot run.

    `about`: the field of the layout, or `global_batch_size`, that has to change. `legal`: its values that fit, of those
    that are near; empty where it is no number.
    """

    about: str
    what: str
    fix: str
    legal: tuple[int, ...] = ()
    more: str = "docs/explain/layouts.md"

    @property
    def error(self) -> UserError:
        """For the user."""
        return UserError(self.what, fix=self.fix, more=self.more)


def refuse(found: Iterable[Violation]) -> None:
    """Raise the first of `found`, if there is any, as a `UserError`."""
    for each in found:
        raise each.error
