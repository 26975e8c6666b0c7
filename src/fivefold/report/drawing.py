"""Plots as inline SVG, of plain numbers: they follow the page's light or dark colours, and ask nothing of a network.

matplotlib draws with stand-in colours, which become the page's CSS variables (`--ink`, `--series-0` ...); text stays
text, in the page's font.
"""

import io
import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fivefold.report.inline_svg import inline_svg

WIDTH = 11.0  # inches; the page's width
SERIES = 7  # colours, then they come again with other dashes and markers
CSS = {"ink": "#000001", "grid": "#000002", "band": "#000003", "wrong": "#000004"}
CSS |= {f"series-{number}": f"#0000a{number}" for number in range(SERIES)}
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_RC: Any = {
    "svg.fonttype": "none", "text.parse_math": False, "path.simplify": False, "font.size": 9.0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), CSS["ink"]),
    "grid.color": CSS["grid"], "grid.linewidth": 0.6, "axes.linewidth": 0.6, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none", "legend.frameon": False,
}  # fmt: skip
P = ParamSpec("P")


def styled(draw: Callable[P, str]) -> Callable[P, str]:
    """Draw in this file's style, and leave matplotlib's own as it was."""

    @wraps(draw)
    def call(*args: P.args, **kwargs: P.kwargs) -> str:
        with matplotlib.rc_context(_RC):
            return draw(*args, **kwargs)

    return call


def canvas(height: float) -> Figure:
    """A figure as wide as the page, `height` inches high."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def to_svg(figure: Figure, salt: str) -> str:
    """The `<svg>` of a figure. `salt`: two figures of a page share no ids."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return inline_svg(buffer.getvalue(), CSS)


def curve(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], number: int, name: str, line: float = 1.4, *,
    marker: float = 4.0,
) -> None:  # fmt: skip
    """A line with markers: `line` its width, 0 for points alone; `marker` their size, 0 for none. Without points it
    only keeps its colour."""
    if not xs:
        return
    axes.plot(
        xs, ys, color=CSS[f"series-{number % SERIES}"], linewidth=line, markersize=marker, label=name,
        linestyle=_DASHES[number % len(_DASHES)] if line else "none",
        marker=_MARKERS[number % len(_MARKERS)] if marker else None,
        clip_on=False,
    )  # fmt: skip


def legend(figure: Figure, all_axes: Iterable[Axes], last: Sequence[str] = ()) -> None:
    """What has a label, once, above everything; those of `last` at its end."""
    lines = {str(line.get_label()): line for axes in all_axes for line in axes.get_lines()}
    named = [name for name in lines if not name.startswith("_")]
    names = sorted(named, key=lambda name: last.index(name) if name in last else -1)
    if names:
        figure.legend([lines[name] for name in names], names, loc="outside upper left", ncols=6)


def gaps(values: Sequence[float]) -> list[float]:
    """Gaps in place of what cannot be drawn."""
    return [value if math.isfinite(value) else math.nan for value in values]
