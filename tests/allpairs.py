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
    places: dict[tuple[tuple[str, str], tuple[str, str]], int] = {}  # a pair of values -> its bit
    masks = []
    for choice in legal_choices:
        items = [(name, repr(value)) for name, value in choice.items()]
        masks.append(sum(1 << places.setdefault(pair, len(places)) for pair in combinations(items, 2)))
    missing = (1 << len(places)) - 1
    picked = []
    while missing:
        best = max(range(len(masks)), key=lambda index: (masks[index] & missing).bit_count())
        picked.append(legal_choices[best])
        missing &= ~masks[best]
    return picked
