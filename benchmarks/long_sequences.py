"""Which layout trains rows of 8K to 128K tokens on 8 to 256 H100, and how long rows may be with each memory lever.

    python -m benchmarks.long_sequences               plans every cell; writes docs/evidence/long_sequences.md
    python -m benchmarks.long_sequences --rehearse 40 rehearses at most so many of the planned cells that were not yet
                                                      (a CUDA build of torch, no GPU), and records them
    python -m benchmarks.long_sequences --rehearse 40 --only llama-3.1-8b

The planner chooses: of all layouts that fit, the simplest near the fastest. A rehearsal then runs the real step of the
fullest rank on torch's own caching allocator, for which the device's memory is the limit: what it says is what the step
takes. A cell is known by what was run, so that a planner that chooses otherwise shows the cell as planned alone.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.pages import put_between
from benchmarks.planned_memory import prices

from fivefold.core.errors import UserError
from fivefold.core.units import GIB
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Estimate, Workload
from fivefold.planner.explain import longest_sequence
from fivefold.planner.search import search

RESULTS = Path(__file__).parent / "results" / "long_sequences.json"
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "long_sequences.md"
CHIP, A_NODE = "H100", 8
TOKENS = 2**22  # of a step
LENGTHS = tuple(1024 * thousands for thousands in (8, 16, 32, 64, 128))
DEVICES = (8, 16, 32, 64, 128, 256)
MODELS = ("llama-3.1-8b", "mistral-7b", "llama-2-13b", "llama-3.1-70b")

# (model, devices) -> layouts, each with what it adds to those before it.
LEVERS: dict[tuple[str, int], tuple[tuple[str, str], ...]] = {
    ("llama-3.1-8b", 8): (
        ("shard8+zero1", "optimizer state sharded"),
        ("shard8+zero2", "and gradients"),
        ("shard8", "and parameters"),
        ("shard8+selective", "all but matmuls and attention computed again"),
        ("shard8+selective+offload", "and what is kept moved to host memory"),
        ("shard8+full", "layers computed again"),
        ("shard8+full+offload", "and their inputs moved to host memory"),
        ("tp8+nosp", "features split, the sequence whole"),
        ("tp8", "and the sequence split between matmuls"),
        ("tp8+full", "and layers computed again"),
        ("cp8", "the sequence split in attention, too"),
        ("cp8+selective", "and all but matmuls and attention computed again"),
        ("cp8+full", "or whole layers computed again"),
        ("cp4.tp2+full", "both splits"),
        ("pp8+full", "layers dealt out"),
    ),
    ("llama-3.1-70b", 64): (
        ("shard64", "all states sharded"),
        ("shard64+full", "layers computed again"),
        ("shard8.tp8", "features and the sequence split"),
        ("shard8.tp8+selective", "and all but matmuls and attention computed again"),
        ("shard8.tp8+full", "or whole layers computed again"),
        ("shard8.tp8+full+offload", "and their inputs moved to host memory"),
        ("cp8.tp8", "the sequence split in attention, too"),
        ("cp8.tp8+full", "and layers computed again"),
        ("pp8.tp8+full", "layers dealt out"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A rank that is rehearsed. `rows`: of a step, as few as fill its memory as a whole step does."""

    model: str
    devices: int
    layout: str
    rank: int
    seq_length: int
    rows: int

    @property
    def cluster(self) -> str:
        return f"{self.devices // A_NODE}x{A_NODE}x{CHIP}"


@dataclass(frozen=True)
class Rehearsed:
    """What was seen of it: peaks in bytes; None where memory ran out."""

    asked: Asked
    allocated: int | None
    reserved: int | None


@dataclass(frozen=True)
class Cell:
    """Rows of `seq_length` tokens of a model on a number of devices. `best`: the planner's choice; None: none fits."""

    model: str
    devices: int
    seq_length: int
    best: Estimate | None
    lever: str = ""

    @property
    def asked(self) -> Asked | None:
        """The fullest rank. Micro batches beyond the second, or beyond those that fill a pipeline, add nothing."""
        if self.best is None:
            return None
        layout = self.best.layout
        rounds = 2 * layout.pp * layout.pp_virtual if layout.pp > 1 else 2
        dealt = layout.data_ranks * layout.micro_batch_size
        rows = min(self.best.workload.global_batch_size, dealt * rounds)
        rank = self.best.pp_rank * (layout.world // layout.pp)
        return Asked(self.model, self.devices, str(layout), rank, self.seq_length, rows)


# ---- planned ---------------------------------------------------------------------------------------------------------


def cells() -> Iterator[Cell]:
    """Of every model, length and number of devices."""
    for model in MODELS:
        for length in LENGTHS:
            for devices in DEVICES:
                yield Cell(model, devices, length, best(model, devices, length))


@cache
def best(model: str, devices: int, length: int) -> Estimate | None:
    """The layout that the planner chooses."""
    try:
        found = search(_prices(model, devices), Workload(length, TOKENS // length), top=1)
    except UserError:  # fewer rows than the smallest layout deals out
        return None
    return found.best[0] if found.best else None


def by_lever() -> Iterator[Cell]:
    """The longest rows of each layout of `LEVERS`."""
    for (model, devices), layouts in LEVERS.items():
        of = _prices(model, devices)
        for text, adds in layouts:
            try:
                found = longest_sequence(of, Workload(8192, devices), Layout.parse(text).resolve(devices))
            except UserError:
                yield Cell(model, devices, 0, None, f"`{text}`: {adds}")
            else:
                yield Cell(model, devices, found.workload.seq_length, found, f"`{text}`: {adds}")


def _prices(model: str, devices: int):  # type: ignore[no-untyped-def]
    return prices(model, f"{devices // A_NODE}x{A_NODE}x{CHIP}", True)


# ---- rehearsed -------------------------------------------------------------------------------------------------------


def known() -> dict[Asked, Rehearsed]:
    """Those that are recorded."""
    if not RESULTS.exists():
        return {}
    found = [Rehearsed(**{**each, "asked": Asked(**each["asked"])}) for each in json.loads(RESULTS.read_text())]
    return {each.asked: each for each in found}


def rehearse(asked: Asked) -> Rehearsed:
    """The build and two steps of the rank, compiled as training is."""
    from fivefold.rehearsal.launch import rehearse as rehearse_run

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run.yaml")
        sections = {
            "model": {
                "name_or_path": asked.model, "init": "random",
                "overrides": {"max_position_embeddings": max(131072, asked.seq_length)},
            },
            "tokenizer": {"name_or_path": "byte"},
            "data": {"seq_length": asked.seq_length},
            "train": {"global_batch_size": asked.rows},
        }  # fmt: skip
        run.write_text(json.dumps(sections), encoding="utf-8")
        layout = [f"layout={asked.layout}"]
        seen = rehearse_run(run, layout, cluster=asked.cluster, rank=asked.rank, synthetic=True).seen[0]
    if seen.out_of_memory is not None:
        return Rehearsed(asked, None, None)
    assert not seen.failed, f"{asked}: {seen.failed}"
    step = next(each for each in seen.phases if each.name == "step 2")
    return Rehearsed(asked, step.allocated, step.reserved)


def record(found: Sequence[Rehearsed]) -> None:
    """Write them down, one a line."""
    RESULTS.write_text("[\n" + ",\n".join(f" {json.dumps(asdict(each))}" for each in found) + "\n]\n", encoding="utf-8")


# ---- what is published -----------------------------------------------------------------------------------------------


def table(model: str, found: Sequence[Cell], seen: dict[Asked, Rehearsed]) -> str:
    """Markdown: a line for each length, a column for each number of devices."""
    head = " | ".join(f"{devices} H100" for devices in DEVICES)
    lines = [f"| {model} | {head} |", "| --- " * (len(DEVICES) + 1) + "|"]
    for length in LENGTHS:
        own = [_said(each, seen) for each in found if (each.model, each.seq_length) == (model, length)]
        lines.append(f"| {length // 1024}K | {' | '.join(own)} |")
    return "\n".join(lines)


def _said(cell: Cell, seen: dict[Asked, Rehearsed]) -> str:
    """`shard4.tp2+full` 61.3 (59.0), 41 %: reserved as planned (as rehearsed), MFU as planned."""
    if cell.best is None or cell.asked is None:
        return "-"
    real = seen.get(cell.asked)
    found = "" if real is None else " (out of memory)" if real.reserved is None else f" (**{real.reserved / GIB:.1f}**)"
    return f"`{cell.best.layout}` {cell.best.reserved / GIB:.1f}{found}, {cell.best.mfu:.0%}"


def lever_table(found: Sequence[Cell], seen: dict[Asked, Rehearsed]) -> str:
    """Markdown: a line for each layout."""
    lines = ["| model | devices | layout | longest rows | reserved GiB | rehearsed |", "| --- " * 6 + "|"]
    for cell in found:
        start = f"| {cell.model} | {cell.devices} H100 | {cell.lever} |"
        if cell.best is None or cell.asked is None:
            lines.append(f"{start} not 1K | | |")
            continue
        real = seen.get(cell.asked)
        peak = "" if real is None else "out of memory" if real.reserved is None else f"{real.reserved / GIB:.1f}"
        lines.append(f"{start} {cell.seq_length // 1024:,}K | {cell.best.reserved / GIB:.1f} | {peak} |")
    return "\n".join(lines)


def rehearsed_table(seen: Sequence[Rehearsed]) -> str:
    """Markdown: all that was rehearsed, chosen by the planner of today or not."""
    lines = ["| model | devices | layout | tokens | allocated GiB | reserved GiB |", "| --- " * 6 + "|"]
    for each in sorted(seen, key=lambda one: (one.asked.model, one.asked.seq_length, one.asked.devices)):
        of, sizes = each.asked, (each.allocated, each.reserved)
        peaks = " | ".join("out of memory" if size is None else f"{size / GIB:.1f}" for size in sizes)
        lines.append(f"| {of.model} | {of.devices} H100 | `{of.layout}` | {of.seq_length // 1024:,}K | {peaks} |")
    return "\n".join(lines)


def publish(name: str, text: str) -> None:
    """Put a table into the page, between its marks."""
    put_between(f"<!-- {name} -->", f"<!-- end of {name} -->", text, PAGE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", type=int, default=0, help="so many of the cells that were not yet")
    parser.add_argument("--only", default="", help="those of this model")
    parser.add_argument("--length", type=int, default=0, help="those of rows of so many tokens")
    parser.add_argument("--levers", action="store_true", help="those of the table of levers")
    options = parser.parse_args()
    levers, found, seen = tuple(by_lever()), tuple(cells()), known()
    asked = [
        each.asked for each in (levers if options.levers else found)
        if each.asked and options.only in each.model and options.length in (0, each.seq_length)
    ]  # fmt: skip
    for each in [each for each in dict.fromkeys(asked) if each not in seen][: options.rehearse]:
        seen = known() | {each: rehearse(each)}
        print(seen[each], flush=True)
        record(list(seen.values()))
    publish("levers", lever_table(levers, seen))
    publish("cells", "\n\n".join(table(model, found, seen) for model in MODELS))
    publish("rehearsed", rehearsed_table(list(seen.values())))
    planned = {each.asked for each in (*levers, *found) if each.asked}
    real = [seen[each] for each in planned if each in seen]
    print(
        f"{len(planned)} cells fit as planned, {len(real)} rehearsed, {sum(not r.reserved for r in real)} did not fit"
    )


if __name__ == "__main__":
    main()
