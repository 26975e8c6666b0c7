"""The page of a proof: one HTML file that needs nothing else. What it shows is chosen here; `page.html.j2` lays it out,
`plots` draws."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fivefold.report.render import render, write
from fivefold.verification import plots
from fivefold.verification.plots import Point
from fivefold.verification.report import VerifyReport, number
from fivefold.verification.results import WORDS, LayoutResult
from fivefold.verification.sections import MODULES, in_model_order, name_of, section, verdict

GRADIENTS = (WORDS["raw"], WORDS["gradient"], WORDS["clipped"])
MEAN_ERROR, OTHER_TOKENS = "logits, mean error of top ", "tokens, other top "


def write_page(report: VerifyReport, path: str) -> None:
    """Write `report` as one HTML file to `path`, whose folder is made where it is missing."""
    write(page(report), Path(path), instead="name another file: --html FILE")


def page(report: VerifyReport) -> str:
    """The HTML of `report`."""
    sections = [section(each, index) for index, each in enumerate(report.found)]
    return render(
        "page.html.j2", "fivefold.verification", [each.slices for each in sections if each.slices], {"number": number},
        report=report, sections=sections, headline=headline(report.found, scope(report.subject)), facts=_facts(report),
        not_covered=not_covered(report), plots=_plots(report),
    )  # fmt: skip


def scope(subject: str) -> str:
    """Of which model a proof speaks, by `ProofCase.describe`: `on a stand-in with layers 2 of 32`; "" of the whole."""
    _, _, what = subject.partition(";")[0].partition(" ")
    return "" if what in ("", "whole", "nothing") else f", on a stand-in with {what}"


def not_covered(report: VerifyReport) -> list[str]:
    """What a reader may take to be proved, and is not."""
    cut = scope(report.subject).removeprefix(", on a stand-in with ")
    refused = [each.layout for each in report.found if each.refused or not each.rows]
    coarse = [f"{each.layout}: {', '.join(each.not_told)}" for each in report.found if each.not_told]
    steps = max((len(each) for each in report.losses.values()), default=0)
    proved = ", ".join(report.losses)
    return [
        *(
            [f"The model at its own size: the stand-in has {cut}, the same class, and weights of its own."]
            if cut
            else []
        ),
        *([f"Layouts that did not run: {', '.join(refused)}."] if refused else []),
        *([f"What {proved} is too coarse to tell, by layout: {'; '.join(coarse)}."] if coarse else []),
        *([f"Other precisions than {proved}: --precision run takes the run file's."] if proved else []),
        *([f"More than {steps} steps, other layouts than these, and other options of the run file."] if steps else []),
        "Your data: the documents are drawn at random, of lengths that are hard to pack and to split.",
        "Speed and memory; and kernels of another device than the one this proof ran on.",
    ]


def headline(found: Sequence[LayoutResult], scope: str = "") -> str:
    """The verdict over all layouts. `scope`: on what, unless it is the whole model."""
    proved, wrong = sum(each.ok for each in found), sum(verdict(each) == "WRONG" for each in found)
    if not found:
        return "Nothing was proved"
    if proved == len(found):
        who = "The layout computes" if proved == 1 else f"All {proved} layouts compute"
        return f"{who} what one process computes{scope}"
    if wrong:
        return f"{wrong} of {len(found)} layout{'s' * (len(found) > 1)} computed something else than one process{scope}"
    return f"{len(found) - proved} of {len(found)} layout{'s' * (len(found) > 1)} did not run"


def _facts(report: VerifyReport) -> dict[str, str]:
    comparisons = sum(len(each.rows) for each in report.found)
    steps = max((len(each) for each in report.losses.values()), default=0)
    facts = {"model": report.subject, "precision": ", ".join(report.losses), "comparisons": f"{comparisons:,}"}
    facts |= {"steps trained": str(steps) if steps else ""}
    return {name: value for name, value in facts.items() if value}


def _plots(report: VerifyReport) -> dict[str, Markup]:
    """The plots for which there is anything to draw."""
    errors = {each.layout: _by_k(each, MEAN_ERROR) for each in report.found}
    others = {each.layout: _by_k(each, OTHER_TOKENS) for each in report.found}
    matches = {name: {k: 100 * (1 - point.error) for k, point in own.items()} for name, own in others.items()}
    gradients = {each.layout: _series(each, GRADIENTS) for each in report.found}
    modules = {each.layout: _series(each, MODULES) for each in report.found}
    curves = {each.layout: each.losses for each in report.found}
    references = {each.layout: report.losses.get(each.precision, []) for each in report.found}
    drawn = {
        "accuracy": any(errors.values()) and plots.accuracy(errors, matches),
        "gradients": _some(gradients) and plots.by_name(_some(gradients)),
        "modules": _some(modules) and plots.by_name(_some(modules)),
        "losses": any(curves.values()) and plots.losses(curves, references),
    }
    return {name: Markup(svg) for name, svg in drawn.items() if isinstance(svg, str)}


def _some(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _by_k(found: LayoutResult, prefix: str) -> dict[str, Point]:
    return {
        row.what.removeprefix(prefix): Point(row.error, row.tolerance, row.ok)
        for row in found.rows
        if row.what.startswith(prefix)
    }


def _series(found: LayoutResult, kinds: Iterable[str]) -> dict[str, dict[str, Point]]:
    """kind -> name -> its point, without kinds that were not compared."""
    series = {}
    for kind in kinds:
        points = {name_of(row): Point(row.error, row.tolerance, row.ok) for row in found.rows if row.what == kind}
        series[kind] = {name: points[name] for name in in_model_order(points, found)}
    return _some(series)
