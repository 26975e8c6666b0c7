"""A Llama of about 1B parameters at 8K tokens in bf16 on GPUs, through fivefold's own path: speed, MFU, peak memory,
and where the step's time goes, beside what the planner expects of it.

python benchmarks/gpu_train.py                           one CUDA GPU; writes benchmarks/results/gpu_train-1x<GPU>.json
torchrun --nproc-per-node 8 benchmarks/gpu_train.py      FSDP over eight, and how much of its collectives is hidden
torchrun --nproc-per-node 8 benchmarks/gpu_train.py --layout shard2.cp4     any layout
python benchmarks/gpu_train.py --dry-run 8xH100          no GPU: rank 0 with a stand-in for the CUDA driver, and what to
                                                         compare the measured with; measures nothing
python benchmarks/gpu_train.py --device cpu --tiny       no GPU: only shows that it runs; writes nothing
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from common import OPTIONS, RESULTS, SEED, best_gflops, machine, slug
from fivefold.core.errors import UserError
from fivefold.core.units import parse_length
from fivefold.data.batch import MicroBatch, Piece, assemble
from fivefold.hardware.cluster import Cluster
from fivefold.launch.world import World, alone, find_world, join
from fivefold.models import kernels
from fivefold.models.discover import facts_of
from fivefold.models.flops import Costs
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.parallel.state import state_of
from fivefold.rehearsal import stand_in
from fivefold.rehearsal.changes import AnswersAll, changed
from fivefold.rehearsal.request import Phase, RehearsalRequest
from fivefold.rehearsal.stage import world_of
from fivefold.rehearsal.stream_order import Driver
from fivefold.training.memory import PeakMemory
from fivefold.training.optimizers import build_optimizer
from fivefold.training.part import peak_tflops
from fivefold.training.step import StepResult, train_step
from gpu_expected import beside, layout_of, meta_model, of_estimate, planned, planned_on, show_expected
from overlap import profile_step

LEARNING_RATE = 1e-4


def main() -> int:
    """The command: 2 for a request that cannot be met, 1 when a loss is not finite or a step was skipped."""
    args = arguments()
    try:
        if args.dry_run:
            return dry_run(args, Cluster.parse(args.dry_run))
        if args.device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                f"this benchmark needs a CUDA GPU, and torch {torch.__version__} sees none",
                fix="without one: --dry-run 8xH100, or --device cpu --tiny to see only that it runs",
            )
        world = find_world(args.device) or alone(args.device)
        with join(world):
            result = measured(Run.build(args, world), args)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":  # all ranks have the same to say
            print(error, file=sys.stderr)
        return error.exit_code
    if world.is_first:
        report(result, args)
    return 0 if all(math.isfinite(loss) for loss in result["losses"]) and not result["skipped_steps"] else 1


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", default="llama-3.2-1b", help="a built-in shape or a config.json; its weights are drawn")
    add("--seq-length", type=parse_length, default=None, help="tokens a row; default 8k (64 with --tiny)")
    add("--rows", type=int, default=1, help="rows of a micro batch on each data rank")
    add("--accumulation", type=int, default=1, help="micro batches of a step")
    add("--layout", default=None, help="as text; default FSDP over every process; shard2.tp2+full also recomputes")
    add("--warmup", type=int, default=3, help="steps before timing")
    add("--steps", type=int, default=10, help="timed steps")
    add("--no-compile", dest="compile", action="store_false", help="blocks are compiled otherwise, on a GPU")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="a toy model")
    add(
        "--dry-run",
        metavar="CLUSTER",
        help="no GPU, nothing measured: rank 0 of 8xH100, say, on a stand-in; the estimate",
    )
    add("--json", type=Path, default=None, help="where to write the result")
    args = parser.parse_args()
    for name in ("rows", "accumulation", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is not 1 or more")
    if args.warmup < 0:
        parser.error(f"--warmup {args.warmup} is not 0 or more")
    if args.dry_run and args.device == "cpu":
        parser.error("--dry-run stands for CUDA GPUs: leave --device out")
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu only goes with --tiny: the full model would take hours there")
    args.seq_length = args.seq_length or (64 if args.tiny else 8192)
    args.compile = args.compile and args.device == "cuda"
    return args


@dataclass(frozen=True)
class Run:
    """What is trained. `attention`: which FlashAttention serves it, "" on a CPU. `memory`: since before the build."""

    model: Any
    optimizer: Any
    layout: Layout
    costs: Costs
    device: torch.device
    world: World
    attention: str
    memory: PeakMemory
    build_seconds: float

    @classmethod
    def build(cls, args: argparse.Namespace, world: World) -> "Run":
        """As `fivefold train` builds it. Raises `UserError` for a layout that does not fit."""
        started, device = time.perf_counter(), torch.device(world.device)
        layout = layout_of(args, world.size)
        memory = PeakMemory(device)
        model = meta_model(args)
        costs = Costs.of(facts_of(model))
        attention = kernels.choose("auto", device)
        step = (layout.padded(args.seq_length), args.accumulation)
        parallelize(model, layout, device=device, seed=SEED, compile_blocks=args.compile, step=step)
        optimizer = build_optimizer(model, OPTIONS)
        took = time.perf_counter() - started
        return cls(model, optimizer, layout, costs, device, world, attention, memory, took)

    def step(self, batch: list[MicroBatch]) -> StepResult:
        """One optimizer step, to its end on the device."""
        options = {"learning_rate": LEARNING_RATE, "max_grad_norm": OPTIONS.max_grad_norm}
        done = train_step(self.model, self.optimizer, batch, **options)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return done

    @property
    def axis_of(self) -> Callable[[str], str]:
        """Name of a process group -> mesh axis."""
        return state_of(self.model).mesh.axis_of


def measured(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Warm up, time, and look at one more step; this rank's numbers (memory and losses are those of rank 0)."""
    seconds, losses, skipped = [], [], 0
    for step in range(args.warmup + args.steps):
        batch = rows_of(args, run.model, step)
        before = time.perf_counter()
        done = run.step(batch)
        seconds.append(time.perf_counter() - before)
        losses.append(done.loss)
        skipped += done.skipped
    peak_gib, reserved_gib = run.memory.gib, run.memory.reserved_gib  # before what follows
    device, size = run.device, run.world.size
    profile = None
    if device.type == "cuda":
        profile = profile_step(partial(run.step, rows_of(args, run.model, args.warmup + args.steps)), run.axis_of)
    step_seconds = median(seconds[args.warmup :])
    work = run.costs.per_token * done.tokens + run.costs.per_squared_length * done.squared_lengths
    tflops = work / step_seconds / size * 1e-12
    peak = peak_tflops(device, run.layout.precision)
    side = 8192 if device.type == "cuda" else 512
    matmul = best_gflops(side, side, side, torch.bfloat16, device.type) * 1e-3
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    planned, why = planned_on(name, run.world, args) if device.type == "cuda" else (None, "this is a CPU")
    return {
        "device": name,
        "devices": size,
        "model": "tiny" if args.tiny else args.model,
        "parameters": run.costs.parameters,
        "layout": str(run.layout),
        "compiled": args.compile,
        "attention": run.attention,
        "seq_length": args.seq_length,
        "tokens_per_step": done.tokens,
        "build_seconds": run.build_seconds,
        "first_step_seconds": seconds[0],
        "step_seconds": step_seconds,
        "steps": seconds[args.warmup :],
        "skipped_steps": skipped,
        "tokens_per_second_per_device": done.tokens / step_seconds / size,
        "tflops_per_device": tflops,
        "mfu_pct": 100 * tflops / peak if peak else None,
        "peak_tflops": peak,
        "matmul_tflops": matmul,
        "matmul_pct": 100 * tflops / matmul,
        "peak_gib": peak_gib,
        "reserved_gib": reserved_gib,
        "profile": profile,
        "estimate": planned and of_estimate(planned),
        "no_estimate": why,
        "losses": losses,
        "machine": machine() | {"cuda": torch.version.cuda},
    }


# ---- without a GPU ---------------------------------------------------------------------------------------------------


def dry_run(args: argparse.Namespace, cluster: Cluster) -> int:
    """The benchmark's steps on rank 0 of `cluster`, with a stand-in for the driver, and the planner's estimate of them.
    Where this machine has no CUDA build of torch, the estimate alone.

    Raises `UserError` for a layout that does not fit, or a cluster that is not known."""
    expected = planned(args, cluster) if args.compile else None
    if lacks := stand_in.lacking():
        for each in lacks:
            print(f"not run: {each.what}; {each.fix}")
        show_expected(expected, None, args, cluster)
        return 0
    if not stand_in.stands_for(cluster.chip):
        raise UserError(f"{cluster.chip.name} is no CUDA device that this torch has kernels for", fix="8xH100")
    if "FIVEFOLD_CHIP_NAME" not in os.environ:
        environment = stand_in.environment(cluster.chip, cluster.devices_per_node)
        return subprocess.run([sys.executable, *sys.argv], env=environment).returncode
    code = 1
    try:
        show_expected(expected, stood_in(args, cluster), args, cluster)
        code = 0
    except UserError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of NCCL would wait for the other ranks


def stood_in(args: argparse.Namespace, cluster: Cluster) -> Phase:
    """What the last of `--warmup` and one steps asks of rank 0's host and memory, in a process with the stand-in."""
    size, driver, store = cluster.devices_per_node, Driver(), AnswersAll()  # torch keeps no reference to it
    world = world_of(RehearsalRequest(config="", folder="", rank=0, world=cluster.world, local_size=size, steps=0))
    with changed(is_full=True), join(world, store=store):
        run = Run.build(args, world)
        for step in range(args.warmup + 1):
            batch = rows_of(args, run.model, step)
            before, began = driver.counts(), time.process_time()
            run.step(batch)
        after, took = driver.counts(), time.process_time() - began
        memory = torch.cuda.memory_stats()
    return Phase(
        name="step", allocated=memory["allocated_bytes.all.peak"], reserved=memory["reserved_bytes.all.peak"],
        after=None, launches=after.launches - before.launches, syncs=after.syncs - before.syncs, compiles=0,
        seconds=took,
    )  # fmt: skip


def rows_of(args: argparse.Namespace, model: Any, step: int) -> list[MicroBatch]:
    """This data rank's micro batches: random tokens, each row one document."""
    state = state_of(model)
    vocabulary, multiple = model.config.vocab_size, state.plan.layout.row_multiple
    rng = np.random.default_rng([SEED, step, state.placement.data_rank])
    tokens = rng.integers(0, vocabulary, (args.accumulation, args.rows, args.seq_length), dtype=np.uint32)
    length = -(-args.seq_length // multiple) * multiple
    return [assemble([[Piece(row, row[1:])] for row in part], row_length=length, pad_id=0) for part in tokens]


def report(result: dict[str, Any], args: argparse.Namespace) -> None:
    """A few lines for people, and the file."""
    mfu = "MFU unknown (no peak for this device)" if result["mfu_pct"] is None else f"MFU {result['mfu_pct']:.1f}%"
    reserved = f" ({result['reserved_gib']:.2f} reserved)" if result["reserved_gib"] else ""
    print(
        f"{result['model']}, {result['parameters'] / 1e6:,.1f}M parameters, {result['seq_length']} tokens a row, "
        f"{result['layout']} on {result['devices']} x {result['device']}\n"
        f"{result['tokens_per_second_per_device']:,.0f} tokens/s a device, {result['tflops_per_device']:.4g} TFLOP/s: "
        f"{mfu}, {result['matmul_pct']:.1f}% of a matmul measured here; step {result['step_seconds']:.3f} s "
        f"(first {result['first_step_seconds']:.1f} s), peak {result['peak_gib'] or 0:.2f} GiB{reserved}, "
        f"loss {result['losses'][0]:.3f} to {result['losses'][-1]:.3f}"
    )
    for line in beside(result):
        print(line)
    name = f"gpu_train-{result['devices']}x{slug(result['device'])}.json"
    target = args.json or (RESULTS / name if result["device"] != "cpu" else None)
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {target}")


if __name__ == "__main__":
    sys.exit(main())
