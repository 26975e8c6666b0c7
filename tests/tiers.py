"""Which cases of a long list run in every test run, and which only in a campaign (`make campaign`).

A case is put off when another one proves the same fact: the lists below are all-pairs matrices that overlap.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest


def first_of_each(cases: Iterable[Any], kind: Callable[[Any], Hashable], *, keep: int = 1) -> list[Any]:
    """The cases, all but the first `keep` of each kind marked `campaign`.

    Example: `first_of_each(["a1", "a2", "b1"], lambda case: case[0])` leaves `a1` and `b1` in every run.
    """
    met: dict[Hashable, int] = {}
    found: list[Any] = []
    for case in cases:
        number = met[kind(case)] = met.get(kind(case), 0) + 1
        found.append(case if number <= keep else pytest.param(case, marks=pytest.mark.campaign))
    return found


def every(cases: Iterable[Any], step: int) -> list[Any]:
    """The cases, all but the first of every `step` marked `campaign`."""
    return [
        case if index % step == 0 else pytest.param(case, marks=pytest.mark.campaign)
        for index, case in enumerate(cases)
    ]
