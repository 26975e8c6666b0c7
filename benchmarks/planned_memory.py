"""The planner's memory of a rank beside a rehearsal of it: the real step on torch's own caching allocator.

    python -m benchmarks.planned_memory               plans every recorded cell; writes the table and picture of docs/
    python -m benchmarks.planned_memory --rehearse    rehearses the cells that have no figure yet, with a CUDA build of
                                                      torch, and records them in benchmarks/results/planned_memory.json
    python -m benchmarks.planned_memory --rehearse --again   all of them

A cell is a rank of a layout on a cluster, under a model of full size: five families, 1B to 671B, 8 to 1,024 devices.
Allocated and reserved are the peaks of the second step, in which the optimizer has its state.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.pages import put_between

from fivefold.core.units import GIB
from fivefold.hardware.chip import Chip
from fivefold.hardware.cluster import Cluster
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import PricedStep, Workload
from fivefold.planner.price import PriceList
from fivefold.planner.rank_memory import OUTSIDE

RESULTS = Path(__file__).parent / "results" / "planned_memory.json"
DOCS = Path(__file__).parents[1] / "docs" / "evidence"
PAGE, PICTURE = DOCS / "planned_memory.md", DOCS / "planned_memory.svg"
BEGIN, END = "<!-- table: python -m benchmarks.planned_memory -->", "<!-- end of table -->"
STEP = "step 2"
FAMILIES = {"llama": "#3566b0", "qwen3": "#c8662b", "gemma": "#3a8f52", "mixtral": "#8f4a9e", "deepseek": "#b03a48"}


@dataclass(frozen=True)
class Cell:
    """A rank to rehearse, and what was seen: bytes, None where not yet. `micro_batches`: of a step. `fits`: whether the
    chip's memory was enough."""

    model: str
    cluster: str
    layout: str
    rank: int
    seq_length: int
    micro_batches: int
    compiled: bool
    allocated: int | None = None
    reserved: int | None = None
    fits: bool = True

    @property
    def chip(self) -> Chip:
        return Cluster.parse(self.cluster).chip

    @property
    def workload(self) -> Workload:
        layout = Layout.parse(self.layout).resolve(Cluster.parse(self.cluster).world)
        return Workload(self.seq_length, self.micro_batches * layout.data_ranks * layout.micro_batch_size)


@dataclass(frozen=True)
class Planned:
    """What the planner says of a cell: bytes allocated and reserved."""

    cell: Cell
    allocated: float
    reserved: float

    @property
    def off(self) -> tuple[float, float]:
        """Of allocated and of reserved: 0.01 is 1 % too much."""
        assert self.cell.allocated and self.cell.reserved, "it was rehearsed"
        return self.allocated / self.cell.allocated - 1, self.reserved / self.cell.reserved - 1


def cells() -> list[Cell]:
    """Those that are recorded."""
    return [Cell(**each) for each in json.loads(RESULTS.read_text(encoding="utf-8"))["cells"]]


@cache
def prices(model: str, cluster: str, compiled: bool) -> PriceList:
    return PriceList(facts_of_config(model), Cluster.parse(cluster), compiled=compiled)


def plan(cell: Cell) -> Planned:
    """Price the cell's rank."""
    of = prices(cell.model, cell.cluster, cell.compiled)
    layout = Layout.parse(cell.layout).resolve(of.cluster.world)
    items = PricedStep(of, layout, cell.workload).memory_of(cell.rank // (layout.world // layout.pp))
    tensors = sum(amount for name, amount in items.items() if name not in OUTSIDE)
    return Planned(cell, tensors, tensors + items["allocator"])


def rehearsed(cell: Cell) -> Cell:
    """The cell with what a rehearsal sees of it."""
    from fivefold.rehearsal.launch import rehearse

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run.yaml")
        sections = {
            "model": {"name_or_path": cell.model, "init": "random"},
            "tokenizer": {"name_or_path": "byte"},
            "data": {"seq_length": cell.seq_length},
            "train": {"global_batch_size": cell.workload.global_batch_size, "compile": cell.compiled},
        }
        run.write_text(json.dumps(sections), encoding="utf-8")
        overrides = [f"layout={cell.layout}"]
        seen = rehearse(run, overrides, cluster=cell.cluster, rank=cell.rank, synthetic=True).seen[0]
    if seen.out_of_memory is not None:
        return replace(cell, fits=False)
    phase = next((each for each in seen.phases if each.name == STEP), None)
    assert phase is not None, f"{cell}: {seen.failed}"
    return replace(cell, allocated=phase.allocated, reserved=phase.reserved)


def record(found: Sequence[Cell]) -> None:
    """Write the cells down, one a line."""
    lines = ",\n".join(f"  {json.dumps(asdict(each))}" for each in found)
    RESULTS.write_text('{"cells": [\n' + lines + "\n]}\n", encoding="utf-8")


# ---- what is published -----------------------------------------------------------------------------------------------


def table(found: Iterable[Planned]) -> str:
    """Markdown: a row for each cell, those of a model together."""
    head = (
        "model", "cluster", "layout", "rank", "tokens", "micro batches", "compiled", "allocated GiB", "planned", "off",
        "reserved GiB", "planned", "off",
    )  # fmt: skip
    rows = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for each in found:
        cell, (tensors, taken) = each.cell, each.off
        compiled = "yes" if cell.compiled else "no"
        numbers = (
            f"{_gib(cell.allocated)} | {_gib(each.allocated)} | {100 * tensors:+.1f} % | "
            f"{_gib(cell.reserved)} | {_gib(each.reserved)} | {100 * taken:+.1f} %"
        )
        rows.append(
            f"| {cell.model} | {cell.cluster} | `{cell.layout}` | {cell.rank} | {cell.seq_length:,} | "
            f"{cell.micro_batches} | {compiled} | {numbers} |"
        )
    return "\n".join(rows)


def summary(found: Sequence[Planned]) -> str:
    """Mean and worst of both errors."""
    parts = []
    for name, errors in zip(("Allocated", "reserved"), zip(*(each.off for each in found), strict=True), strict=True):
        sizes = [abs(error) for error in errors]
        parts.append(
            f"{name}: {100 * sum(sizes) / len(sizes):.1f} % off at the mean, {100 * max(sizes):.1f} % at worst"
        )
    return f"{len(found)} cells. {'; '.join(parts)}."


def picture(found: Sequence[Planned]) -> str:
    """SVG: of each cell how far the planned peak is off, over the rehearsed one; allocated filled, reserved hollow."""
    width, height, left, most = 760, 300, 52, 12.0
    largest = max(each.cell.allocated or 0 for each in found) / GIB * 1.05

    def place(gib: float, off: float) -> tuple[float, float]:
        across = left + gib / largest * (width - left - 12)
        return across, height / 2 - max(-most, min(most, 100 * off)) / most * (height / 2 - 34)

    drawn = [f'<rect width="{width}" height="{height}" fill="white"/>']
    for percent in (-10, -5, -2, 0, 2, 5, 10):
        _, y = place(0, percent / 100)
        color = "#888" if percent == 0 else "#ddd"
        drawn.append(f'<line x1="{left}" y1="{y:.1f}" x2="{width - 12}" y2="{y:.1f}" stroke="{color}"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{percent:+d} %</text>')
    for gib in range(0, int(largest) + 1, 20):
        drawn.append(f'<text x="{place(gib, 0)[0]:.1f}" y="{height - 6}" text-anchor="middle">{gib} GiB</text>')
    for each in found:
        color = next(color for family, color in FAMILIES.items() if each.cell.model.startswith(family))
        for off, style in zip(each.off, (f'fill="{color}"', f'fill="none" stroke="{color}"'), strict=True):
            x, y = place((each.cell.allocated or 0) / GIB, off)
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" {style}/>')
    for number, (family, color) in enumerate(FAMILIES.items()):
        drawn.append(f'<text x="{left + 10 + 90 * number}" y="16" fill="{color}">{family}</text>')
    drawn.append(f'<text x="{width - 12}" y="16" text-anchor="end">allocated: filled; reserved: hollow</text>')
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11">\n{body}\n</svg>\n'
    )


def publish(found: Sequence[Planned]) -> None:
    """The table into the page, between its marks; the picture beside it."""
    put_between(BEGIN, END, f"{summary(found)}\n\n{table(found)}", PAGE)
    PICTURE.write_text(picture(found), encoding="utf-8")


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="rehearse the cells that have no figure yet")
    parser.add_argument("--again", action="store_true", help="and those that have one")
    options = parser.parse_args()
    found = cells()
    for number, cell in enumerate(found if options.rehearse else ()):
        if options.again or (cell.allocated is None and cell.fits):
            found[number] = rehearsed(cell)
            print(found[number], flush=True)
            record(found)
    planned = [plan(cell) for cell in found if cell.allocated is not None]
    publish(planned)
    print(summary(planned))


if __name__ == "__main__":
    main()
