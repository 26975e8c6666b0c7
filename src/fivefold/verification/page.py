"""The page of a proof: one self-contained HTML file. This module chooses its contents; `page.html.j2` lays them out,
and `plots` draws."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from fivefold.report.render import render, write
from fivefold.report.slices import SliceMap, slice_map
from fivefold.verification import plots
from fivefold.verification.report import Group, VerifyReport, groups
from fivefold.verification.results import CONTROL, WORDS, LayoutResult, Row, number

MODULES = (WORDS["output"], WORDS["backward"], WORDS["load"])
PARAMETERS = tuple(word for word in WORDS.values() if word not in MODULES)
GRADIENTS = (WORDS["raw"], WORDS["gradient"], WORDS["clipped"])
MEAN_ERROR, OTHER_TOKENS = "logits, mean error of top ", "tokens, other top "
Named = Mapping[str, Mapping[str, Row]]  # kind -> module or parameter -> its comparison
# Kinds, the tolerance of each, and for each name a comparison per kind, None if there is none.
Matrix = tuple[Sequence[str], Sequence[str], Sequence[tuple[str, Sequence[Row | None]]]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """The contents of the page for one layout."""

    found: LayoutResult
    says: str
    groups: Sequence[Group]
    named: Named
    numbers: Sequence[Row]
    matrices: Mapping[str, Matrix]
    slices: SliceMap | None


def write_page(report: VerifyReport, path: str) -> None:
    """Write `report` as one HTML file to `path`; a missing folder is made."""
    write(page(report), Path(path), instead="name another file: --html FILE")


def page(report: VerifyReport) -> str:
    """The HTML of `report`."""
    sections = [section(each) for each in report.found]
    cut = cut_of(report.subject)
    steps = max((len(each) for each in report.losses.values()), default=0)
    facts = {
        "model": report.subject, "precision": ", ".join(report.losses), "comparisons": f"{len(report.rows):,}",
        "steps trained": str(steps or ""),
    }  # fmt: skip
    return render(
        "page.html.j2", "fivefold.verification", [each.slices for each in sections if each.slices], {"number": number},
        report=report, sections=sections, headline=headline(report.found, cut),
        facts={name: value for name, value in facts.items() if value},
        not_covered=list(filter(None, _not_covered(report, cut, steps))), plots=_plots(report, sections),
    )  # fmt: skip


def cut_of(subject: str) -> str:
    """The cuts of a proof's model, from `ProofCase.describe`: `layers 2 of 32`; "" for a whole model."""
    _, _, what = subject.partition(";")[0].partition(" ")
    return "" if what in ("whole", "nothing") else what


def headline(found: Sequence[LayoutResult], cut: str = "") -> str:
    """The verdict over all layouts. `cut`: see `cut_of`."""
    scope = f", on a stand-in with {cut}" if cut else ""
    proved, wrong = (sum(each.verdict == verdict for each in found) for verdict in ("PROVED", "WRONG"))
    of = f"of {len(found)} layout{'s' * (len(found) > 1)}"
    if not found:
        return "Nothing was proved"
    if proved == len(found):
        who = "The layout computes" if proved == 1 else f"All {proved} layouts compute"
        return f"{who} what one process computes{scope}"
    if wrong:
        return f"{wrong} {of} computed something else than one process{scope}"
    return f"{len(found) - proved} {of} did not run"


def _not_covered(report: VerifyReport, cut: str, steps: int) -> tuple[str, ...]:
    """Claims that a reader may take to be proved but are not; "" for those that do not apply."""
    refused = ", ".join(each.layout for each in report.found if each.verdict == "NOT RUN")
    coarse = "; ".join(f"{each.layout}: {', '.join(each.not_told)}" for each in report.found if each.not_told)
    proved = ", ".join(report.losses)
    return (
        cut and f"The model at its own size: the stand-in has {cut}, the same class, and weights of its own.",
        refused and f"Layouts that did not run: {refused}.",
        coarse and f"What {proved} is too coarse to tell, by layout: {coarse}.",
        proved and f"Other precisions than {proved}: --precision run takes the run file's.",
        f"More than {steps} steps, other layouts than these, and other options of the run file." if steps else "",
        "Your data: the documents are drawn at random, of lengths that are hard to pack and to split.",
        "Speed and memory; and kernels of another device than the one this proof ran on.",
    )


# ---- layout by layout ------------------------------------------------------------------------------------------------


def section(found: LayoutResult) -> Section:
    """The section of one layout."""
    named = _by_name(found)
    kinds = {"Parameters": PARAMETERS, "Modules, in order of execution": MODULES}
    return Section(
        found=found, says=_says(found), groups=groups(found.rows), named=named,
        numbers=[row for row in found.rows if row.what not in WORDS.values()],
        matrices={title: _matrix(some) for title, own in kinds.items() if (some := _of_kinds(named, own))},
        slices=slice_map(found.holds, found.layout),
    )  # fmt: skip


def _by_name(found: LayoutResult) -> Named:
    """The comparisons of each existing kind, names in the model's order; unknown names come last."""
    order = list(found.holds) or [row.name for row in found.rows if row.what == WORDS["weight"]]
    place = {name: at for at, name in enumerate(order)}
    kinds = {kind: {row.name: row for row in found.rows if row.what == kind} for kind in WORDS.values()}
    return {kind: _sorted(rows, place) for kind, rows in kinds.items() if rows}


def _sorted(rows: Mapping[str, Row], place: Mapping[str, int]) -> dict[str, Row]:
    return {name: rows[name] for name in sorted(rows, key=lambda name: place.get(name, len(place)))}


def _matrix(named: Named) -> Matrix:
    names = dict.fromkeys(name for rows in named.values() for name in rows)
    allowed = [_range([row.tolerance for row in rows.values()]) for rows in named.values()]
    return list(named), allowed, [(name, [rows.get(name) for rows in named.values()]) for name in names]


def _range(values: Sequence[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} … {high}"


def _says(found: LayoutResult) -> str:
    """The sentence next to a verdict."""
    row = found.first_wrong
    if found.verdict == "NOT RUN":
        why = found.refused or "nothing came back from it"
        return f"{why}; before that, it {row.difference}" if row else why
    if row:
        return row.difference
    measured = [each for each in found.rows if each.tolerance and each.what != CONTROL]
    if not any(each.error for each in measured):
        return "no difference at all"
    nearest = max(measured, key=lambda each: each.error / each.tolerance)
    of = f" of {nearest.where}" if nearest.where else ""
    return f"closest to its limit: {nearest.what}{of}, {number(nearest.error)} of {number(nearest.tolerance)} allowed"


# ---- plots -----------------------------------------------------------------------------------------------------------


def _plots(report: VerifyReport, sections: Iterable[Section]) -> dict[str, Markup]:
    """The plots that have data."""
    errors = {each.layout: _by_k(each, MEAN_ERROR) for each in report.found}
    others = {each.layout: _by_k(each, OTHER_TOKENS) for each in report.found}
    matches = {name: {k: 100 * (1 - row.error) for k, row in own.items()} for name, own in others.items()}
    curves = {each.layout: each.losses for each in report.found}
    references = {each.layout: report.losses.get(each.precision, []) for each in report.found}
    gradients, modules = (
        {each.found.layout: series for each in sections if (series := _of_kinds(each.named, kinds))}
        for kinds in (GRADIENTS, MODULES)
    )
    drawn = {
        "accuracy": plots.accuracy(errors, matches) if any(errors.values()) else "",
        "gradients": plots.by_name(gradients) if gradients else "",
        "modules": plots.by_name(modules) if modules else "",
        "losses": plots.losses(curves, references) if any(curves.values()) else "",
    }
    return {name: Markup(svg) for name, svg in drawn.items() if svg}


def _of_kinds(named: Named, kinds: Iterable[str]) -> Named:
    return {kind: named[kind] for kind in kinds if kind in named}


def _by_k(found: LayoutResult, prefix: str) -> dict[str, Row]:
    return {row.what.removeprefix(prefix): row for row in found.rows if row.what.startswith(prefix)}
