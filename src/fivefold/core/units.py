"""Numbers as people write them: `8k` tokens of sequence, `500M` tokens of training, `1%` of the documents.

Parsed once, at the edge of the run file and of the command line; inside there are only `int` and `float`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

GIB = 2**30  # bytes
_WRITTEN = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)([kKmMgGbB]?)")
_STEP = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3}


def parse_count(value: Any) -> int:
    """Parse a number of things: `500M` is 500,000,000. Raises `ValueError`."""
    return _scaled(value, base=1000, example="500M")


def parse_length(value: Any) -> int:
    """Parse a sequence length or a vocabulary size, in tokens: `8k` is 8192. Raises `ValueError`."""
    return _scaled(value, base=1024, example="8k")


def parse_fraction(value: Any) -> float:
    """Parse a part of a whole in [0, 1): `1%` is 0.01. Raises `ValueError`."""
    try:
        if isinstance(value, bool):
            raise ValueError
        text = str(value).strip()
        fraction = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"{value!r} is not a fraction; write 1% or 0.01") from None
    if not 0 <= fraction < 1:
        raise ValueError(f"{value} is not a fraction between 0 and 100%")
    return fraction


def parse_steps(value: Any) -> int | float | str:
    """Parse steps of a run: a number of them, a part of it such as `5%` (0.05), or `auto`. Raises `ValueError`."""
    if value == "auto":
        return "auto"
    written = str(value).strip()
    if written.endswith("%") or (isinstance(value, float) and 0 < value < 1):
        return parse_fraction(value) or 0
    try:
        return parse_count(value)
    except ValueError as error:
        raise ValueError(f"{error} (or as a part of the run such as 5%, or auto)") from None


def parse_nodes(value: Any) -> str:
    """Parse a number of nodes, `2`, or the least and the most, `2:4`. Raises `ValueError`."""
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", str(value).strip())
    if isinstance(value, bool) or not match:
        raise ValueError(f"{value!r} is not a number of nodes; write 2, or the least and the most as 2:4")
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most:
        raise ValueError(f"{value} is not a range of nodes: the least is 1 or more, and the most no smaller")
    return str(least) if least == most else f"{least}:{most}"


def human(number: float) -> str:
    """`1234567` as `1.23M`, three significant digits, as counts appear on the screen."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size * 0.9995:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def many(number: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def human_bytes(count: float) -> str:
    """`27.8 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def _scaled(value: Any, *, base: int, example: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    match = _WRITTEN.fullmatch(str(value).strip())
    if isinstance(value, bool) or not match:
        raise ValueError(f"{value!r} is not a whole number; write it in digits or like {example}")
    scaled = float(match[1].replace("_", "")) * float(base) ** _STEP[match[2].lower()]
    if not scaled.is_integer():
        raise ValueError(f"{value} is {scaled:g}, which is not a whole number")
    return int(scaled)


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
