"""What a fold does otherwise for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(fold: Any, **values: bool) -> Iterator[None]:
    """Inside, these attributes of `fold` have these values; afterwards those from before."""
    before = {name: getattr(fold, name) for name in values}
    vars(fold).update(values)
    try:
        yield
    finally:
        vars(fold).update(before)
