"""Plots as inline SVG: they follow the page's light or dark colours (`--ink`, `--series-0` ...) and load nothing. A
figure is as wide as the page and consists of `Axes`, boxes in pixels with a scale on each side."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from fivefold.core.units import human

WIDTH, LEFT = 1056, 44  # pixels: width of the page, and of the labels to the left of an axis
SERIES = 7  # colours, which repeat with other dashes
CHARACTER, LINE = 6.4, 18.0  # pixels: of a letter, from one line of the legend to the next
EXTREMES = 1e-100, 1e100  # limits of a logarithmic axis
_DASHES = ("", "6 3", "2 2", "8 3 2 3")
_MARKERS = (  # around the current point: a dot, a square, a diamond, triangles up and down, a plus, a bow
    "m-2.6 0a2.6 2.6 0 1 0 5.2 0a2.6 2.6 0 1 0-5.2 0z", "m-2.3-2.3h4.6v4.6h-4.6z", "m0-3.4 3.4 3.4-3.4 3.4-3.4-3.4z",
    "m0-3 3 5.2h-6z", "m0 3 3-5.2h-6z", "m-1-3h2v2h2v2h-2v2h-2v-2h-2v-2h2z", "m-2.8-2.8v5.6l5.6-5.6v5.6z",
)  # fmt: skip
_RING = "m-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z"


class LogScale:
    """A logarithmic axis for errors of any size: its lowest line is zero, its highest stands for non-finite values."""

    def __init__(self, values: Iterable[float]) -> None:
        listed = [_size(value) for value in values]
        sizes = [size for size in listed if 0 < size < math.inf]
        self._has_zero, self._has_infinite = 0 in listed, math.inf in listed
        low, high = (min(sizes), max(sizes)) if sizes else (1e-18, 1e-17)
        self._low, self._high = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1

    def place(self, value: float) -> float:
        """The position, as a value of the axis, at which `value` is drawn."""
        return min(_size(value), 10.0**self._high) or 10.0**self._low

    def part(self, value: float) -> float:
        """Position of `value` on the axis, from 0 to 1."""
        return (math.log10(self.place(value)) - self._low + 0.3) / (self._high - self._low + 0.6)

    def ticks(self, count: int) -> dict[float, str]:
        """About `count` powers of ten, and the two extremes if a value is there."""
        step = max(1, -(-(self._high - self._low) // count))
        ticks = {10.0**decade: f"1e{decade}" for decade in range(self._low + 1, self._high, step)}
        ticks |= {0.0: "0"} if self._has_zero else {}
        return ticks | ({math.inf: "∞"} if self._has_infinite else {})


def _size(value: float) -> float:
    """Magnitude of a value; those beyond the limits of an axis become zero or infinite."""
    size = abs(value)
    return 0.0 if size < EXTREMES[0] else size if size < EXTREMES[1] else math.inf


@dataclass(frozen=True)
class Linear:
    """An axis from `low` to `high`."""

    low: float
    high: float

    def part(self, value: float) -> float:
        """Position of `value` on the axis, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


@dataclass
class Axes:
    """A box in pixels; drawings keep their order. `y` grows upwards."""

    left: float
    top: float
    width: float
    height: float
    x: Linear
    y: Linear | LogScale
    drawn: list[Markup] = field(default_factory=list)

    def curve(self, xs: Sequence[float], ys: Sequence[float], number: int, *, line: float = 1.4) -> None:
        """Draw series `number`: a line with markers; `line` is its width, 0 for markers alone. Values that the axis
        cannot hold leave a gap."""
        _, colour, dash = entry("", number)
        if line:
            self.line(xs, ys, colour, width=line, dash=dash)
        marks = "".join(f"M{place}{_MARKERS[number % SERIES]}" for place in self.places(xs, ys) if place)
        self.drawn.append(Markup('<path fill="{}" d="{}"/>').format(colour, marks))

    def line(self, xs: Sequence[float], ys: Sequence[float], colour: str, *, width: float = 1, dash: str = "") -> None:
        """Draw a line from point to point."""
        path, before = "", ""
        for place in self.places(xs, ys):
            path += f"{'L' if before else 'M'}{place}" if place else ""
            before = place
        self.drawn.append(
            Markup('<path fill="none" stroke="{}" stroke-width="{:g}" stroke-dasharray="{}" d="{}"/>').format(
                colour, width, dash, path
            )
        )

    def rings(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        """Draw rings around wrong points."""
        path = "".join(f"M{place}{_RING}" for place in self.places(xs, ys))
        self.drawn.append(Markup('<path fill="none" stroke="var(--wrong)" stroke-width="1.8" d="{}"/>').format(path))

    def band(self, first: float, last: float) -> None:
        """Tint the background from `first` to `last`, below everything drawn before."""
        left, right = self.x_at(first), self.x_at(last)
        self.drawn.insert(
            0,
            Markup('<rect x="{:.1f}" y="{}" width="{:.1f}" height="{}" fill="var(--band)"/>').format(
                left, self.top, right - left, self.height
            ),
        )

    def title(self, text: str, *, bold: bool = False) -> None:
        """Write a title above the box."""
        self.drawn.append(text_at(self.left, self.top - 7, text, more=' font-weight="700"' if bold else ""))

    def label_x(self, ticks: Mapping[float, str], name: str = "", *, upright: bool = False) -> None:
        """Write labels under the box, and the name of the axis; `upright`: long labels, which read upwards."""
        base = self.top + self.height
        for x, text in ticks.items():
            at = self.x_at(x)
            turn = f' text-anchor="end" transform="rotate(-90 {at + 3.5:.1f} {base + 6})"'
            where = (at + 3.5, base + 6) if upright else (at, base + 15)
            self.drawn.append(text_at(*where, text, more=turn if upright else ' text-anchor="middle"'))
        middle = self.left + self.width / 2
        self.drawn.append(text_at(middle, base + 31, name, more=' text-anchor="middle"') if name else Markup())

    def label_y(self, ticks: Mapping[float, str]) -> None:
        """Write labels to the left, each with a line across."""
        for y, text in ticks.items():
            at = self.y_at(y)
            self.drawn.insert(0, Markup('<path stroke="var(--grid)" stroke-width=".7" d="M{} {:.1f}h{}"/>').format(
                self.left, at, self.width))  # fmt: skip
            self.drawn.append(text_at(self.left - 6, at + 3.5, text, more=' text-anchor="end"'))

    def places(self, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
        """`x y` of each point in pixels; "" if it is off the axis."""
        pixels = [(self.x_at(x), self.y_at(y)) for x, y in zip(xs, ys, strict=True)]
        return [f"{x:.1f} {y:.1f}" if math.isfinite(y) else "" for x, y in pixels]

    def x_at(self, value: float) -> float:
        """Pixel position of a value of the lower axis."""
        return self.left + self.x.part(value) * self.width

    def y_at(self, value: float) -> float:
        """Pixel position of a value of the left axis."""
        return self.top + (1 - self.y.part(value)) * self.height


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


def text_at(x: float, y: float, text: str, *, more: str = "") -> Markup:
    """A text that starts at a position; `more`: further attributes."""
    return Markup(f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>')


def entry(name: str, number: int) -> tuple[str, str, str]:
    """Legend entry of series `number`: its name, colour and dashes."""
    return name, f"var(--series-{number % SERIES})", _DASHES[number % len(_DASHES)]


def svg(axes: Iterable[Axes], height: float, legend: Sequence[tuple[str, str, str]]) -> str:
    """Build the figure. `legend`: name, colour and dashes of each entry; they stand above all axes."""
    drawn, x, y = Markup(), 0.0, LINE / 2
    for name, colour, dash in legend:
        width = 44 + CHARACTER * len(name)
        x, y = (x, y) if x + width < WIDTH or not x else (0.0, y + LINE)
        drawn += Markup('<path stroke="{}" stroke-width="2.4" stroke-dasharray="{}" d="M{:.1f} {}h22"/>').format(
            colour, dash, x, y
        )
        drawn += text_at(x + 28, y + 4, name)
        x += width
    top = y + LINE if legend else 0.0
    body = Markup().join(part for axis in axes for part in axis.drawn)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height + top:g}" font-size="11">{drawn}'
        f'<g transform="translate(0 {top:g})">{body}</g></svg>'
    )
