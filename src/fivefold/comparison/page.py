"""The page of a comparison: one self-contained HTML file. `page.html.j2` lays it out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from fivefold.comparison.logs import Step
from fivefold.comparison.measure import Difference, Measured, Spread
from fivefold.comparison.report import CompareReport, change, loss, number, on, speed
from fivefold.report import curves
from fivefold.report.render import render, write

SCRIPT = Path(curves.__file__).with_name("curves.js")
Value = Callable[[Step], float | None]
_DRAWN: Mapping[str, Value] = {
    "training loss": lambda step: step.loss,
    "eval loss": lambda step: step.eval_loss,
    "tokens per second per device": lambda step: step.speed,
}


def write_page(report: CompareReport, path: str) -> None:
    """Write `report` as one HTML file to `path`, and make its folder if it is missing."""
    write(page(report), Path(path), instead="name another file: --html FILE")


def page(report: CompareReport) -> str:
    """The HTML of `report`."""
    found = panels(report.runs)
    longest = max((len(run.steps) for run in report.runs), default=0)
    filters: dict[str, Callable[..., str]] = {
        "on": on, "speed": speed, "change": change, "range": between, "loss": loss, "number": number
    }  # fmt: skip
    return render(
        "page.html.j2", "fivefold.comparison", [], filters, script=SCRIPT if found else None, report=report,
        headline=headline(report), curves=curves.draw(found, [], averaged=longest > curves.POINTS) if found else None,
    )  # fmt: skip


def headline(report: CompareReport) -> str:
    """The result, for two configurations; else the names or number of those compared."""
    names = list(dict.fromkeys(row.configuration for row in report.rows))
    last = next((row for row in reversed(report.rows) if row.configuration != report.base and row.faster_pct), None)
    if len(names) != 2 or last is None or last.faster_pct is None:
        return f"{len(names)} configurations" if len(names) > 1 else "".join(names)
    percent, where = last.faster_pct.percent, on(last.devices).capitalize()
    if last.faster_pct.measured is False:
        return f"{where}, no difference in speed measured between {report.base} and {last.configuration}"
    how = "faster" if percent > 0 else "slower"
    return f"{where}, {last.configuration} is {abs(percent):.1f} % {how} than {report.base}"


def between(value: Spread | Difference | None, form: str) -> str:
    """`1.2 to 1.5`: from repeat to repeat; "" for one repeat."""
    return f"{number(value.low, form)} to {number(value.high, form)}" if value and value.count > 1 else ""


def panels(runs: Sequence[Measured]) -> dict[str, curves.Curves]:
    """Curves of all configurations in one plot, for each number of devices; means over repeats."""
    found: dict[str, curves.Curves] = {}
    for devices in dict.fromkeys(run.devices for run in runs):
        for title, value in _DRAWN.items():
            of_all = {}
            for name in dict.fromkeys(run.configuration for run in runs if run.devices == devices):
                repeats = [run.steps for run in runs if (run.configuration, run.devices) == (name, devices)]
                if curve := [*_curve(repeats, value)]:
                    of_all[name] = curves.thinned(curve)
            if of_all:
                found[f"{title}, {on(devices)}"] = of_all
    return found


def _curve(repeats: Sequence[Sequence[Step]], value: Value) -> Iterator[curves.Point]:
    """Points at the steps that every repeat has."""
    by_step = [{step.step: step for step in steps if value(step) is not None} for steps in repeats]
    for at in sorted(set(by_step[0]).intersection(*by_step[1:])):
        tokens = [steps[at].tokens for steps in by_step]
        known = [each for each in tokens if each is not None]
        values = [each for steps in by_step if (each := value(steps[at])) is not None]
        yield curves.Point(at, fmean(values), fmean(known) if len(known) == len(tokens) else None)
