"""What each memory lever, and combinations of them, leave of a step's peak: as rehearsed, beside the planner.

    python -m benchmarks.levers               plans every row anew; writes the table of docs/evidence/memory.md
    python -m benchmarks.levers --rehearse    rehearses the rows that have no figure yet (a CUDA build of torch, no
                                              GPU), and records them in benchmarks/results/levers.json

Llama 3.2 1B on two H100, rows of 8,192 tokens, two micro batches of one row, bf16, layers compiled: the real second
step of rank 0 on torch's own caching allocator. A lever is a line of `ROWS`. What a CPU takes with most of
them is measured by `planner_truth.py`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.pages import put_between

from fivefold.config import RunConfig, load_config
from fivefold.core.units import GIB
from fivefold.hardware.cluster import Cluster
from fivefold.models.config_facts import facts_of_config
from fivefold.planner.of_run import planned
from fivefold.planner.rank_memory import OUTSIDE

RESULTS = Path(__file__).parent / "results" / "levers.json"
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "memory.md"
BEGIN, END = "<!-- table: python -m benchmarks.levers -->", "<!-- end of levers -->"
MODEL, CLUSTER, LENGTH, ROUNDS = "llama-3.2-1b", "2xH100", 8192, 2

# What is changed of a run, as its command line has it.
ROWS: tuple[str, ...] = (
    "layout=dp2",
    "layout=shard2+zero1",
    "layout=shard2+zero2",
    "layout=shard2",
    "layout=shard2+selective",
    "layout=shard2+full",
    "layout=shard2+offload",
    "layout=shard2+offload_optimizer",
    "layout=shard2+selective+offload",
    "layout=shard2+full+offload",
    "layout=shard2+full+offload+offload_optimizer",
    "layout=shard2 optimizer.state_dtype=bf16",
    "layout=shard2 optimizer.state_dtype=8bit",
    "layout=shard2+fp8",
    "layout=shard2+fp8_rowwise",
    "layout=shard2+fp8_rowwise_gw_hp",
    "layout=shard2+fp8_delayed",
    "layout=shard2+selective+fp8_rowwise",
    "layout=shard2+full+fp8_rowwise",
    "layout=tp2+fp8",
    "layout=tp2+fp8_rowwise",
    "layout=tp2+fp8_delayed",
    "layout=cp2+fp8_rowwise",
    "layout=tp2+nosp",
    "layout=tp2",
    "layout=tp2+full",
    "layout=cp2",
    "layout=cp2+full",
    "layout=pp2",
    "layout=pp2+full",
    "layout=pp2+full+offload_optimizer",
    "layout=shard2+offload_parameters",
    "layout=shard2+full+offload+offload_parameters",
    "layout=shard2+full+offload+offload_optimizer+offload_parameters",
    "layout=pp2+full+offload_optimizer+offload_parameters",
    "layout=shard2+fp8+full+offload_optimizer+offload_parameters",
)


@dataclass(frozen=True)
class Row:
    """Bytes at the peak of the second step; None where it was not rehearsed."""

    changes: str
    allocated: int | None = None
    reserved: int | None = None


def run_file(folder: Path) -> Path:
    """The run that the rows change."""
    file = folder / "run.yaml"
    sections = {
        "model": {"name_or_path": MODEL, "init": "random"}, "tokenizer": {"name_or_path": "byte"},
        "data": {"seq_length": LENGTH}, "precision": {"compute": "bf16"}, "train": {"global_batch_size": 1},
    }  # fmt: skip
    file.write_text(json.dumps(sections), encoding="utf-8")
    return file


def config_of(row: Row, folder: Path) -> RunConfig:
    """Its run, with two micro batches for each data rank."""
    file, changes = run_file(folder), row.changes.split()
    layout = load_config(file, changes).layout.resolve(Cluster.parse(CLUSTER).world)
    return load_config(file, [*changes, f"train.global_batch_size={ROUNDS * layout.data_ranks}"])


def plan(row: Row) -> tuple[float, float]:
    """Bytes allocated and reserved, as planned."""
    with tempfile.TemporaryDirectory() as folder:
        step = planned(config_of(row, Path(folder)), Cluster.parse(CLUSTER), facts_of_config(MODEL))
    items = step.memory_of(0)
    tensors = sum(size for name, size in items.items() if name not in OUTSIDE)
    return tensors, tensors + items["allocator"]


def rehearsed(row: Row) -> Row:
    """The row with what a rehearsal sees."""
    from fivefold.rehearsal.launch import rehearse

    with tempfile.TemporaryDirectory() as folder:
        rows = config_of(row, Path(folder)).train.global_batch_size
        changes = [*row.changes.split(), f"train.global_batch_size={rows}"]
        seen = rehearse(run_file(Path(folder)), changes, cluster=CLUSTER, rank=0, synthetic=True).seen[0]
    assert seen.out_of_memory is None and not seen.failed, f"{row}: {seen.failed}"
    step = next(each for each in seen.phases if each.name == "step 2")
    return Row(row.changes, step.allocated, step.reserved)


def recorded() -> dict[str, Row]:
    """By what they change."""
    found = [Row(**each) for each in json.loads(RESULTS.read_text())] if RESULTS.exists() else []
    return {row.changes: row for row in found}


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| changes | allocated GiB | planned | off | reserved GiB | planned | off |", "| --- " * 7 + "|"]
    errors = []
    for row in rows:
        tensors, taken = plan(row)
        if row.allocated is None or row.reserved is None:
            lines.append(f"| `{row.changes}` | | {tensors / GIB:.2f} | | | {taken / GIB:.2f} | |")
            continue
        errors.append(abs(tensors / row.allocated - 1))
        lines.append(
            f"| `{row.changes}` | {row.allocated / GIB:.2f} | {tensors / GIB:.2f} | {_off(tensors / row.allocated)} | "
            f"{row.reserved / GIB:.2f} | {taken / GIB:.2f} | {_off(taken / row.reserved)} |"
        )
    mean, worst = (sum(errors) / len(errors), max(errors)) if errors else (0.0, 0.0)
    return f"{len(errors)} rows rehearsed; allocated {mean:.1%} off at the mean, {worst:.1%} at worst.\n\n" + "\n".join(
        lines
    )


def _off(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="the rows that have no figure yet")
    options = parser.parse_args()
    found = recorded()
    for changes in ROWS if options.rehearse else ():
        if changes not in found:
            found[changes] = rehearsed(Row(changes))
            print(found[changes], flush=True)
            RESULTS.write_text("[\n" + ",\n".join(f" {json.dumps(asdict(row))}" for row in found.values()) + "\n]\n")
    text = table([found.get(changes, Row(changes)) for changes in ROWS])
    put_between(BEGIN, END, text, PAGE)
    print(text)


if __name__ == "__main__":
    main()
