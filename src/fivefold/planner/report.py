"""Report of `fivefold plan`: the ranking, the winner's time and memory by item, and why the others are behind.

The terminal shows it in 80 columns; JSON has every item of every layout. No torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fivefold.core.units import GIB, many
from fivefold.hardware.chip import Chip
from fivefold.hardware.cluster import Cluster
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Estimate, Item, Workload
from fivefold.planner.explain import USEFUL, binds, slower_by, tied
from fivefold.planner.failures import Failures, failure_sections
from fivefold.planner.search import NEAR
from fivefold.planner.timing import Interval
from fivefold.report.curves import label, nice
from fivefold.report.figures import BAR, LANE, WIDTH, Box, Figure, timeline
from fivefold.report.findings import Cell, Column, Findings, Notes, On, Plot, Report, Row, Section, Table

LINE = 24  # characters of the longest bar
LAYOUT = 30  # characters of a layout in one line
ITEM = 21  # characters of the longest item
PREDICTED = "Predicted before anything ran."
TIME = (
    "The busiest pipeline rank: a bar for each layout, in the order of the table. Hover over a part for its seconds. "
    "Of the first,"
)
MEMORY = "The fullest pipeline rank; the red line is where a device is full. Hover over a part for its size."
BEST = "best"  # the first of the ranking
CURES = "would make it fit, the fastest first:"
ASSUMED = "assumed: "
INTERVALS = (
    "± and (a to b) hold the true value in 80 % of cases. All layouts share these errors, so their order is more "
    "certain than their times"
)


@dataclass(frozen=True)
class Ranked:
    """One line of the ranking. `memory_gib`: tensors at the peak of the fullest rank; `reserved_gib`: total of the
    device. Intervals hold the truth in 80 % of cases. `behind`: its largest loss to the best, in words."""

    layout: str
    memory_gib: float
    reserved_gib: float
    reserved_gib_interval: Interval
    verdict: str
    step_seconds: float
    step_seconds_interval: Interval
    tokens_per_second_per_device: float
    mfu_pct: float
    behind: str = ""

    @property
    def step(self) -> str:
        """`1.31 ±13%`: seconds of a step, and how far off 80 % of cases are at most."""
        return f"{seconds_text(self.step_seconds)} ±{self.step_seconds_interval[1] / self.step_seconds - 1:.0%}"

    @property
    def says(self) -> str:
        """The verdict, unless it fits, and what it loses."""
        return "; ".join(filter(None, ("" if self.verdict == "fits" else self.verdict, self.behind)))


@dataclass(frozen=True, kw_only=True)
class PlanReport(Report[Ranked]):
    """Report of a plan. `estimates`: those of the rows, in order. `notes`: sentences about all. `cures`: changes that
    would make the first one fit, if it does not. `timeline`: slots of the first one's pipeline, as in
    `Timeline.to_json`; None without a pipeline. `failures`: cost of failures, by layout."""

    estimates: tuple[Estimate, ...] = ()
    notes: tuple[str, ...] = ()
    cures: tuple[Ranked, ...] = ()
    timeline: Mapping[str, Any] | None = None
    failures: Mapping[Layout, Failures] = field(default_factory=dict)

    def findings(self) -> Findings:
        """The ranking and the first layout's items; on the page also drawings of all."""
        sections = [
            Section([Notes(self.notes, is_list=True)], self.title, On.TERMINAL),
            Section([Notes([f"{note}." for note in self.notes], is_list=True)], on=On.PAGE),
            *([Section([Notes([CURES]), _table(self.cures)])] if self.cures else ()),
            Section([_table(self.rows, numbered=True)]),
            *(self._said_on_page() if self.estimates else ()),
            *(self._drawn() if self.estimates else ()),
            *failure_sections(self.failures),
            Section([Notes([self.closing.strip()])], on=On.TERMINAL),
        ]
        return Findings(command="fivefold plan", headline=self.title, sections=sections)

    def _said_on_page(self) -> Iterator[Section]:
        """The assumptions as a table, and the lines after them."""
        lines = [line for line in self.closing.split("\n") if line and not line.startswith(ASSUMED)]
        lines = [line for line in lines if line != INTERVALS]
        yield Section([Notes([f"{line}." for line in (PREDICTED[:-1], INTERVALS)], "soft"),
                       Notes(lines, is_list=True)], on=On.PAGE)  # fmt: skip
        rows = [Row([Cell(name), Cell(says)]) for name, says in assumed(self.estimates[0]).items()]
        yield Section([Table([Column("of"), Column("assumed", "says")], rows)], "Assumptions", On.PAGE)

    def _drawn(self) -> Iterator[Section]:
        first = self.estimates[0]
        heads, limit = _heads(first), first.cluster.chip.memory_gib * GIB
        says = f"{TIME} {bound(first)}."
        time = Plot(
            _stacks(self.estimates, "time", "s", 1.0, None), says, [*_lines(first, "time"), f"  {bound(first)}"]
        )
        yield Section([time], "Time of a step", line=[Cell(heads["time"])])
        picture = _stacks(self.estimates, "memory", "GiB", 1 / GIB, limit)
        yield Section(
            [Plot(picture, MEMORY, _lines(first, "memory"))],
            "Memory of the fullest device",
            line=[Cell(heads["memory"])],
        )
        if pipeline := _pipeline(self.timeline):
            yield Section([Plot(pipeline, pipeline.says)], pipeline.title, On.PAGE)


def _table(ranking: Sequence[Ranked], *, numbered: bool = False) -> Table:
    columns = [
        Column("", "n", on=On.PAGE),
        Column("layout", "name", folds="+", most=LAYOUT),
        Column("memory", on=On.PAGE),
        Column("GiB", "n", "GiB of\na device"),
        Column("s/step", "n", "s a step"),
        Column("tokens/s\na device", "n"),
        Column("MFU\n%", "n"),
        Column("", tone="soft", on=On.TERMINAL),
        Column("against the best", on=On.PAGE),
    ]
    rows = []
    for number, row in enumerate(ranking, start=1):
        memory, step = row.reserved_gib_interval, row.step_seconds_interval
        cells = [
            Cell(str(number) if numbered else ""), Cell(row.layout),
            Cell(row.verdict, "" if row.verdict == "fits" else "bad"),
            Cell(f"{row.reserved_gib:.1f}", detail="({:.1f} to {:.1f})".format(*memory)),
            Cell(row.step, detail="({:.3g} to {:.3g})".format(*step)),
            Cell(f"{row.tokens_per_second_per_device:,.0f}"), Cell(f"{row.mfu_pct:.1f}"), Cell(row.says),
            Cell(row.behind),
        ]  # fmt: skip
        rows.append(Row(cells))
    return Table(columns, rows, is_narrow=True)


def seconds_text(seconds: float) -> str:
    """Format seconds with three digits, or as a whole number if it has more."""
    return f"{seconds:.3g}" if seconds < 999.5 else f"{seconds:,.0f}"


def _heads(estimate: Estimate) -> dict[str, str]:
    """Totals of the first layout's time and memory."""
    low, high = map(seconds_text, estimate.step_interval)
    least, most = (size / GIB for size in estimate.reserved_interval)
    of_rank = f", of pipeline rank {estimate.pp_rank}" * (estimate.layout.pp > 1)
    taken = f"{estimate.reserved / GIB:.1f} ({least:.1f} to {most:.1f})"
    return {
        "time": f"a step of {estimate.layout}: {seconds_text(estimate.step_seconds)} s ({low} to {high})",
        "memory": f"the fullest device: {taken} of {estimate.cluster.chip.memory_gib:g} GiB{of_rank}",
    }


def _lines(estimate: Estimate, part: str) -> list[str]:
    """Items of time or memory, each with its share as a bar."""
    rows = [row for row in estimate.rows if row.part == part]
    total = sum(row.amount for row in rows)
    return [_line(row, total) for row in sorted(rows, key=lambda row: -row.amount) if row.amount >= total / 1000]


def bound(estimate: Estimate) -> str:
    """Say how much of a step the model needs, and what binds it otherwise."""
    own = sum(estimate.seconds.get(item, 0.0) for item in USEFUL) / estimate.step_seconds
    return f"{own:.0%} is {' and '.join(USEFUL)}; of the rest, most is {binds(estimate).item}"


def _line(row: Item, total: float) -> str:
    share = row.amount / total
    amount = f"{seconds_text(row.amount):>8} s  " if row.part == "time" else f"{row.amount / GIB:8.2f} GiB"
    return f"  {row.item:<{ITEM}} {amount} {share:6.1%}  {'█' * round(LINE * share):<{LINE}}"


def behind(first: Estimate, other: Estimate) -> str:
    """Largest loss of a layout to the first one, in words: the item of time that grows most."""
    if other.layout == first.layout:
        return BEST
    more = other.step_seconds / first.step_seconds - 1
    if tied(other, first):
        return f"tied, {more:+.1%}"
    return f"{more:+.1%}" + f": {slower_by(other, first)[0].item}" * (more > 0)


def ranked(estimate: Estimate, first: Estimate) -> Ranked:
    """An estimate as a line of the ranking. A layout that does not fit is not compared with the first."""
    low, high = (size / GIB for size in estimate.reserved_interval)
    return Ranked(
        str(estimate.layout), round(estimate.memory_gib, 3), round(estimate.reserved / GIB, 3),
        (round(low, 3), round(high, 3)), estimate.verdict, estimate.step_seconds, estimate.step_interval,
        estimate.tokens_per_second_per_device, 100 * estimate.mfu, behind(first, estimate) if estimate.fits else "",
    )  # fmt: skip


def judged(asked: Estimate, best: Estimate | None) -> str:
    has, needs = (f"{size / GIB:.1f}" for size in (asked.cluster.chip.memory_bytes, asked.reserved))
    if not asked.fits:
        most = max((row for row in asked.rows if row.part == "memory"), key=lambda row: row.amount)
        return f"{asked.layout} does not fit: {needs} of {has} GiB, {most.amount / GIB:.1f} of them {most.item}"
    tight = f"is tight: {needs} of {has} GiB, near enough to the end for the allocator to free and ask again"
    fits = tight if asked.verdict == "tight" else f"fits: {needs} of {has} GiB"
    return f"{asked.layout} {fits}{_against(asked, best)}"


def _against(asked: Estimate, best: Estimate | None) -> str:
    if best is None or best.layout == asked.layout:
        return "; it is the best" if best else ""
    more = asked.step_seconds / best.step_seconds - 1
    if tied(asked, best):
        return f"; tied with {best.layout} within error ({more:+.1%})"
    if more < 0:
        return f"; {-more:.1%} faster than {best.layout}"
    terms = ", ".join(f"{row.item} {row.share:+.1%}" for row in slower_by(asked, best)[:3] if row.share > 1e-3)
    return f"; {more:.1%} slower than {best.layout}: {terms}"


def faster(fastest: Estimate, first: Estimate) -> str:
    less = 1 - fastest.step_seconds / first.step_seconds
    return f"{first.layout} is the simplest within {NEAR:.0%} of the fastest: {fastest.layout} takes {less:.1%} less"


def proposed(budget: Estimate, best: Estimate) -> str:
    less = 1 - budget.step_seconds / best.step_seconds
    needs = f"{budget.reserved / GIB:.1f} GiB"
    return f"{budget.layout}, which keeps as much as there is room for, takes {less:.1%} less than the fastest: {needs}"


def title(model: str, cluster: Cluster, workload: Workload) -> str:
    rows, tokens = many(workload.global_batch_size, "row"), many(workload.seq_length, "token")
    return f"{model} on {cluster.text}, {rows} of {tokens} a step"


def guessed(chip: Chip) -> str:
    """Say what nobody has measured of a chip; empty if its efficiencies are its own."""
    if chip.is_guess:
        return f"the speed of a {chip.name} is a guess until fivefold calibrate measures it"
    if not chip.efficiencies:
        return ""
    of = "a judgement" if chip.efficiencies == "judgement" else f"those of {chip.efficiencies}"
    return f"efficiencies of {chip.name} are {of}, fivefold calibrate measures them"


def assumptions(estimate: Estimate) -> str:
    return f"{ASSUMED}{'; '.join(assumed(estimate).values())}\n{INTERVALS}"


def assumed(estimate: Estimate) -> dict[str, str]:
    """The assumptions of the numbers, by what they are of."""
    cluster, chip = estimate.cluster, estimate.cluster.chip
    rate = chip.flops_per_second(estimate.layout.precision) or 0
    inside, between = cluster.node.inside, cluster.node.between
    found = {
        "matmuls": f"{chip.name} with large matmuls at {_rate(rate, 1e12)} TFLOP/s",
        "links inside a node": f"{inside.kind} {_rate(inside.bytes_per_second, 1e9)} GB/s",
        "links between nodes": f"{between.kind} {_rate(between.bytes_per_second, 1e9)} GB/s a device"
        if cluster.nodes > 1
        else "",
        "rows": "rows of one document",
        "routing": "even routing",
        "efficiencies": guessed(chip),
    }
    return {name: says for name, says in found.items() if says}


def _rate(a_second: float, unit: float) -> str:
    """Format a rate: whole from 10 on; two digits below, as for a CPU: 0.14."""
    found = a_second / unit
    return f"{found:.0f}" if found >= 10 else f"{found:.2g}"


def details(estimates: tuple[Estimate, ...]) -> dict[str, object]:
    """Every item of every layout, for JSON: bytes of memory, seconds of time."""
    return {"items": {str(estimate.layout): [asdict(row) for row in estimate.rows] for estimate in estimates}}


# ---- drawings of the page --------------------------------------------------------------------------------------------

# A colour for each item, and none for two on a page: those of time, and those of memory. The others are hatched.
TIME_ITEMS = ("matmuls", "attention", "element-wise", "tp", "data")
MEMORY_ITEMS = ("saved activations", "optimizer state", "parameters", "gradients", "loss")
COLOURS = {
    item: f"{kind}-{number}"
    for kind, items in (("rank", TIME_ITEMS), ("series", MEMORY_ITEMS))
    for number, item in enumerate(items)
}
REST = "many"  # colour of all other items
AXIS = 34.0  # pixels of an axis below the bars


def _stacks(estimates: Sequence[Estimate], part: str, unit: str, factor: float, limit: float | None) -> Figure:
    """Draw a bar for each layout, cut into its items, ordered by their largest amount in any layout. `limit`: where a
    device is full."""
    by_item = [{row.item: row.amount for row in estimate.rows if row.part == part} for estimate in estimates]
    names = sorted(
        dict.fromkeys(name for items in by_item for name in items),
        key=lambda name: -max(i.get(name, 0) for i in by_item),
    )
    names.sort(key=lambda name: name not in COLOURS)
    fills = {name: COLOURS.get(name, REST) for name in names}
    longest = max([*(sum(items.values()) for items in by_item), limit or 0])
    boxes = []
    for lane, (estimate, items) in enumerate(zip(estimates, by_item, strict=True)):
        at = 0.0
        for name in names:
            width = items.get(name, 0.0) / longest * WIDTH
            title = f"{estimate.layout}: {name} {items.get(name, 0.0) * factor:.4g} {unit}"
            if width > 0.2:
                boxes.append(Box(at, lane * LANE, width, BAR, fills[name], title, name))
            at += width
    if limit is not None:
        says = f"a device has {limit * factor:.4g} {unit}"
        boxes.append(Box(limit / longest * WIDTH - 2, 0, 2, LANE * len(estimates), "wrong", says))
    numbers = [(lane * LANE + BAR / 2, f"{lane + 1}") for lane in range(len(estimates))]
    words = [(fills[name], name) for name in names if name in COLOURS]
    if rest := [name for name in names if name not in COLOURS]:
        words.append((REST, f"the rest: {', '.join(rest)}"))
    if limit is not None:
        words.append(("wrong", f"a device is full: {limit * factor:.4g} {unit}"))
    titles = {"time": "Time of a step", "memory": "Memory of the fullest device"}
    ticks = nice(0, longest * factor, 6)
    marks = [(tick / factor / longest * WIDTH, f"{label(tick, ticks)} {unit}") for tick in ticks]
    return Figure(
        titles[part], f"{longest * factor:.4g} {unit} wide", LANE * len(estimates) + AXIS, numbers, boxes, words, marks
    )


def _pipeline(found: Mapping[str, Any] | None) -> Figure | None:
    """Draw the first layout's pipeline with a few of a step's micro batches; its bubble is larger than that of all."""
    if not found:
        return None
    figure = timeline("The first layout's pipeline", found, unit="s")
    drawn, there = found["drawn"], found["micro_batches"]
    return figure if drawn == there else replace(figure, says=f"with {drawn} of the {there} micro batches of a step")
