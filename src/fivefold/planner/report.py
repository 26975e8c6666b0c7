"""What `fivefold plan` shows: the ranking, where the winner's time and memory go, and why the others are behind.

The terminal shows it in 80 columns; JSON has every item of every layout. No torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fivefold.core.units import many
from fivefold.planner.chips import GIB
from fivefold.planner.cluster import Cluster
from fivefold.planner.estimate import Estimate, Item, Workload
from fivefold.planner.explain import slower_by
from fivefold.report.table import Report

if TYPE_CHECKING:
    from rich.console import Console

BAR = 24  # characters of the longest bar
LAYOUT = 30  # characters of a layout in one line
ITEM = 21  # characters of the longest item


@dataclass(frozen=True)
class Ranked:
    """One line of the ranking. `memory_gib`: of tensors at the peak of the fullest rank; `reserved_gib`: of the device,
    all in all. `behind`: what it loses most to the first, in words."""

    layout: str
    memory_gib: float
    reserved_gib: float
    verdict: str
    step_seconds: float
    tokens_per_second_per_device: float
    mfu_pct: float
    behind: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanReport(Report[Ranked]):
    """`estimates`: those of the rows, in order. `notes`: sentences about all. `timeline`: the slots of the first one's
    pipeline, as `Timeline.to_json` has them; None where it has none."""

    estimates: tuple[Estimate, ...] = ()
    notes: tuple[str, ...] = ()
    timeline: Mapping[str, Any] | None = None

    def show(self, console: "Console") -> None:
        """The ranking, and under it the first layout item by item."""
        from rich.table import Table
        from rich.text import Text

        console.print(Text(self.title, style="bold"))
        for note in self.notes:
            console.print(note, highlight=False, style="dim")
        table = Table(box=None, header_style="dim", pad_edge=False)
        texts = [_folded(row.layout) for row in self.rows]
        widest = max((len(line) for text in texts for line in text.splitlines()), default=0)
        table.add_column("layout", overflow="fold", min_width=min(LAYOUT, widest))
        for name in ("GiB", "s/step", "tokens/s\na device", "MFU\n%"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", overflow="fold", style="dim")
        for row, text in zip(self.rows, texts, strict=True):
            says = row.behind if row.verdict == "fits" else f"{row.verdict}; {row.behind}".rstrip("; ")
            speed = seconds_text(row.step_seconds), f"{row.tokens_per_second_per_device:,.0f}"
            table.add_row(text, f"{row.reserved_gib:.1f}", *speed, f"{row.mfu_pct:.1f}", says)
        console.print(table)
        for line in _itemised(self.estimates[0]) if self.estimates else ():
            console.print(line, highlight=False, no_wrap=True, overflow="ellipsis")
        console.print(self.closing, highlight=False, markup=False)


def _folded(layout: str) -> str:
    """A long layout on several lines, broken before its options."""
    lines = [""]
    for number, option in enumerate(layout.split("+")):
        part = f"+{option}" if number else option
        if lines[-1] and len(lines[-1]) + len(part) > LAYOUT:
            lines.append(" ")
        lines[-1] += part
    return "\n".join(lines)


def seconds_text(seconds: float) -> str:
    """In three digits, or whole where it has more."""
    return f"{seconds:.3g}" if seconds < 999.5 else f"{seconds:,.0f}"


def _itemised(estimate: Estimate) -> Iterator[str]:
    """The first layout's time and memory, each item with its share as a bar."""
    whole = estimate.cluster.chip.memory_gib
    heads = {
        "time": f"a step of {estimate.layout}: {seconds_text(estimate.step_seconds)} s",
        "memory": f"the fullest device: {estimate.reserved / GIB:.1f} of {whole:g} GiB"
        + f", of pipeline rank {estimate.pp_rank}" * (estimate.layout.pp > 1),
    }  # fmt: skip
    for part, head in heads.items():
        rows = [row for row in estimate.rows if row.part == part]
        total = sum(row.amount for row in rows)
        yield ""
        yield head
        for row in sorted(rows, key=lambda row: -row.amount):
            if row.amount >= total / 1000:
                yield _line(row, total)


def _line(row: Item, total: float) -> str:
    share = row.amount / total
    amount = f"{seconds_text(row.amount):>8} s  " if row.part == "time" else f"{row.amount / GIB:8.2f} GiB"
    return f"  {row.item:<{ITEM}} {amount} {share:6.1%}  {'█' * round(BAR * share):<{BAR}}"


def behind(first: Estimate, other: Estimate) -> str:
    """What costs another layout the most against the first: the item of time that grows most."""
    if other is first:
        return "first"
    more = other.step_seconds / first.step_seconds - 1
    if more < 0:
        return f"{-more:.1%} faster, less simple"
    return "as fast" if more < 5e-4 else f"+{more:.1%}: {slower_by(other, first)[0].item}"


def ranked(estimate: Estimate, first: Estimate) -> Ranked:
    """An estimate as a line of the ranking."""
    return Ranked(
        str(estimate.layout), round(estimate.memory_gib, 3), round(estimate.reserved / GIB, 3), estimate.verdict,
        estimate.step_seconds, estimate.tokens_per_second_per_device, 100 * estimate.mfu, behind(first, estimate),
    )  # fmt: skip


def title(model: str, cluster: Cluster, workload: Workload) -> str:
    """What is planned."""
    rows, tokens = many(workload.global_batch_size, "row"), many(workload.seq_length, "token")
    return f"{model} on {cluster.text}, {rows} of {tokens} a step"


def told(cures: Sequence[Estimate]) -> str:
    """What would make a layout fit, the cheapest change first."""
    ways = ", ".join(f"{each.layout} ({each.reserved / GIB:.1f} GiB, {each.step_seconds:.3g} s)" for each in cures)
    return f"would fit: {ways}" if ways else "no small change of it fits"


def assumptions(estimate: Estimate) -> str:
    """What the numbers rest on, in a sentence or two."""
    cluster, chip = estimate.cluster, estimate.cluster.chip
    rate = chip.flops_per_second(estimate.layout.precision) or 0
    links = f"{cluster.node.inside.kind} {_rate(cluster.node.inside.bytes_per_second(), 1e9)} GB/s"
    if cluster.nodes > 1:
        links += f", {cluster.node.between.kind} {_rate(cluster.node.between.bytes_per_second(), 1e9)} GB/s a device"
    matmuls = f"{chip.name} with large matmuls at {_rate(rate, 1e12)} TFLOP/s"
    return f"assumed: {matmuls}, {links}; rows of one document; even routing"


def _rate(a_second: float, unit: float) -> str:
    """Whole from 10 on; two digits below, as of a CPU: 0.14."""
    found = a_second / unit
    return f"{found:.0f}" if found >= 10 else f"{found:.2g}"


def details(estimates: tuple[Estimate, ...]) -> dict[str, object]:
    """Every item of every layout, for JSON: bytes of memory, seconds of time."""
    return {"items": {str(each.layout): [asdict(row) for row in each.rows] for each in estimates}}
