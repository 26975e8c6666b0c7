"""The plots of a proof.

Zeros have no place on a logarithmic axis: they are drawn on its lowest line, labelled 0; what is infinite on its
highest.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from fivefold.report.drawing import CSS, canvas, curve, gaps, legend, styled, to_svg
from fivefold.report.log_scale import LogScale
from fivefold.report.names import layers_of, short_names

TICKS = 60  # names under an axis; of more, only the layers are named
ALLOWED, WRONG = "allowed", "more than is allowed"  # in legends, last


@dataclass(frozen=True)
class Point:
    """An error, and what is allowed."""

    error: float
    allowed: float
    ok: bool = True


Points = Mapping[str, Point]  # by name, in order


@styled
def accuracy(errors: Mapping[str, Points], matches: Mapping[str, Mapping[str, float]]) -> str:
    """Of each curve, the mean absolute error of the likeliest k logits, and the percent of positions with the same
    likeliest k tokens; both by k."""
    figure = canvas(3.4)
    left, right = figure.subplots(1, 2)
    scale = LogScale(
        value for points in errors.values() for point in points.values() for value in (point.error, point.allowed)
    )
    ks = list(dict.fromkeys(k for each in errors.values() for k in each))
    tokens = list(dict.fromkeys(k for each in matches.values() for k in each))
    for number, (name, points) in enumerate(errors.items()):
        curve(left, [ks.index(k) for k in points], [scale.place(p.error) for p in points.values()], number, name)
        _wrong(left, [(ks.index(k), p) for k, p in points.items()], scale)
    for limits in _merged([{ks.index(k): p.allowed for k, p in each.items()} for each in errors.values()]):
        _allowed(left, limits, scale)
    for number, (name, percents) in enumerate(matches.items()):
        curve(right, [tokens.index(k) for k in percents], list(percents.values()), number, name)
    scale.apply(left)
    least = min((value for each in matches.values() for value in each.values()), default=100.0)
    right.set_ylim(min(least - 5, 90) if least > 5 else -5, 101.5)
    right.grid(axis="y")
    titles = "mean absolute error of the top k logits", "positions with the same top k tokens, %"
    for axes, title, own in zip((left, right), titles, (ks, tokens), strict=True):
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xticks(range(len(own)), own)
        axes.set_xlim(-0.4, max(len(own) - 0.6, 0.6))
        axes.set_xlabel("k likeliest tokens")
    legend(figure, (left, right), last=(ALLOWED, WRONG))
    return to_svg(figure, "accuracy")


@styled
def by_name(panels: Mapping[str, Mapping[str, Points]], title: str) -> str:
    """A panel for each layout above one axis of names; in it, the error of every name and series, and what is allowed.

    `panels`: title of a panel -> series -> points. Names keep the order in which they first come."""
    names = list(dict.fromkeys(name for panel in panels.values() for points in panel.values() for name in points))
    series = list(dict.fromkeys(each for panel in panels.values() for each in panel))
    everything = [p for panel in panels.values() for points in panel.values() for p in points.values()]
    scale = LogScale(value for point in everything for value in (point.error, point.allowed))
    figure = canvas(0.9 + 1.35 * len(panels) + (1.2 if len(names) <= TICKS else 0.2))
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    place = {name: x for x, name in enumerate(names)}
    for axes, (panel, own) in zip(all_axes, panels.items(), strict=True):
        for each, points in own.items():
            beside = (series.index(each) - (len(series) - 1) / 2) * 0.24
            xs = [place[name] + beside for name in points]
            curve(axes, xs, [scale.place(point.error) for point in points.values()], series.index(each), each, line=0.0)
            _wrong(axes, list(zip(xs, points.values(), strict=True)), scale)
        for limits in _merged([{place[name]: p.allowed for name, p in points.items()} for points in own.values()]):
            _allowed(axes, limits, scale)
        scale.apply(axes, ticks=4)
        axes.set_title(panel, loc="left", fontsize=10, fontweight="bold")
        axes.tick_params(axis="x", bottom=False)
        _bands(axes, names)
    _name_axis(all_axes[-1], names)
    figure.supylabel("relative error", fontsize=9)
    legend(figure, all_axes, last=(ALLOWED, WRONG))
    return to_svg(figure, title)


@styled
def losses(curves: Mapping[str, Sequence[float]], references: Mapping[str, Sequence[float]]) -> str:
    """Loss curves over those they should follow, and how far each is from its own.

    `references` has, for each curve, what it is compared with; equal ones are drawn once."""
    figure = canvas(4.6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for values in dict.fromkeys(tuple(each) for each in references.values()):
        top.plot(_steps(values), gaps(values), color=CSS["grid"], linewidth=7, label="one process",
                 solid_capstyle="round")  # fmt: skip
    apart = {
        name: [abs(a - b) for a, b in zip(own, references.get(name, ()), strict=False)] for name, own in curves.items()
    }
    scale = LogScale(value for values in apart.values() for value in values)
    for number, (name, own) in enumerate(curves.items()):
        width = 1.2 + 2.4 * (len(curves) - 1 - number) / max(len(curves) - 1, 1)
        curve(top, _steps(own), gaps(own), number, name, line=width)
        curve(bottom, _steps(apart[name]), [scale.place(value) for value in apart[name]], number, name)
    scale.apply(bottom, ticks=4)
    top.grid(axis="y")
    top.set_title("training loss", loc="left", fontsize=9)
    bottom.set_title("absolute difference from one process", loc="left", fontsize=9)
    bottom.set_xlabel("step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    legend(figure, (top, bottom), last=(ALLOWED, WRONG))
    return to_svg(figure, "losses")


# ---- how -------------------------------------------------------------------------------------------------------------


def _wrong(axes: Axes, points: Iterable[tuple[float, Point]], scale: LogScale) -> None:
    """A ring around what is more than is allowed."""
    bad = [(x, scale.place(point.error)) for x, point in points if not point.ok]
    if bad:
        axes.plot(*zip(*bad, strict=True), linestyle="none", marker="o", markersize=8.5, markeredgewidth=1.8,
                  color=CSS["wrong"], markerfacecolor="none", label=WRONG, clip_on=False)  # fmt: skip


def _allowed(axes: Axes, limits: Mapping[int, float], scale: LogScale) -> None:
    """A dashed line at what is allowed at each place."""
    xs = sorted(limits)
    heights = [scale.place(limits[x]) for x in (xs[0], *xs, xs[-1])]
    axes.plot([xs[0] - 0.4, *xs, xs[-1] + 0.4], heights, color=CSS["ink"], linewidth=1, linestyle=(0, (6, 3)),
              drawstyle="steps-mid", label=ALLOWED)  # fmt: skip


def _bands(axes: Axes, names: Sequence[str]) -> None:
    """Every second layer on a tinted ground."""
    for number, (first, last) in layers_of(names).items():
        if number % 2 == 0:
            axes.axvspan(first - 0.5, last + 0.5, color=CSS["band"], linewidth=0, zorder=0)


def _name_axis(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xlim(-0.7, max(len(names) - 0.3, 0.7))
    if len(names) <= TICKS:
        axes.set_xticks(range(len(names)), short_names(names), rotation=90, fontsize=7.5)
        return
    layers = list(layers_of(names).items())
    layers = layers[:: -(-len(layers) // TICKS) or 1]
    axes.set_xticks([(first + last) / 2 for _, (first, last) in layers], [str(number) for number, _ in layers])
    axes.set_xlabel("layer")


def _merged(limits: Sequence[Mapping[int, float]]) -> list[dict[int, float]]:
    """As few lines as can be: those that say the same wherever both say something become one."""
    found: list[dict[int, float]] = []
    for each in filter(None, limits):
        for line in found:
            if all(line.get(x, value) == value for x, value in each.items()):
                line.update(each)
                break
        else:
            found.append(dict(each))
    return found


def _steps(values: Sequence[float]) -> list[int]:
    return list(range(1, len(values) + 1))
