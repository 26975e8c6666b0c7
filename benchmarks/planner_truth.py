"""What the planner foretells of this machine's CPU, beside what real steps take: memory of the fullest rank and time.

    python benchmarks/planner_truth.py                      calibrates, trains all layouts, writes benchmarks/results/
    python benchmarks/planner_truth.py --hardware FILE      with what `fivefold calibrate` wrote before
    python benchmarks/planner_truth.py --only tp2,pp2.tp2   layouts that begin so, on the screen alone
    python benchmarks/planner_truth.py --levers             the memory levers instead: results/cpu_levers.json and the
                                                            table of docs/evidence/memory.md
    python benchmarks/planner_truth.py --again benchmarks/results/planner_truth.json    plans anew, measures nothing

Every layout trains a small Llama (or Mixtral, for experts) for a few steps in processes of its own, started as
`fivefold train` starts them. Memory is what a rank has from malloc at its peak less what it had before the model was
built, as `heap.c` counts it: a C compiler is needed. The resident set is shown beside it; it has besides what malloc
keeps of freed blocks. Time is the median step of the slowest rank, and means something on a quiet machine alone.
"""

import argparse
import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from common import LEARNING_RATE, OPTIONS, RESULTS, SEED, machine
from fivefold.calibration import calibrate
from fivefold.data.batch import MicroBatch, Piece, assemble
from fivefold.hardware.cluster import Cluster
from fivefold.launch.processes import Workers
from fivefold.launch.workers import start_workers
from fivefold.launch.world import World
from fivefold.models.build import build_meta
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.parallel.offload import host_memory
from fivefold.parallel.state import state_of
from fivefold.planner.estimate import Estimate
from fivefold.planner.plan import estimate
from fivefold.training.memory import PeakMemory
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import train_step
from pages import put_between

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "evidence" / "memory.md"
BEGIN, END = "<!-- table: python benchmarks/planner_truth.py --levers -->", "<!-- end of CPU levers -->"
VOCABULARY, LENGTH, ROWS = 8192, 256, 8
WARMUP, STEPS = 1, 3  # of memory alone: 2 steps, the second of which has the optimizer's state
MIB = 2**20

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": False, "use_cache": False,
        "bos_token_id": None, "eos_token_id": None,
    },
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 704, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCABULARY, "num_local_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": LENGTH, "tie_word_embeddings": False, "use_cache": False,
        "bos_token_id": None, "eos_token_id": None,
    },
}  # fmt: skip

# None of these is run by `fivefold calibrate`, which times single operations.
LAYOUTS = (
    "single+mb2", "single+mb4", "single+mb2+full",
    "shard2+mb2", "shard2+mb1+full", "shard2+zero1+mb2", "shard2+zero2+mb1", "dp2+mb2",
    "tp2+mb2", "tp2+mb4+nosp", "tp2+mb2+full", "cp2+mb2", "cp2+ulysses+mb2", "cp2+allgather+mb2",
    "pp2+mb1", "pp2+gpipe+mb2", "pp2+interleaved+v2+mb2", "pp2+zb+mb1", "pp2+zbv+mb1", "pp2+zero1+mb2+full",
    "shard4+mb1", "dp2.shard2+mb1", "shard2.tp2+mb1", "tp4+mb2", "pp4+mb1", "pp2.tp2+mb2", "shard2.pp2+mb1",
    "cp2.tp2+mb2", "shard2.cp2+mb1",
)  # fmt: skip
# What is offloaded is not from malloc here: on a CPU the host's memory is the device's own.
LEVERS = (
    "single+mb8", "single+mb8+selective", "single+mb8+full", "single+mb8+offload",
    "single+mb8+selective+offload", "single+mb8+full+offload",
    "single+mb8+offload_optimizer", "single+mb8+bf16_states", "single+mb8+8bit_states",
    "single+mb8+full+8bit_states", "single+mb8+full+offload+offload_optimizer",
    "shard2+mb4", "shard2+mb4+selective", "shard2+mb4+full", "shard2+mb4+offload_optimizer", "shard2+mb4+8bit_states",
    "shard2+mb4+full+offload+offload_optimizer", "tp2+mb8", "tp2+mb8+selective", "tp2+mb8+full",
    "tp2+mb8+full+offload_optimizer", "tp2+mb8+selective+bf16_states", "cp2+mb8", "cp2+mb8+selective",
    "cp2+mb8+full+offload", "pp2+mb2", "pp2+mb2+selective", "pp2+mb2+full",
    "pp2+mb2+full+offload_optimizer+8bit_states",
)  # fmt: skip
OF_EXPERTS = ("single+mb2", "shard2+mb2", "shard2.ep2+mb2", "tp2+mb2", "shard2.ep2.tp2+mb2")


@dataclass(frozen=True)
class Case:
    """One layout of one of `MODELS`, in fp32."""

    family: str
    text: str

    @property
    def layout(self) -> Layout:
        return replace(Layout.parse(self.text), precision="fp32")


@dataclass(frozen=True)
class Measured:
    """`peak`: bytes of the fullest rank; `resident`: the peak of its resident set. `seconds`: of the median step, and
    of the CPU in all ranks together."""

    peak: int
    resident: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Row:
    """A case, planned and measured. Errors: planned over measured, less 1."""

    family: str
    layout: str
    ranks: int
    planned_mib: float
    measured_mib: float
    resident_mib: float
    memory_error: float
    planned_seconds: float
    measured_seconds: float
    cpu_seconds: float
    time_error: float


# ---- on a rank -------------------------------------------------------------------------------------------------------


def on_worker(request: Mapping[str, Any], world: World) -> None:
    """The body of a worker: steps of one case, and what they took into a file."""
    case = Case(request["family"], request["text"])
    heap, memory = Heap(), PeakMemory(torch.device("cpu"))
    host_memory.allocate = outside_of_malloc
    layout = case.layout
    model = parallelize(
        build_meta(hf_config(case.family)), layout, device="cpu", seed=SEED,
        step=(layout.padded(LENGTH), layout.accumulation(request["rows"])),
    )  # fmt: skip
    optimizer, rank = build_optimizer(model, OPTIONS), state_of(model).placement.data_rank
    wall, cpu = [], []
    for step in range(WARMUP + request["steps"]):
        batch = batch_of(case.layout, rank, step, request["rows"])
        started = time.perf_counter(), time.process_time()
        train_step(model, optimizer, batch, learning_rate=LEARNING_RATE, max_grad_norm=OPTIONS.max_grad_norm)
        wall.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
    found = {"peak": heap.peak, "resident": int((memory.gib or 0) * 2**30), "wall": wall, "cpu": cpu}
    Path(request["out"], f"{world.rank}.json").write_text(json.dumps(found))


def outside_of_malloc(size: int, dtype: torch.dtype) -> torch.Tensor:
    """What `host_memory.allocate` gives, in pages of its own."""
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize), dtype=dtype)


class Heap:
    """The bytes that this process has from malloc beyond those of now, as `heap.c` counts them."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        self.library.heap_held.restype = self.library.heap_most.restype = ctypes.c_long
        self.start = self.library.heap_held()
        self.library.heap_most(1)

    @property
    def peak(self) -> int:
        return int(self.library.heap_most(0)) - int(self.start)


def hf_config(family: str) -> Any:
    return AutoConfig.for_model(**MODELS[family])


def batch_of(layout: Layout, data_rank: int, step: int, count: int) -> list[MicroBatch]:
    """This data rank's micro batches of `count` rows of random tokens, one document a row."""
    rows = np.random.default_rng([SEED, step]).integers(0, VOCABULARY, (count, LENGTH), dtype=np.uint16)
    size, found = layout.micro_batch_size, []
    for number in range(layout.accumulation(count)):
        first = (number * layout.data_ranks + data_rank) * size
        pieces = [[Piece(row, row[1:])] for row in rows[first : first + size]]
        found.append(assemble(pieces, row_length=layout.padded(LENGTH), pad_id=0))
    return found


# ---- all ranks -------------------------------------------------------------------------------------------------------


def measure(cases: Sequence[Case], *, rows: int, steps: int) -> Iterator[tuple[Case, Measured]]:
    """Train each case on a batch of `rows` rows, `steps` times besides a first. Cases with as many ranks come together:
    they share what is imported once."""
    with tempfile.TemporaryDirectory() as folder, counted_heap(Path(folder)):
        ordered = sorted(cases, key=lambda case: case.layout.world)
        for world, group in groupby(ordered, key=lambda case: case.layout.world):
            with Workers("planner_truth:on_worker", count=world) as crew:
                for case in group:
                    yield case, _measured(crew, Path(folder), {"rows": rows, "steps": steps, **asdict(case)})


def _measured(crew: Workers, folder: Path, ask: Mapping[str, Any]) -> Measured:
    request = {"device": "cpu", "out": str(folder), **ask}
    start_workers(crew, request, logs=folder / "logs", patience=600)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(crew.count)]
    return Measured(
        peak=max(rank["peak"] for rank in ranks),
        resident=max(rank["resident"] for rank in ranks),
        seconds=median(map(max, zip(*(rank["wall"][WARMUP:] for rank in ranks), strict=True))),
        cpu_seconds=median(map(sum, zip(*(rank["cpu"][WARMUP:] for rank in ranks), strict=True))),
    )


@contextmanager
def counted_heap(folder: Path) -> Iterator[None]:
    """Processes that are started inside count what they have from malloc, and find this module."""
    library = folder / "heap.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, HERE / "heap.c"], check=True)
    before = dict(os.environ)
    os.environ |= {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- planned beside measured -----------------------------------------------------------------------------------------


def planned(case: Case, hardware: str, rows: int) -> Estimate:
    """Of the case on as many devices of a machine as it has ranks. `hardware`: the text of its hardware file."""
    here = re.sub(r'^cluster = ".*"$', f'cluster = "1x{case.layout.world}xcpu"', hardware, flags=re.MULTILINE)
    workload = {"seq_length": LENGTH, "global_batch_size": rows}
    return estimate(hf_config(case.family).to_dict(), Cluster.of_toml(here), workload, case.layout)


def row_of(case: Case, of: Estimate, seen: Measured) -> Row:
    return Row(
        case.family, case.text, case.layout.world, of.allocated / MIB, seen.peak / MIB, seen.resident / MIB,
        of.allocated / seen.peak - 1, of.step_seconds, seen.seconds, seen.cpu_seconds,
        of.step_seconds / seen.seconds - 1,
    )  # fmt: skip


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Of the absolute errors: the median, the worst, and how many are within the aim."""
    found: dict[str, Any] = {"layouts": len(rows)}
    for what, aim in (("memory", 0.05), ("time", 0.15)):
        errors = sorted(abs(getattr(row, f"{what}_error")) for row in rows)
        within = sum(error <= aim for error in errors)
        found[what] = {"median": median(errors), "worst": errors[-1], "within": within, "aim": aim}
    return found


def table(rows: Sequence[Row], memory: Mapping[str, Any]) -> str:
    """Markdown, of memory alone."""
    lines = [
        f"{memory['within']} of {len(rows)} within {memory['aim']:.0%}; {memory['median']:.1%} off at the median, "
        f"{memory['worst']:.1%} at worst.",
        "",
        "| layout | ranks | measured MiB | planned | off |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        sizes = f"{row.measured_mib:,.0f} | {row.planned_mib:,.0f} | {100 * row.memory_error:+.1f} %"
        lines.append(f"| `{row.layout}` | {row.ranks} | {sizes} |")
    return "\n".join(lines)


def told(row: Row) -> str:
    """A line for people."""
    memory = f"{row.planned_mib:7.1f} {row.measured_mib:7.1f} MiB {100 * row.memory_error:+6.1f} %"
    seconds = f"{row.planned_seconds:6.3f} {row.measured_seconds:6.3f} s {100 * row.time_error:+6.1f} %"
    more = f"(resident {row.resident_mib:.0f} MiB, {row.cpu_seconds:.2f} s of CPU)"
    return f"{row.family:8} {row.layout:24} {memory}   {seconds}   {more}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", type=Path, help="what fivefold calibrate wrote; by default it is called")
    parser.add_argument("--only", type=str, default="", help="beginnings of layouts")
    parser.add_argument("--levers", action="store_true", help="the memory levers instead")
    parser.add_argument("--rows", type=int, default=ROWS, help="of a step")
    parser.add_argument("--steps", type=int, default=STEPS, help="to take the median of")
    parser.add_argument("--again", type=Path, help="plan anew what this file of results has measured")
    args = parser.parse_args()
    before = json.loads(args.again.read_text()) if args.again else None
    hardware = args.hardware.read_text() if args.hardware else before["hardware"] if before else calibrate()[0]
    rows, about = [], before["machine"] if before else machine()
    count = before["rows_of_a_step"] if before else args.rows
    asked = cases(args.only, LEVERS if args.levers else LAYOUTS, () if args.levers else OF_EXPERTS)
    for case, seen in recorded(before) if before else measure(asked, rows=args.rows, steps=args.steps):
        rows.append(row_of(case, planned(case, hardware, count), seen))
        print(told(rows[-1]), flush=True)
    result = {
        "machine": about, "hardware": hardware, "rows_of_a_step": count, "summary": summary(rows),
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    print(json.dumps(result["summary"]))
    if not args.only:
        target = args.again or RESULTS / ("cpu_levers.json" if args.levers else "planner_truth.json")
        target.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {target}")
    if args.levers and not args.only:
        put_between(BEGIN, END, table(rows, result["summary"]["memory"]), PAGE)
    return 0


def cases(only: str, llamas: Sequence[str], mixtrals: Sequence[str]) -> list[Case]:
    """Those whose layout begins with one of the words."""
    every = [Case("llama", text) for text in llamas] + [Case("mixtral", text) for text in mixtrals]
    return [case for case in every if case.text.startswith(tuple(only.split(",")))]


def recorded(result: Mapping[str, Any]) -> Iterator[tuple[Case, Measured]]:
    """What an earlier run has measured."""
    for row in result["rows"]:
        peak, resident = (round(row[key] * MIB) for key in ("measured_mib", "resident_mib"))
        yield Case(row["family"], row["layout"]), Measured(peak, resident, row["measured_seconds"], row["cpu_seconds"])


if __name__ == "__main__":
    sys.exit(main())
