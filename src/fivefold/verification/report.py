"""The report of a proof, for people and for programs: JSON, and the tables, plots and maps that say what its
comparisons showed.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from fivefold.core.units import many
from fivefold.report import curves
from fivefold.report.figures import WIDTH, Box, Figure
from fivefold.report.findings import Cell, Column, Facts, Findings, Fold, Notes, On, Plot, Report, Row, Section, Table
from fivefold.report.slices import EXPLAINED, in_layer, slice_map
from fivefold.verification.proof_case import ProofCase
from fivefold.verification.results import (
    CONTROL,
    SUBJECT,
    WORDS,
    ComparisonRow,
    LayoutResult,
    VerifyRequest,
    number,
    read_found,
    reference_file,
)

HUGE = 1e308  # an infinite error: JSON has no infinities


@dataclass(frozen=True)
class LayoutRow(ComparisonRow):
    """A row of a proof with its layout."""

    layout: str = ""


@dataclass(frozen=True, kw_only=True)
class VerifyReport(Report[LayoutRow]):
    """The report of a proof. `.rows`: those of all layouts in sequence; `.found`: the results by layout."""

    found: tuple[LayoutResult, ...] = ()
    subject: str = ""
    losses: Mapping[str, list[float]] = field(default_factory=dict)  # precision -> the reference's, step by step
    shows_all: bool = False  # a terminal shows each kind of comparison of each layout

    def to_json(self) -> str:
        """`{"ok", "layouts": [{"layout", "ok", "rows": [{"what", "error", "tolerance", "ok", "where"}]}]}`.

        Each layout also has `not_run`, why it did not run, else null; `not_told`, comparisons for which its precision
        is too coarse; `not_shown`, modules whose values on a rank could not be located."""
        layouts = [
            {
                "layout": result.layout,
                "ok": result.ok,
                "not_run": result.refused or None,
                "not_told": result.not_told,
                "not_shown": result.not_shown,
                "seconds": round(result.seconds, 3),
                "rows": [asdict(row) | {"error": min(row.error, HUGE)} for row in result.rows],
            }
            for result in self.found
        ]
        return json.dumps({"ok": self.ok, "subject": self.subject, "layouts": layouts}, indent=1, ensure_ascii=False)

    def findings(self) -> Findings:
        """The verdict and its sections."""
        parts = tuple(sections(self.found, self.subject, self.losses, shows_all=self.shows_all))
        title = headline(self.found, cut_of(self.subject))
        return Findings(command="fivefold verify", headline=title, ok=self.ok, sections=parts)


def report_of(found: Sequence[LayoutResult], subject: str, losses: Mapping[str, list[float]]) -> VerifyReport:
    """Make the report of the results `found`."""
    rows = tuple(LayoutRow(**asdict(row), layout=result.layout) for result in found for row in result.rows)
    why = [f"{result.layout}: {result.why}" for result in found if not result.ok]
    return VerifyReport(
        title="fivefold verify", rows=rows, ok=bool(found) and not why, closing="\n".join(why),
        found=tuple(found), subject=subject, losses=losses,
    )  # fmt: skip


def report_on(request: VerifyRequest, ran: VerifyRequest, size: int) -> VerifyReport:
    """The report of the layouts of `ran`; the others of `request` are listed as not for a world of this size."""
    found = {
        name: LayoutResult(name, refused=f"it is for {layout.world} ranks, and this world has {size}")
        for name, layout in request.parsed.items()
    } | read_found(ran)
    one_of_each = {layout.numerics: layout for layout in ran.parsed.values()}
    about = {
        name: json.loads(reference_file(ran, layout).with_suffix(".json").read_text())
        for name, layout in one_of_each.items()
    }
    losses = {name: facts["losses"] for name, facts in about.items()}
    subject = ProofCase.load(ran.folder / SUBJECT).describe() if ran.layouts else ""
    return report_of(list(found.values()), subject, losses)


# Lines on a terminal without `--rows`: layouts, reasons, kinds that differ. NAME: columns of a layout.
LAYOUTS, REASONS, KINDS, NAME = 6, 3, 3, 26
NOT_SHOWN = "Modules not looked at, for the layout does not say which part of them a rank computes:"
_TOP = re.compile(r" top (\d+|all)$")
MODULES = (WORDS["output"], WORDS["backward"], WORDS["load"])
PARAMETERS = tuple(word for word in WORDS.values() if word not in MODULES)
GRADIENTS = (WORDS["raw"], WORDS["gradient"], WORDS["clipped"])
MEAN_ERROR, OTHER_TOKENS = "logits, mean error of top ", "tokens, other top "
Named = Mapping[str, Mapping[str, ComparisonRow]]  # kind -> module or parameter -> its comparison


VERDICTS = {
    "PROVED": ("✓", "good", "chip proved"),
    "WRONG": ("✕", "wrong", "chip wrong"),
    "NOT RUN": ("–", "wrong", "chip not-run"),
}
RUN = (
    "Every layout was run through the code that trains, and compared piece by piece with the reference: one process, "
    "the model's unmodified transformers class, each document a sequence of its own."
)
ERRORS = (
    "Errors are relative to the norm of what is compared, unless it says otherwise. Each kind is shown by the "
    "comparison nearest to what is allowed, or the first that fails."
)
LOGITS = (
    "Over every real token: how far the logits of the reference's k likeliest tokens are off, and at how many "
    "positions both have the same k likeliest tokens."
)
IN_ORDER = (
    "What each module computes in the forward pass, and the gradient of the loss with respect to that. The first red "
    "box is where a layout goes wrong. Hover over a box for its module and its error."
)
BY_PARAMETER = (
    "What all ranks computed, added up before anything was reduced (raw); what the layout reduced it to; and that "
    "after clipping. Hover over a box for its parameter and its error."
)
BY_STEP = "The curves lie on one another where a layout is right; what is between them is beside them."


def sections(
    found: Sequence[LayoutResult], subject: str, losses: Mapping[str, list[float]], *, shows_all: bool = False
) -> Iterator[Section]:
    """Sections of a proof: on a terminal the verdict and what differs; on the page also every comparison by name,
    plots, and who holds what. `shows_all`: on a terminal also a table per layout."""
    yield Section([], on=On.TERMINAL)  # an empty line after those of progress
    yield from _for_terminal(found, cut_of(subject), shows_all)
    cut, steps = cut_of(subject), max(map(len, losses.values()), default=0)
    rows = [result.rows for result in found]
    facts = {
        "model": subject, "precision": ", ".join(losses), "comparisons": f"{sum(map(len, rows)):,}",
        "steps trained": str(steps or ""),
    }  # fmt: skip
    facts = {name: value for name, value in facts.items() if value}
    yield Section([Notes([RUN]), Facts(facts), _verdicts(found)], on=On.PAGE)
    not_covered = list(filter(None, _not_covered(found, cut, losses, steps)))
    yield Section([Notes(not_covered, is_list=True)], "What was not covered", On.PAGE)
    folds = [_fold(number, result) for number, result in enumerate(found)]
    yield Section([Notes([ERRORS], "soft"), *folds], "Layout by layout", On.PAGE)
    yield from _plots(found, losses)
    maps = [(result.layout, map_) for result in found if (map_ := slice_map(result.holds, result.layout))]
    if maps:
        shards = [
            Fold([Cell(name, "head"), Cell(many(len(map_.shares), "rank"), "soft")], [Plot(map_)], is_open=not number)
            for number, (name, map_) in enumerate(maps)
        ]
        yield Section([Notes([EXPLAINED], "soft"), *shards], "Parameter sharding", On.PAGE)


def cut_of(subject: str) -> str:
    """The cuts of a proof's model, from `ProofCase.describe`: `layers 2 of 32`; "" for a whole model."""
    _, _, what = subject.partition(";")[0].partition(" ")
    return "" if what in ("whole", "nothing") else what


def headline(found: Sequence[LayoutResult], cut: str = "", scope: str = "") -> str:
    """The verdict over all layouts. `cut`: see `cut_of`; `scope`: words in its place."""
    scope = scope or (f", on a stand-in with {cut}" if cut else "")
    proved, wrong = (sum(result.verdict == verdict for result in found) for verdict in ("PROVED", "WRONG"))
    of = f"of {len(found)} layout{'s' * (len(found) > 1)}"
    if not found:
        return "Nothing was proved"
    if proved == len(found):
        who = {1: "The layout matches", 2: "Both layouts match"}.get(proved, f"All {proved} layouts match")
        return f"{who} one process{scope}"
    if wrong:
        return f"{wrong} {of} computed something else than one process{scope}"
    return f"{len(found) - proved} {of} did not run"


def _not_covered(
    found: Sequence[LayoutResult], cut: str, losses: Mapping[str, list[float]], steps: int
) -> tuple[str, ...]:
    """Claims that a reader may take to be proved but are not; "" for those that do not apply."""
    refused = ", ".join(result.layout for result in found if result.verdict == "NOT RUN")
    coarse = "; ".join(f"{result.layout}: {', '.join(result.not_told)}" for result in found if result.not_told)
    proved = ", ".join(losses)
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


def _chip(found: LayoutResult) -> Cell:
    mark, _, chip = VERDICTS[found.verdict]
    return Cell(f"{mark} {found.verdict}", chip)


def _verdicts(found: Sequence[LayoutResult]) -> Table:
    columns = [
        Column("layout"),
        Column("verdict"),
        Column("why", "says"),
        Column("comparisons", "n"),
        Column("seconds", "n"),
    ]
    rows = [
        Row([
            Cell(result.layout, link=f"layout-{number}"), _chip(result),
            Cell(_says(result), "bad" if result.verdict == "WRONG" else ""), Cell(str(len(result.rows) or "")),
            Cell(f"{result.seconds:.1f}" if result.seconds else ""),
        ])
        for number, result in enumerate(found)
    ]  # fmt: skip
    return Table(columns, rows, look="verdicts stack")


def _for_terminal(found: Sequence[LayoutResult], cut: str, shows_all: bool) -> Iterator[Section]:
    """The verdict, a line for each layout, and what failed: about 20 lines, or with `shows_all` everything."""
    is_proved = bool(found) and all(result.ok for result in found)
    verdict = [
        Cell("PROVED" if is_proved else "NOT PROVED", "good" if is_proved else "wrong"),
        Cell(headline(found, "", " on a stand-in" * bool(cut))),
    ]
    worst_first = sorted(found, key=lambda result: list(VERDICTS).index(result.verdict) or len(VERDICTS))
    shown = found if shows_all or len(found) <= LAYOUTS else worst_first[:LAYOUTS]
    failed = [result for result in worst_first if not result.ok]
    told = failed if shows_all else failed[:REASONS]
    more = len(found) - len(shown)
    notes = [f"and {many(more, 'more layout')}: --rows"] * bool(more)
    notes += [f"{result.layout}: {result.why}" for result in told]
    parts: list[Table | Notes] = [_layouts(shown), Notes(notes, indent=" ")]
    if shows_all:
        yield Section(parts, on=On.TERMINAL, line=verdict)
        yield from map(_every_kind, found)
        return
    if len(failed) == 1 and failed[0].rows:
        parts.append(_differing(failed[0]))
    hint = "every kind of comparison: --rows; every comparison by name: --html FILE"
    yield Section([*parts, Notes([hint], "soft", indent=" ")], on=On.TERMINAL, line=verdict)


def _layouts(found: Sequence[LayoutResult]) -> Table:
    """A line for each layout: the comparison nearest to its limit, or the first that failed."""
    columns = [
        Column("layout", folds=".+", most=NAME), Column("verdict", is_whole=True), Column("compared", "n"),
        Column("nearest to limit\nor first to fail", is_whole=True), Column("error", "n"),
        Column("allowed", "n"), Column("s", "n"),
    ]  # fmt: skip
    rows = []
    for result in found:
        row = _decisive(result)
        texts = (row.what, number(row.error), number(row.tolerance)) if row else ("", "", "")
        seconds = f"{result.seconds:.1f}" if result.seconds else ""
        cells = [Cell(text) for text in (str(len(result.rows) or ""), *texts, seconds)]
        rows.append(Row([Cell(result.layout), Cell(result.verdict, VERDICTS[result.verdict][1]), *cells]))
    return Table(columns, rows, is_narrow=True)


def _differing(found: LayoutResult) -> Table:
    """The first kinds that failed, in the order in which a step computes."""
    columns = [Column("then differ", is_whole=True), Column("wrong", "n"), Column("error", "n"), Column("allowed", "n")]
    wrong = [group for group in groups(found.rows) if group.wrong]
    cells = [
        (group.what, f"{group.wrong} of {group.count}", number(group.row.error), number(group.row.tolerance))
        for group in wrong[:KINDS]
    ]
    rows: list[Row | str] = [Row([Cell(text) for text in texts], "wrong") for texts in cells]
    if len(wrong) > KINDS:
        rows.append(Row([Cell(f"and {len(wrong) - KINDS} more"), Cell(""), Cell(""), Cell("")]))
    return Table(columns, rows)


def _every_kind(found: LayoutResult) -> Section:
    says = found.refused or f"{len(found.rows):,} comparisons  {found.seconds:.1f} s"
    line = [Cell(found.layout, "head"), Cell(found.verdict, VERDICTS[found.verdict][1]), Cell(says)]
    if found.verdict == "NOT RUN":
        return Section([], on=On.TERMINAL, line=line)
    coarse = [f"too coarse to tell: {', '.join(found.not_told)}"] * bool(found.not_told)
    unseen = [f"not looked at: {', '.join(found.not_shown)}"] * bool(found.not_shown)
    return Section([_kinds(found), Notes([*coarse, *unseen], "soft", indent=" ")], on=On.TERMINAL, line=line)


def _fold(number: int, found: LayoutResult) -> Fold:
    """A layout on the page: its kinds of comparison, and all of them by name."""
    says = many(len(found.rows), "comparison") if found.verdict == "PROVED" else _says(found)
    line = [Cell(found.layout, "head"), _chip(found), Cell(says, "soft")]
    name, is_open = f"layout-{number}", found.verdict == "WRONG"
    if not found.rows:
        return Fold(line, [Notes([f"Nothing was compared: {says}."])], name, is_open)
    named = _by_name(found)
    kinds = {"Parameters": PARAMETERS, "Modules, in order of execution": MODULES}
    tables = [_matrix(title, some) for title, own in kinds.items() if (some := _of_kinds(named, own))]
    if others := [row for row in found.rows if row.what not in WORDS.values()]:
        tables.append(_numbers(others))
    coarse = [f"Too coarse to tell in this precision: {', '.join(found.not_told)}."] * bool(found.not_told)
    unseen = [f"{NOT_SHOWN} {', '.join(found.not_shown)}."] * bool(found.not_shown)
    everything = Fold([Cell(f"All {many(len(found.rows), 'comparison')}, by name")], tables)
    return Fold(line, [_kinds(found), Notes([*coarse, *unseen], "soft"), everything], name, is_open)


def _kinds(found: LayoutResult) -> Table:
    columns = [
        Column("what", is_whole=True), Column("compared", "n"), Column("error", "n"), Column("allowed", "n"),
        Column("where", on=On.TERMINAL), Column("where", "name", on=On.PAGE),
    ]  # fmt: skip
    rows = []
    for group in groups(found.rows):
        row = group.row
        others = f" (and {group.wrong - 1} more)" if group.wrong > 1 else ""
        short = row.where if not row.ok or row.what == CONTROL else ""
        cells = [
            f"{'' if row.ok else '✕ '}{group.what}", str(group.count), number(row.error), number(row.tolerance),
            f"{short}{others}", f"{row.where if not row.ok or row.error else ''}{others}",
        ]  # fmt: skip
        rows.append(Row([Cell(text) for text in cells], "" if row.ok else "wrong"))
    return Table(columns, rows)


def _numbers(rows: Sequence[ComparisonRow]) -> Table:
    columns = [Column("what"), Column("error", "n"), Column("allowed", "n"), Column("where", "name")]
    cells = [[Cell(text) for text in (row.what, number(row.error), number(row.tolerance), row.where)] for row in rows]
    marked = [Row(texts, "" if row.ok else "wrong") for row, texts in zip(rows, cells, strict=True)]
    return Table(columns, marked, "Numbers and counts", look="")


def _by_name(found: LayoutResult) -> Named:
    """The comparisons of each existing kind, names in the model's order; unknown names come last."""
    order = list(found.holds) or [row.name for row in found.rows if row.what == WORDS["weight"]]
    place = {name: at for at, name in enumerate(order)}
    kinds = {kind: {row.name: row for row in found.rows if row.what == kind} for kind in WORDS.values()}
    return {kind: _sorted(rows, place) for kind, rows in kinds.items() if rows}


def _sorted(rows: Mapping[str, ComparisonRow], place: Mapping[str, int]) -> dict[str, ComparisonRow]:
    return {name: rows[name] for name in sorted(rows, key=lambda name: place.get(name, len(place)))}


def _matrix(title: str, named: Named) -> Table:
    """A row for each parameter or module, and a column for each kind of comparison."""
    allowed = [_range([row.tolerance for row in rows.values()]) for rows in named.values()]
    columns = [
        Column("name\nallowed", "name"),
        *(Column(f"{kind}\n{most}", "n") for kind, most in zip(named, allowed, strict=True)),
    ]
    names = dict.fromkeys(name for rows in named.values() for name in rows)
    rows = [Row([Cell(name), *(_error(rows.get(name)) for rows in named.values())]) for name in names]
    return Table(columns, rows, title, look="matrix")


def _error(row: ComparisonRow | None) -> Cell:
    if row is None:
        return Cell("–", "zero")
    if row.ok:
        return Cell(number(row.error), "" if row.error else "zero")
    return Cell(number(row.error), "wrong", hint=f"{row.where}; {number(row.tolerance)} allowed")


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
    if (nearest := _decisive(found)) is None:
        return "no difference at all"
    of = f" of {nearest.where}" if nearest.where else ""
    return f"closest to its limit: {nearest.what}{of}, {number(nearest.error)} of {number(nearest.tolerance)} allowed"


def _decisive(found: LayoutResult) -> ComparisonRow | None:
    """The first comparison that failed, else the one nearest to its limit; None if nothing differs at all."""
    measured = [row for row in found.rows if row.tolerance and row.error and row.what != CONTROL]
    return found.first_wrong or max(measured, key=lambda row: row.error / row.tolerance, default=None)


# ---- kinds of comparison ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparisonKind:
    """The rows of one kind: how many there are, how many are wrong, and the most important one."""

    what: str
    count: int
    wrong: int
    row: ComparisonRow


def groups(rows: Iterable[ComparisonRow]) -> list[ComparisonKind]:
    """Group rows by `what`, in order of first appearance; rows for different top k are one kind."""
    by_kind: dict[str, list[ComparisonRow]] = {}
    for row in rows:
        by_kind.setdefault(_TOP.sub(" top k", row.what), []).append(row)
    return [
        ComparisonKind(what, len(own), sum(not row.ok for row in own), _worst(own)) for what, own in by_kind.items()
    ]


def _worst(rows: Sequence[ComparisonRow]) -> ComparisonRow:
    """The first row that is not ok; else the one closest to its tolerance."""
    return next((row for row in rows if not row.ok), max(rows, key=lambda row: row.error / (row.tolerance or 1.0)))


# ---- plots -----------------------------------------------------------------------------------------------------------

LANE, TEXT, AXIS = 42.0, 16.0, 34.0  # pixels: a row of boxes with its name; its name; the axis below all
DECADES = 6  # powers of ten below the tolerance to the palest colour
NAMED, LAYERS = 12, 30  # most names, and else layers, on an axis
LEGEND = (
    ("band", "no difference"), ("series-0", "allowed; paler: further below the tolerance"),
    ("wrong", "more than is allowed"),
)  # fmt: skip


def _plots(found: Sequence[LayoutResult], losses: Mapping[str, list[float]]) -> Iterator[Section]:
    """The plots that have data."""
    tops = {"mean error of the top k logits": MEAN_ERROR, "share of positions with other top k tokens": OTHER_TOKENS}
    logits = {
        result.layout: {title: rows for title, prefix in tops.items() if (rows := _by_k(result, prefix))}
        for result in found
    }
    gradients, modules = (
        {result.layout: _of_kinds(_by_name(result), kinds) for result in found} for kinds in (GRADIENTS, MODULES)
    )
    for title, says, lanes in (
        ("Logits", LOGITS, logits),
        ("Modules, in order of execution", IN_ORDER, modules),
        ("Gradients, parameter by parameter", BY_PARAMETER, gradients),
    ):
        if any(lanes.values()):
            yield Section([Plot(heat(title, lanes), says)], title, On.PAGE)
    if panels := _loss_panels(found, losses):
        yield Section([Plot(curves.draw(panels, [], averaged=False), BY_STEP)], "Loss, step by step", On.PAGE)


def heat(title: str, lanes: Mapping[str, Named]) -> Figure:
    """Draw a row of boxes for each layout and kind: a box's colour says how near it is to its tolerance."""
    names = list(dict.fromkeys(name for kinds in lanes.values() for rows in kinds.values() for name in rows))
    width, boxes, texts, y = WIDTH / len(names), list[Box](), list[tuple[float, str]](), 0.0
    for layout, kinds in lanes.items():
        for kind, rows in kinds.items():
            texts.append((y + TEXT / 2, f"{layout}: {kind}"))
            boxes += [
                _box(rows[name], name, at * width, y + TEXT, width) for at, name in enumerate(names) if name in rows
            ]
            y += LANE
    return Figure(title, "", y + AXIS, texts, boxes, LEGEND, _ticks(names, width))


def _box(row: ComparisonRow, name: str, x: float, y: float, width: float) -> Box:
    fill, opacity, error = "band", 1.0, number(row.error)
    if not row.ok:
        fill = "wrong"
    elif row.error and row.tolerance:
        fill, opacity = "series-0", max(0.1, 1 - math.log10(row.tolerance / row.error) / DECADES)
    title = f"{name}: {error} of {number(row.tolerance)} allowed"
    return Box(x, y, width, LANE - TEXT - 4, fill, title, error, round(opacity, 2))


def _ticks(names: Sequence[str], width: float) -> list[tuple[float, str]]:
    """The names if they are few, else the layers, each at its first name."""
    if len(names) <= NAMED:
        return [((at + 0.5) * width, name) for at, name in enumerate(names)]
    firsts: dict[int, float] = {}
    for at, name in enumerate(names):
        if layer := in_layer(name)[0]:
            firsts.setdefault(layer.number, at * width)
    every = -(-len(firsts) // LAYERS) or 1
    return [(x, f"layer {number}" if not at else f"{number}") for at, (number, x) in enumerate(firsts.items())][::every]


def _loss_panels(found: Sequence[LayoutResult], losses: Mapping[str, list[float]]) -> dict[str, curves.Curves]:
    """Loss curves with their references, and their distances from these; values that are not finite leave a gap."""
    whole: dict[str, Sequence[float]] = {result.layout: result.losses for result in found}
    apart: dict[str, Sequence[float]] = {
        result.layout: [abs(a - b) for a, b in zip(result.losses, losses.get(result.precision, ()), strict=False)]
        for result in found
    }
    one = {f"one process, {precision}": values for precision, values in losses.items()} if any(whole.values()) else {}
    drawn: dict[str, dict[str, Sequence[float]]] = {
        "training loss": {**whole, **one},
        "absolute difference from one process": apart,
    }
    panels = {title: {name: _curve(values) for name, values in lines.items()} for title, lines in drawn.items()}
    known = {title: {name: curve for name, curve in lines.items() if curve} for title, lines in panels.items()}
    return {title: lines for title, lines in known.items() if lines}


def _curve(values: Sequence[float]) -> curves.Curve:
    return [curves.Point(step, value) for step, value in enumerate(values, start=1) if math.isfinite(value)]


def _of_kinds(named: Named, kinds: Iterable[str]) -> Named:
    return {kind: named[kind] for kind in kinds if kind in named}


def _by_k(found: LayoutResult, prefix: str) -> dict[str, ComparisonRow]:
    return {row.what.removeprefix(prefix): row for row in found.rows if row.what.startswith(prefix)}
