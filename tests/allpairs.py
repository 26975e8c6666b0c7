"""All-pairs: a small set of cases in which every pair of option values meets at least once."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Choice = dict[str, Any]
Pair = frozenset[tuple[str, Any]]
Options = Mapping[str, Sequence[Any]]
Legal = Callable[[Choice], bool]  # also of a choice that has some of the options only: False where none can follow


def pairs_of(choice: Choice) -> set[Pair]:
    """The pairs of option values of a choice."""
    return {frozenset(pair) for pair in combinations(choice.items(), 2)}


def reachable(options: Options, legal: Legal) -> set[Pair]:
    """Every pair of values that some legal choice contains."""
    return {
        frozenset(((a, x), (b, y)))
        for a, b in combinations(options, 2)
        for x in options[a]
        for y in options[b]
        if completed({a: x, b: y}, options, legal) is not None
    }


def completed(
    start: Choice, options: Options, legal: Legal, *, wanted: Callable[[Choice, str, Any], float] | None = None
) -> Choice | None:
    """A legal choice that contains `start`, by backtracking; values for which `wanted` is large are tried first."""
    if not legal(start):
        return None
    if len(start) == len(options):
        return start
    name = next(each for each in options if each not in start)
    values = list(options[name])
    if wanted:
        values.sort(key=lambda value: -wanted(start, name, value))
    for value in values:
        if (found := completed(start | {name: value}, options, legal, wanted=wanted)) is not None:
            return found
    return None


def all_pairs(
    options: Options, *, legal: Legal = lambda choice: True, needed: set[Pair] | None = None, tries: int = 20,
    seed: int = 0,
) -> list[Choice]:  # fmt: skip
    """Choices, one value per option, that cover every pair of values some legal choice contains, or those `needed`.

    Deterministic. Greedy: a choice begins with a pair that is missing, and takes on the values that bring the most
    missing pairs with what it has; of `tries` such choices the best is kept.
    """
    draw = random.Random(seed)
    missing = set(reachable(options, legal) if needed is None else needed)
    order = sorted(missing, key=lambda pair: sorted(map(repr, pair)))
    found: list[Choice] = []

    def wanted(start: Choice, name: str, value: Any) -> float:
        return sum(frozenset((item, (name, value))) in missing for item in start.items()) + 0.5 * draw.random()

    while missing:
        left = [pair for pair in order if pair in missing]
        starts = [dict(draw.choice(left)) for _ in range(tries)]
        choices = [completed(start, options, legal, wanted=wanted) for start in starts]
        best = max((each for each in choices if each), key=lambda each: len(pairs_of(each) & missing))
        found.append({name: best[name] for name in options})
        missing -= pairs_of(best)
    return found
