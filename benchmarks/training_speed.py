"""Training speed and peak memory of fivefold beside a plain PyTorch loop and `transformers.Trainer`, in one run.

    python benchmarks/training_speed.py                  1M to 110M, fp32 and bf16 (where the CPU has instructions
                                                         for it); writes benchmarks/results/
    python benchmarks/training_speed.py --quick          a toy model, one repeat, writes nothing: does it run?
    python benchmarks/training_speed.py --sizes 15M --json F     a part of it; written only where you say
    python benchmarks/training_speed.py --write-docs     the newest result into docs/evidence/benchmarks.md, no run

Every contender runs in fresh processes. The contenders take turns, `repeats` times, in alternating order, so that the
machine's noise hits all alike. A ratio is the median over repeats of the ratio to the plain loop of the same repeat.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

import speed_report
from common import PRECISIONS, RESULTS, SHAPES, RankFailed, isa_limit_gflops, machine, run_ranks, slug

SCRIPT = Path(__file__).parent / "contenders.py"
YARDSTICK = "plain loop"
WARMUP = 2  # what is compiled is by then


@dataclass(frozen=True)
class Contender:
    """One row of the table: how it is asked for, and on how many processes."""

    kind: str
    ranks: int = 1
    layout: str = "single"
    fsdp: str = "off"
    compiled: bool = False
    apart: bool = False


CONTENDERS = {
    YARDSTICK: Contender("plain"),
    "compact loop": Contender("compact"),
    "fivefold": Contender("fivefold"),
    "fivefold compiled": Contender("fivefold", compiled=True),
    "Trainer": Contender("trainer"),
    "fivefold shard2": Contender("fivefold", 2, layout="shard2"),
    "Trainer FSDP2 forced": Contender("trainer", 2, fsdp="forced"),
    "Trainer FSDP2 as asked": Contender("trainer", 2, fsdp="asked"),
    "fivefold tp2": Contender("fivefold", 2, layout="tp2"),
    "no communication": Contender("fivefold", 2, apart=True),
}

Cell = tuple[str, str]  # size, precision
Sample = dict[str, Any]


def main() -> int:
    """The command; 1 when a contender failed."""
    args = arguments()
    console = Console(width=None if sys.stdout.isatty() else 150)
    if args.write_docs:
        console.print(speed_report.write_docs(speed_report.newest(RESULTS)), highlight=False)
        return 0
    target = args.json or (RESULTS / f"training_speed-{slug(_name(machine()))}.json" if args.is_whole else None)
    result: dict[str, Any] = {}
    for result in measure(args, console):  # after each repeat, so that a run cut short leaves its repeats
        if target:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(result, indent=1) + "\n")
    speed_report.show(result, console)
    if target:
        console.print(f"written: {target}", highlight=False)
    return int(any(row["error"] for row in result["rows"]))


def arguments() -> argparse.Namespace:
    """The command line, checked and filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a toy model and one repeat, to see that everything runs")
    add("--sizes", type=_names(SHAPES), default=None, help="of " + ",".join(SHAPES) + "; default 1M,6M,15M,110M")
    add("--precisions", type=_names(("fp32", "bf16")), default=list(PRECISIONS), help="fp32,bf16 (if the CPU has it)")
    add("--contenders", type=_names(CONTENDERS), default=list(CONTENDERS), help="of " + ",".join(CONTENDERS))
    add("--repeats", type=_positive, default=None, help="3 (1 with --quick)")
    add("--steps", type=_positive, default=None, help="timed steps per process; 60 for 1M, 1 for 110M")
    add("--packed", action="store_true", help="four documents a row instead of one; without the Trainer")
    add("--json", type=Path, default=None, help="where to write; the default for a whole run only: benchmarks/results")
    add("--write-docs", action="store_true", help="put the newest result into docs/evidence/benchmarks.md")
    args = parser.parse_args()
    parts = ("quick", "packed", "sizes", "precisions", "contenders")
    args.is_whole = all(getattr(args, name) == parser.get_default(name) for name in parts)
    args.sizes = args.sizes or (["tiny"] if args.quick else ["1M", "6M", "15M", "110M"])
    args.repeats = args.repeats or (1 if args.quick else 3)
    args.contenders = [YARDSTICK, *(name for name in args.contenders if name != YARDSTICK)]
    if args.packed:
        args.contenders = [name for name in args.contenders if CONTENDERS[name].kind not in ("trainer", "compact")]
    return args


@dataclass
class Measured:
    """What has been seen so far: per cell and contender a run a repeat; None, and the reason, where it failed."""

    matmuls: dict[Cell, list[Sample]] = field(default_factory=dict)
    runs: dict[tuple[Cell, str], list[Sample | None]] = field(default_factory=dict)
    errors: dict[tuple[Cell, str], str] = field(default_factory=dict)


def measure(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Run everything; after each repeat, the JSON of all repeats so far."""
    seen, started = Measured(), time.monotonic()
    for repeat in range(args.repeats):
        order = args.contenders if repeat % 2 == 0 else args.contenders[::-1]
        for cell in ((size, precision) for size in args.sizes for precision in args.precisions):
            steps = args.steps or SHAPES[cell[0]].steps
            ask = {"shape": cell[0], "precision": cell[1], "packed": args.packed, "warmup": WARMUP, "steps": steps}
            seen.matmuls.setdefault(cell, []).append(run_ranks(SCRIPT, {**ask, "kind": "matmul"}, ranks=1)[0])
            for name in order:
                if (cell, name) in seen.errors:  # it would fail again
                    continue
                said = run_one(seen, cell, name, ask)
                console.print(f"{repeat + 1}/{args.repeats} {' '.join(cell)} {name}: {said}", highlight=False)
        yield as_json(seen, args, repeats=repeat + 1) | {"minutes": (time.monotonic() - started) / 60}


def run_one(seen: Measured, cell: Cell, name: str, ask: dict[str, Any]) -> str:
    """One run of one contender, its ranks taken as one; a line about it."""
    contender = CONTENDERS[name]
    request = ask | asdict(contender)
    runs = seen.runs.setdefault((cell, name), [])
    try:
        ranks = run_ranks(SCRIPT, request, ranks=contender.ranks)
    except RankFailed as failed:
        runs.append(None)
        seen.errors[cell, name] = str(failed)
        return f"failed: {failed}"
    sample = {
        "step_seconds": max(rank["step_seconds"] for rank in ranks),
        "cpu_seconds": sum(rank["cpu_seconds"] for rank in ranks),
        "peak_gib": max(rank["peak_gib"] or 0.0 for rank in ranks),
        "peak_gib_sum": sum(rank["peak_gib"] or 0.0 for rank in ranks),
        "losses": ranks[0]["losses"],
        "wrapper": ranks[0].get("wrapper"),
    }
    runs.append(sample)
    return f"{SHAPES[cell[0]].tokens / sample['step_seconds']:,.0f} tokens/s, {sample['peak_gib']:.2f} GiB"


# ---- from runs to rows ----------------------------------------------------------------------------------------------


def as_json(seen: Measured, args: argparse.Namespace, *, repeats: int) -> dict[str, Any]:
    """All that is written: the machine, the cells, the rows of the tables, and every single run."""
    cells = {cell: cell_facts(cell, matmuls) for cell, matmuls in seen.matmuls.items()}
    runs = [{"size": c[0], "precision": c[1], "contender": n, "runs": r} for (c, n), r in seen.runs.items()]
    return {
        "machine": machine(),
        "documents": "packed" if args.packed else "single",
        "repeats": repeats,
        "cells": list(cells.values()),
        "rows": [row_of(seen, facts, cell, name) for cell, facts in cells.items() for name in args.contenders],
        "runs": runs,
    }


def cell_facts(cell: Cell, matmuls: list[Sample]) -> dict[str, Any]:
    """The model of a cell, and what matmuls alone reach: the best of the repeats."""
    shape = SHAPES[cell[0]]
    return {
        "size": cell[0],
        "precision": cell[1],
        "rows": shape.rows,
        "length": shape.length,
        "tokens": shape.tokens,
        **{key: matmuls[0][key] for key in ("parameters", "flops_per_step")},
        **{key: max(run[key] for run in matmuls) for key in ("square_gflops", "layers_gflops")},
        "isa_gflops": isa_limit_gflops(cell[1]),
    }


def row_of(seen: Measured, facts: dict[str, Any], cell: Cell, name: str) -> dict[str, Any]:
    """A row of the table: medians over the repeats, and ratios to the plain loop, repeat by repeat."""
    row = {"size": cell[0], "precision": cell[1], "contender": name, "ranks": CONTENDERS[name].ranks}
    runs = [run for run in seen.runs[cell, name] if run]
    pairs = [(run, plain) for run, plain in zip(runs, seen.runs[cell, YARDSTICK], strict=False) if plain]
    if (cell, name) in seen.errors or not pairs:
        return {**row, "error": seen.errors.get((cell, name), "the plain loop failed")}
    seconds = median(run["step_seconds"] for run in runs)
    speedups = [plain["step_seconds"] / run["step_seconds"] for run, plain in pairs]
    gflops = facts["flops_per_step"] / seconds * 1e-9
    losses = [both for run, plain in pairs for both in zip(run["losses"], plain["losses"], strict=False)]
    return {
        **row,
        "error": None,
        "wrapper": runs[0]["wrapper"],
        "tokens_per_second": facts["tokens"] / seconds,
        "speed_ratio": median(speedups),
        "speed_ratio_range": [min(speedups), max(speedups)],
        "cpu_ratio": _ratio(pairs, "cpu_seconds"),
        "peak_gib": median(run["peak_gib"] for run in runs),
        "peak_gib_sum": median(run["peak_gib_sum"] for run in runs),
        "memory_ratio": _ratio(pairs, "peak_gib"),
        "memory_sum_ratio": _ratio(pairs, "peak_gib_sum"),
        "gflops": gflops,
        "matmul_pct": 100 * gflops / facts["square_gflops"],
        "loss_difference": max((abs(found / plain - 1) for found, plain in losses), default=None),
    }


def _ratio(pairs: list[tuple[Sample, Sample]], key: str) -> float | None:
    """None where the system does not tell."""
    return median(run[key] / plain[key] for run, plain in pairs) if all(plain[key] for _, plain in pairs) else None


def _name(of: dict[str, Any]) -> str:
    return f"{of['cpu']} {of['cores']} cores"


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}: choose from {', '.join(known)}")
        return names

    return read


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
