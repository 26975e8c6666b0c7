"""All-pairs: a small set of cases in which every pair of option values meets at least once."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Choice = dict[str, Any]


def all_pairs(
    options: Mapping[str, Sequence[Any]], *, legal: Callable[[Choice], bool] = lambda choice: True
) -> list[Choice]:
    """Choices, one value per option, that cover every pair of values some legal choice contains. Deterministic."""
    legal_choices = [
        c for c in (dict(zip(options, values, strict=True)) for values in product(*options.values())) if legal(c)
    ]
    pairs = {id(choice): _pairs(choice) for choice in legal_choices}
    missing = set().union(*pairs.values())
    picked = []
    while missing:
        best = max(legal_choices, key=lambda choice: len(pairs[id(choice)] & missing))
        picked.append(best)
        missing -= pairs[id(best)]
    return picked


def _pairs(choice: Choice) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    items = [(name, repr(value)) for name, value in choice.items()]
    return set(combinations(items, 2))
