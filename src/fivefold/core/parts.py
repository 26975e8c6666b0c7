"""Things in order, cut into parts of a bounded size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_parts(things: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Consecutive things, as many at a time as are at most `most` together; a larger one is a part of its own."""
    part: list[T] = []
    held = 0
    for thing in things:
        if part and held + size(thing) > most:
            yield part
            part, held = [], 0
        part.append(thing)
        held += size(thing)
    if part:
        yield part
