"""A logarithmic axis that has a place for zero and for what is not finite."""

import math
from collections.abc import Iterable

from matplotlib.axes import Axes

EXTREMES = 1e-100, 1e100  # sizes on an axis


class LogScale:
    """A logarithmic axis for errors of any size: its lowest line is zero, its highest what is not finite."""

    def __init__(self, values: Iterable[float]) -> None:
        listed = [_size(each) for each in values]
        sizes = [each for each in listed if 0 < each < math.inf]
        self._has_zero, self._has_infinite = 0 in listed, math.inf in listed
        low, high = (min(sizes), max(sizes)) if sizes else (1e-18, 1e-17)
        self._low, self._high = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1

    def place(self, value: float) -> float:
        """Where `value` is drawn."""
        return min(_size(value), 10.0**self._high) or 10.0**self._low

    def apply(self, axes: Axes, ticks: int = 5) -> None:
        """Make the y axis of `axes` this."""
        step = max(1, -(-(self._high - self._low) // ticks))
        decades = list(range(self._low + 1, self._high, step))
        labels = {10.0**decade: f"1e{decade}" for decade in decades}
        labels |= {10.0**self._low: "0"} if self._has_zero else {}
        labels |= {10.0**self._high: "∞"} if self._has_infinite else {}
        axes.set_yscale("log")
        axes.set_ylim(10.0**self._low / 2, 10.0**self._high * 2)
        axes.set_yticks(list(labels), list(labels.values()))
        axes.minorticks_off()
        axes.grid(axis="y")


def _size(value: float) -> float:
    """Of a value; what no axis can hold is zero or infinite."""
    size = abs(value)
    return 0.0 if size < EXTREMES[0] else size if size < EXTREMES[1] else math.inf
