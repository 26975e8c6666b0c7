"""Uncertainty of an estimate: intervals that hold the truth in 80 % of cases. No torch.

Each term of a step's time is known up to a factor. The doubt of a term is the standard deviation of the logarithm of
its seconds, and errors of terms are independent. So a step that is one half matmuls (doubt 0.12) and one half links
(0.15) has a doubt of sqrt(0.06^2 + 0.075^2) = 0.096.
"""

from collections.abc import Mapping
from math import exp, sqrt

# The doubt of each term, and the items that it sums. Judgement: chosen so that the intervals hold 80 % of the
# published rows in bf16, on average over their sources: `python -m benchmarks.planner_accuracy`.
DOUBTS = {"matmuls": 0.12, "attention": 0.2, "memory traffic": 0.2, "host": 0.3, "links": 0.15}
ITEMS = {
    "matmuls": ("matmuls",), "attention": ("attention",), "memory traffic": ("element-wise", "optimizer"),
    "host": ("host",), "links": ("tp", "cp", "ep", "data", "edges of the step"),
}  # fmt: skip
LIKELY = 1.28  # standard deviations to each side that hold 80 %

# Factors of the planned memory: 80 % of the rehearsed ranks are between them (docs/evidence/planned_memory.md).
LEAST_MEMORY, MOST_MEMORY = 0.975, 1.065

Interval = tuple[float, float]


def terms(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each term. `seconds`: item -> its seconds."""
    return {term: sum(seconds.get(item, 0.0) for item in items) for term, items in ITEMS.items()}


def spread(seconds: Mapping[str, float], doubt: float) -> float:
    """Standard deviation of the sum of the terms, in seconds. `doubt`: uncertainty relative to a chip that was measured
    (`Chip.doubt`)."""
    return doubt * sqrt(sum((DOUBTS[term] * share) ** 2 for term, share in terms(seconds).items()))


def step_interval(seconds: Mapping[str, float], doubt: float) -> Interval:
    """80 % interval of a step's seconds. A pipeline's bubble is off by the same factor as the work it waits for."""
    whole, work = sum(seconds.values()), sum(terms(seconds).values())
    factor = exp(LIKELY * spread(seconds, doubt) / work)
    return whole / factor, whole * factor


def memory_interval(taken: float) -> Interval:
    """80 % interval of the bytes that are taken."""
    return taken * LEAST_MEMORY, taken * MOST_MEMORY
