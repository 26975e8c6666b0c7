"""Rows of packed documents, for models that count or forget something of a row. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from fivefold.models.facts import Counted
from fivefold.parallel.plan import Edit, ParallelPlan


@dataclass(frozen=True)
class RefuseLongRows(Edit):
    """Refuse rows in which `counted` would let documents change each other."""

    kind = "pre-hook"
    counted: Counted


@dataclass(frozen=True)
class HandOnBounds(Edit):
    """Give the `attention` modules of a layer the bounds of documents."""

    kind = "forward"
    attention: tuple[str, ...]


@dataclass(frozen=True)
class CountBehindPadding(Edit):
    """Give the base positions that count from after token `padding`."""

    kind = "pre-hook"
    padding: int


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    facts, base = plan.facts, plan.anatomy.base
    if facts.counted:
        yield RefuseLongRows(base, "rows", f"{facts.counted.name} counts the tokens of a row", facts.counted)
    for layer, pairs in groupby(facts.forgetful, key=lambda pair: pair[0]):
        attention = tuple(dict.fromkeys(name for _, name in pairs))
        yield HandOnBounds(layer, "rows", "its attention is given the bounds of packed documents", attention)
    if facts.padding is not None:
        yield CountBehindPadding(base, "rows", "positions count from behind the padding token", facts.padding)
