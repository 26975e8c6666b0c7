"""The plots of a proof.

On a logarithmic axis zeros are drawn on the lowest line, labelled 0; infinities on the highest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

from fivefold.report.names import layers_of, short_names
from fivefold.report.plot import CHARACTER, LEFT, WIDTH, Axes, Linear, LogScale, entry, label, nice, svg
from fivefold.verification.results import ComparisonRow

TICKS = 60  # names under an axis; if there are more, only the layers are named
GAP = 40.0  # pixels between two plots side by side
DASHES = "6 3"
LEGEND = (("allowed", "var(--ink)", DASHES), ("more than is allowed", "var(--wrong)", ""))


Points = Mapping[str, ComparisonRow]  # by name, in order


def accuracy(errors: Mapping[str, Points], matches: Mapping[str, Mapping[str, float]]) -> str:
    """Plot per curve, by k, the mean absolute error of the top k logits, and the percent of positions with the same top
    k tokens."""
    every = [point for points in errors.values() for point in points.values()]
    ks = list(dict.fromkeys(k for points in errors.values() for k in points))
    tokens = list(dict.fromkeys(k for points in matches.values() for k in points))
    least = min((value for points in matches.values() for value in points.values()), default=100.0)
    low, half = min(least - 5, 90) if least > 5 else -5, (WIDTH - LEFT - GAP - LEFT) / 2
    scale = _scale(every)
    left = Axes(LEFT, 20, half, 230, _places(ks), scale)
    right = Axes(LEFT + half + GAP + LEFT, 20, half, 230, _places(tokens), Linear(low, 101.5))
    left.label_y(scale.ticks(5))
    right.label_y(_round(nice(max(low, 0), 100, 5)))
    titles = "mean absolute error of the top k logits", "positions with the same top k tokens, %"
    for axes, title, own in zip((left, right), titles, (ks, tokens), strict=True):
        axes.title(title)
        axes.label_x(dict(enumerate(own)), "k likeliest tokens")
    for number, (name, points) in enumerate(errors.items()):
        _errors(left, [ks.index(k) for k in points], list(points.values()), number)
        percents = matches.get(name, {})
        right.curve([tokens.index(k) for k in percents], list(percents.values()), number)
    for limits in _merged([{ks.index(k): p.tolerance for k, p in points.items()} for points in errors.values()]):
        _allowed(left, limits)
    return svg((left, right), 285, _legend(errors, every))


def by_name(panels: Mapping[str, Mapping[str, Points]]) -> str:
    """Plot a panel per layout over one axis of names: the error of every name and series, and the tolerances.

    `panels`: title of a panel -> series -> points. Names are in order of first appearance."""
    names = list(dict.fromkeys(name for panel in panels.values() for points in panel.values() for name in points))
    series = list(dict.fromkeys(line for panel in panels.values() for line in panel))
    every = [point for panel in panels.values() for points in panel.values() for point in points.values()]
    scale, place = _scale(every), {name: x for x, name in enumerate(names)}
    drawn, top = [], 20.0
    for title, panel in panels.items():
        axes = Axes(LEFT, top, WIDTH - LEFT - 8, 95, _places(names), scale)
        axes.label_y(scale.ticks(4))
        for number, (first, last) in layers_of(names).items():
            if number % 2 == 0:
                axes.band(first - 0.5, last + 0.5)
        axes.title(title, bold=True)
        for name, points in panel.items():
            beside = (series.index(name) - (len(series) - 1) / 2) * 0.24
            _errors(
                axes, [place[point] + beside for point in points], list(points.values()), series.index(name), line=0
            )
        for limits in _merged([{place[name]: p.tolerance for name, p in points.items()} for points in panel.values()]):
            _allowed(axes, limits)
        drawn.append(axes)
        top += 130
    if len(names) <= TICKS:
        short = short_names(names)
        drawn[-1].label_x(dict(enumerate(short)), upright=True)
        return svg(drawn, top + CHARACTER * max(map(len, short)), _legend(series, every))
    layers = list(layers_of(names).items())
    layers = layers[:: -(-len(layers) // TICKS) or 1]
    drawn[-1].label_x({(first + last) / 2: str(number) for number, (first, last) in layers}, "layer")
    return svg(drawn, top + 20, _legend(series, every))


def losses(curves: Mapping[str, Sequence[float]], references: Mapping[str, Sequence[float]]) -> str:
    """Plot loss curves over their references, and the distance of each from its own.

    `references`: curve -> its reference; equal ones are drawn once."""
    apart = {
        name: [abs(a - b) for a, b in zip(own, references.get(name, ()), strict=False)] for name, own in curves.items()
    }
    values = [value for curve in (*curves.values(), *references.values()) for value in curve if math.isfinite(value)]
    ticks = nice(min(values, default=0.0), max(values, default=1.0), 5)
    low, high = min([ticks[0], *values]), max([ticks[-1], *values])
    scale = LogScale(value for values in apart.values() for value in values)
    steps = Linear(0.5, max(map(len, (*curves.values(), *references.values()))) + 0.5)
    top = Axes(LEFT, 20, WIDTH - LEFT - 8, 200, steps, Linear(low, high if high > low else low + 1))
    bottom = Axes(LEFT, 255, WIDTH - LEFT - 8, 130, steps, scale)
    top.label_y(_round(ticks))
    bottom.label_y(scale.ticks(4))
    bottom.label_x(_round(nice(1, steps.high - 0.5, 10, whole=True)), "step")
    top.title("training loss")
    bottom.title("absolute difference from one process")
    for reference in dict.fromkeys(tuple(reference) for reference in references.values()):
        top.line(_steps(reference), reference, "var(--grid)", width=7)
    for number, (name, own) in enumerate(curves.items()):
        top.curve(_steps(own), own, number, line=1.2 + 2.4 * (len(curves) - 1 - number) / max(len(curves) - 1, 1))
        bottom.curve(_steps(apart[name]), apart[name], number)
    return svg((top, bottom), 425, [("one process", "var(--grid)", ""), *_legend(curves, ())])


# ---- how -------------------------------------------------------------------------------------------------------------


def _scale(points: Iterable[ComparisonRow]) -> LogScale:
    return LogScale(value for point in points for value in (point.error, point.tolerance))


def _places(names: Sequence[str]) -> Linear:
    """An axis with a place for each name: 0, 1, ..."""
    return Linear(-0.6, max(len(names) - 0.4, 0.6))


def _round(ticks: Sequence[float]) -> dict[float, str]:
    return {tick: label(tick, ticks) for tick in ticks}


def _steps(values: Sequence[float]) -> range:
    return range(1, len(values) + 1)


def _legend(names: Iterable[str], points: Iterable[ComparisonRow]) -> list[tuple[str, str, str]]:
    """An entry for each series, then, if drawn, those for the tolerances and for what exceeds them."""
    oks = {point.ok for point in points}
    return [*(entry(name, number) for number, name in enumerate(names)), *LEGEND[: len(oks) and 1 + (False in oks)]]


def _errors(
    axes: Axes, xs: Sequence[float], points: Sequence[ComparisonRow], number: int, *, line: float = 1.4
) -> None:
    """Draw a series, with rings around the points that exceed their tolerance."""
    axes.curve(xs, [point.error for point in points], number, line=line)
    wrong = [not point.ok for point in points]
    axes.rings(list(compress(xs, wrong)), [point.error for point in compress(points, wrong)])


def _allowed(axes: Axes, limits: Mapping[int, float]) -> None:
    """Draw a dashed line at the tolerance of each place."""
    xs = [end for x in sorted(limits) for end in (x - 0.5, x + 0.5)]
    axes.line(xs, [limits[x] for x in sorted(limits) for _ in range(2)], "var(--ink)", dash=DASHES)


def _merged(limits: Sequence[Mapping[int, float]]) -> list[dict[int, float]]:
    """Merge limits that agree wherever both have a value, so that few lines are drawn."""
    found: list[dict[int, float]] = []
    for limit in filter(None, limits):
        for line in found:
            if all(line.get(x, value) == value for x, value in limit.items()):
                line.update(limit)
                break
        else:
            found.append(dict(limit))
    return found
