"""Which cases of a long list run in every test run, and which only in a campaign (`make campaign`).

A case is put off when another one proves the same fact: the lists below are all-pairs matrices that overlap.
"""

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import pytest


def put_off(*values: Any) -> Any:
    """A case that only a campaign runs."""
    return pytest.param(*values, marks=pytest.mark.campaign)


def first_of_each(cases: Iterable[Any], kind: Callable[[Any], Hashable], *, keep: int = 1) -> list[Any]:
    """The cases, all but the first `keep` of each kind marked `campaign`.

    Example: `first_of_each(["a1", "a2", "b1"], lambda case: case[0])` leaves `a1` and `b1` in every run.
    """
    met: dict[Hashable, int] = {}
    found: list[Any] = []
    for case in cases:
        number = met[kind(case)] = met.get(kind(case), 0) + 1
        found.append(case if number <= keep else put_off(case))
    return found


def covering(
    cases: Iterable[Any], facts: Callable[[Any], Collection[Hashable]], share: float, *, known: Iterable[Hashable] = ()
) -> list[Any]:
    """The cases in their order, all marked `campaign` but the few that together have `share` of all facts, with those
    that are `known` from other tests of every run.

    They are chosen one by one: the next one has the most facts that the others lack. Example: of `["ab", "bcd", "a"]`,
    whose facts are their letters, `covering(cases, set, 0.7)` leaves `bcd`, which has three of four.
    """
    listed = list(cases)
    facts_of = [set(facts(case)) for case in listed]
    every_fact = set[Hashable]().union(*facts_of)
    met, kept = every_fact & set(known), set[int]()
    while len(met) < share * len(every_fact):
        best = max(range(len(listed)), key=lambda at: len(facts_of[at] - met))
        met |= facts_of[best]
        kept.add(best)
    return [case if at in kept else put_off(case) for at, case in enumerate(listed)]


def every(cases: Iterable[Any], step: int) -> list[Any]:
    """The cases, all but the first of every `step` marked `campaign`."""
    return [case if index % step == 0 else put_off(case) for index, case in enumerate(cases)]
