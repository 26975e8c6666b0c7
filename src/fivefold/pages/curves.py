"""The curves of a run, as one plot: a panel for each thing measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fivefold.pages.drawing import canvas, curve, gaps, legend, styled, to_svg

POINTS = 600  # of a curve; of more, neighbours are averaged
_PANELS = (
    ("loss, nats per token", ("train/loss", "eval/loss")),
    ("norm of the gradient, before clipping", ("train/grad_norm",)),
    ("tokens per second", ("perf/tokens_per_second",)),
    ("seconds per step", ("perf/step_seconds",)),
    ("learning rate", ("train/learning_rate",)),
    ("peak memory of a rank, GiB", ("memory/peak_gib",)),
    ("TFLOP/s per device", ("perf/tflops_per_device",)),
    ("model FLOPs utilisation, %", ("perf/mfu_pct",)),
    ("waited for data, % of a step", ("perf/data_wait_pct",)),
)
_LEFT_OUT = ("step", "train/tokens_seen", "train/skipped_steps", "perf/tokens_per_second_per_device")

Curve = list[tuple[float, float]]  # (step, value)


@dataclass(frozen=True)
class Panel:
    """What is drawn in one place: curves by name."""

    title: str
    curves: Mapping[str, Curve]


def panels(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Of `metrics.jsonl`: what is known by name first, then everything else that was measured."""
    known = {name for _, names in _PANELS for name in names}
    others = dict.fromkeys(name for row in rows for name in row if name not in (*known, *_LEFT_OUT))
    found = []
    for title, names in (*_PANELS, *((name, (name,)) for name in others)):
        curves = {name: values for name in names if (values := _curve(rows, name))}
        if curves:
            found.append(Panel(title, curves))
    return found


def _curve(rows: Sequence[Mapping[str, Any]], name: str) -> Curve:
    """Its numbers; at most `POINTS`, each the mean of neighbours."""
    values = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
    size = -(-len(values) // POINTS) or 1
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    return [(fmean(step for step, _ in group), fmean(value for _, value in group)) for group in groups]


@styled
def draw(found: Sequence[Panel]) -> str:
    """Two panels in a row, above one axis of steps."""
    rows = math.ceil(len(found) / 2)
    figure = canvas(0.5 + 1.75 * rows)
    grid = figure.subplots(rows, 2, squeeze=False).flatten()
    for axes, panel in zip(grid, found, strict=False):
        for number, (name, points) in enumerate(panel.curves.items()):
            xs, ys = [x for x, _ in points], gaps([y for _, y in points])
            curve(axes, xs, ys, number, name if len(panel.curves) > 1 else "_", marker=2.5 if len(points) < 60 else 0.0)
        axes.set_title(panel.title, loc="left", fontsize=9)
        axes.grid(axis="y")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xmargin(0.02)
    for axes in grid[len(found) :]:
        axes.set_visible(False)
    for axes in grid[max(0, len(found) - 2) : len(found)]:
        axes.set_xlabel("step")
    legend(figure, grid)
    return to_svg(figure, "curves")
