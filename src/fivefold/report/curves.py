"""Curves of a run: a small SVG for each metric, over steps.

They are complete without a script. `curves.js` redraws them over tokens or hours, and reads values under the pointer,
from the numbers that each carries as JSON.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from fivefold.core.text import shown
from fivefold.core.units import human

POINTS = 400  # of a curve; neighbours are averaged if there are more
DOTTED = 60  # curves with fewer points show each of them
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420.0, 190.0, 44.0, 10.0, 8.0, 22.0  # pixels: a panel and its margins
RIGHT_AXIS = 44.0  # pixels, if the right side has labels too
LABELS = {
    "train/loss": "training", "eval/loss": "validation",
    "memory/peak_gib": "allocated", "memory/peak_reserved_gib": "reserved",
}  # fmt: skip
LOSS = "loss, nats per token"
_PANELS = (
    (LOSS, ("train/loss", "eval/loss")),
    ("gradient norm, before clipping", ("train/grad_norm",)),
    ("tokens per second", ("perf/tokens_per_second",)),
    ("step time, s", ("perf/step_seconds",)),
    ("learning rate", ("train/learning_rate",)),
    ("peak memory of a rank, GiB", ("memory/peak_gib", "memory/peak_reserved_gib")),
    ("TFLOP/s per device", ("perf/tflops_per_device",)),
    ("model FLOPs utilisation, %", ("perf/mfu_pct",)),
    ("data wait, % of the step time", ("perf/data_wait_pct",)),
)
_LEFT_OUT = (
    "step", "train/tokens_seen", "train/skipped_steps", "perf/tokens_per_second_per_device", "perf/elapsed_seconds",
    "eval/best", "eval/best_step",
)  # fmt: skip


class Point(NamedTuple):
    """A value, and its position on each of the x axes; None: not recorded."""

    step: float
    value: float
    tokens: float | None = None
    hours: float | None = None


Curve = list[Point]
Curves = Mapping[str, Curve]  # by name
Scale = Callable[[float], float]  # a value -> its pixels along an axis
Grid = tuple[tuple[float, float | None], ...]  # the steps and tokens of a curve's points


@dataclass(frozen=True)
class Mark:
    """An event after a step. `kind`: how it is drawn."""

    step: float
    kind: str
    what: str


@dataclass(frozen=True)
class PanelDrawing:
    """A panel in pixels. `ticks`: (y, label, label on the right side). `lines`: (path, its points if they are few).
    `right`: title of the labels on the right side. `data`: its numbers, for the script."""

    title: str
    legend: Sequence[str]
    right: str
    ticks: Sequence[tuple[float, str, str]]
    lines: Sequence[tuple[str, str]]
    data: str


@dataclass(frozen=True)
class Drawing:
    """All panels, over one axis with `ticks` (x, label). `data`: the numbers that they share."""

    panels: Sequence[PanelDrawing]
    ticks: Sequence[tuple[float, str]]
    marks: Sequence[tuple[float, Mark]]
    end: float  # pixels to the right end of the axis
    averaged: bool
    data: str


def panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, Curves]:
    """Group the metrics of `metrics.jsonl` into panels by title: the known ones first, then everything else that was
    measured."""
    known = {name for _, names in _PANELS for name in names}
    others = dict.fromkeys(name for row in rows for name in row if name not in (*known, *_LEFT_OUT))
    found: dict[str, Curves] = {}
    for title, names in (*_PANELS, *((name, (name,)) for name in others)):
        curves = {name: values for name in names if (values := _curve(rows, name))}
        if curves:
            found[title] = curves
    return found


def _curve(rows: Sequence[Mapping[str, Any]], name: str) -> Curve:
    measured = [row for row in rows if _is_number(row, name)]
    return thinned([Point(row["step"], row[name], row.get("train/tokens_seen"), _hours(row)) for row in measured])


def thinned(values: Curve) -> Curve:
    """Reduce to at most `POINTS`, each the mean of neighbours."""
    size = -(-len(values) // POINTS) or 1
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    return [Point(*map(_mean, zip(*group, strict=True))) for group in groups]  # type: ignore[arg-type]


def _hours(row: Mapping[str, Any]) -> float | None:
    return row["perf/elapsed_seconds"] / 3600 if _is_number(row, "perf/elapsed_seconds") else None


def _is_number(row: Mapping[str, Any], name: str) -> bool:
    return isinstance(row.get(name), int | float) and math.isfinite(row[name])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def draw(found: Mapping[str, Curves], marks: Sequence[Mark], *, averaged: bool) -> Drawing:
    """Lay out the panels in pixels, over steps, with the marks."""
    points = {_grid(curve): curve for curves in found.values() for curve in curves.values()}
    grids = list(points)
    first, last = min(grid[0][0] for grid in grids), max(grid[-1][0] for grid in grids)
    xs = {
        axis: [[_short(getattr(point, field)) for point in points[grid]] for grid in grids]
        for axis, field in (("steps", "step"), ("tokens", "tokens"), ("hours", "hours"))
    }
    shown = [mark for mark in marks if first <= mark.step <= last]
    right = RIGHT_AXIS if LOSS in found else RIGHT
    data: dict[str, Any] = {
        "box": [WIDTH, HEIGHT, LEFT, TOP, BOTTOM],
        "xs": {name: lists for name, lists in xs.items() if all(None not in values for values in lists)},
        "marks": [mark.step for mark in shown],
        "right": right,
    }
    last = last if last > first else first + 1
    x_at = _scale(first, last, LEFT, WIDTH - right)
    return Drawing(
        [_panel(title, curves, grids, x_at) for title, curves in found.items()],
        [(x_at(tick), human(tick)) for tick in nice(first, last, 5, whole=True)],
        [(x_at(mark.step), mark) for mark in shown],
        WIDTH - right,
        averaged,
        _json(data),
    )


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _panel(title: str, curves: Curves, grids: Sequence[Grid], x_at: Scale) -> PanelDrawing:
    values = [point.value for curve in curves.values() for point in curve]
    ticks = nice(min(values), max(values), 5)
    low, high = min(ticks[0], *values), max(ticks[-1], *values)
    if high <= low:  # draw a constant in the middle
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    y_at = _scale(low, high, HEIGHT - BOTTOM, TOP)
    lines, data = [], []
    for name, curve in curves.items():
        places = [f"{x_at(point.step):.1f} {y_at(point.value):.1f}" for point in curve]
        dots = "".join(f"M{place}h0" for place in places) if len(places) < DOTTED else ""
        lines.append(("M" + "L".join(places), dots))
        told = shown(LABELS.get(name, name))  # a browser decodes the escapes of JSON
        data.append([grids.index(_grid(curve)), [_short(point.value) for point in curve], told])
    is_loss = title == LOSS
    labels = [
        (y_at(tick), label(tick, ticks), perplexity(tick) if is_loss and abs(tick) < 50 else "") for tick in ticks
    ]
    legend = [LABELS.get(name, name) for name in curves] if len(curves) > 1 else []
    return PanelDrawing(
        title, legend, "perplexity" if is_loss else "", labels, lines,
        _json({"y": [low, high], "lines": data, "loss": is_loss}),
    )  # fmt: skip


def _grid(curve: Curve) -> Grid:
    """Steps and tokens of a curve's points; most curves of a run share them."""
    return tuple((point.step, point.tokens) for point in curve)


def perplexity(loss: float) -> str:
    """e to the power of a loss, in three digits."""
    return human(math.exp(loss)) if loss < 100 else "∞"


def _short(value: float | None) -> float | int | None:
    """Round to five digits, enough for a curve."""
    if value is None:
        return None
    rounded = float(f"{value:.5g}") if abs(value) < 1e5 else round(value)
    return int(rounded) if float(rounded).is_integer() else rounded


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def nice(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """About `count` round numbers from `low` to `high`; at least one."""
    span = (high - low) or abs(low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= count)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low]


def label(tick: float, ticks: Iterable[float]) -> str:
    """Format a tick: short, and in the same form for a whole axis."""
    ticks = list(ticks)
    largest = max(abs(tick) for tick in ticks)
    if largest >= 1000:
        return human(tick) if tick else "0"
    if 0 < largest < 0.001:
        digits = int(any(abs(float(f"{one:.0e}") - one) > 1e-6 * largest for one in ticks))
        return f"{tick:.{digits}e}".replace("e-0", "e-") if tick else "0"
    return f"{tick:.6g}"
