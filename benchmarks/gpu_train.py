"""A Llama of about 1B parameters at 8K tokens in bf16 on a GPU, through fivefold's own path: speed, MFU, peak memory.

python benchmarks/gpu_train.py                           one CUDA GPU; writes benchmarks/results/gpu_train-<GPU>.json
torchrun --nproc-per-node 8 benchmarks/gpu_train.py      FSDP over eight, and how much of its collectives is hidden
torchrun --nproc-per-node 8 benchmarks/gpu_train.py --layout shard2.cp4     any layout
python benchmarks/gpu_train.py --device cpu --tiny       no GPU: only shows that it runs; writes nothing
"""

import argparse
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from common import OPTIONS, RESULTS, SEED, best_gflops, machine, slug
from fivefold.core.errors import UserError
from fivefold.core.layout import Layout
from fivefold.core.units import parse_length
from fivefold.data.batch import MicroBatch, Piece, assemble
from fivefold.launch.world import World, alone, find_world, join
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.discover import facts_of
from fivefold.models.flops import Costs
from fivefold.parallel.apply import parallelize
from fivefold.parallel.state import state_of
from fivefold.training import flops
from fivefold.training.metrics import PeakMemory
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import train_step
from overlap import profile_step

LEARNING_RATE = 1e-4
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def main() -> int:
    """The command: 2 for a request that cannot be met, 1 when a loss is not finite."""
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"this benchmark needs a CUDA GPU, and torch {torch.__version__} sees none\n"
            "to see only that it runs: python benchmarks/gpu_train.py --device cpu --tiny",
            file=sys.stderr,
        )
        return 2
    try:
        world = find_world(args.device) or alone(args.device)
        with join(world):
            result = measure(args, world)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if world.is_first:
        report(result, args)
    return 0 if all(math.isfinite(loss) for loss in result["losses"]) else 1


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
    add("--json", type=Path, default=None, help="where to write the result")
    args = parser.parse_args()
    for name in ("rows", "accumulation", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is not 1 or more")
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu only goes with --tiny: the full model would take hours there")
    args.seq_length = args.seq_length or (64 if args.tiny else 8192)
    args.compile = args.compile and args.device == "cuda"
    return args


def measure(args: argparse.Namespace, world: World) -> dict[str, Any]:
    """Build, warm up, time; this rank's numbers (memory and losses are those of rank 0)."""
    device = torch.device(world.device)
    layout = Layout.parse(f"{args.layout or f'shard{world.size}'}+mb{args.rows}").resolve(world.size)
    started = time.perf_counter()
    memory = PeakMemory(device)
    model = build_meta(load_model_config(args.model, TINY if args.tiny else {}))
    costs = Costs.of(facts_of(model))
    parallelize(model, layout, device=device, seed=SEED, compile_blocks=args.compile)
    optimizer = build_optimizer(model, OPTIONS)
    built = time.perf_counter() - started
    seconds, losses = [], []
    for step in range(args.warmup + args.steps):
        batch = rows_of(args, model, step)
        before = time.perf_counter()
        done = train_step(model, optimizer, batch, learning_rate=LEARNING_RATE, max_grad_norm=OPTIONS.max_grad_norm)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - before)
        losses.append(done.loss)
    peak_gib = memory.gib  # before what follows
    beside: list[dict[str, Any]] = []
    if device.type == "cuda" and world.size > 1:
        batch = rows_of(args, model, args.warmup + args.steps)
        options = {"learning_rate": LEARNING_RATE, "max_grad_norm": OPTIONS.max_grad_norm}
        again = partial(train_step, model, optimizer, batch, **options)
        beside = profile_step(again, state_of(model).mesh.axis_of)
    step_seconds = median(seconds[args.warmup :])
    work = costs.per_token * done.tokens + costs.per_squared_length * done.squared_lengths
    tflops = work / step_seconds / world.size * 1e-12
    peak = flops.peak_tflops(device, layout.precision)
    side = 8192 if device.type == "cuda" else 512
    matmul = best_gflops(side, side, side, torch.bfloat16, device.type) * 1e-3
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "devices": world.size,
        "model": "tiny" if args.tiny else args.model,
        "parameters": costs.parameters,
        "layout": str(layout),
        "compiled": args.compile,
        "seq_length": args.seq_length,
        "tokens_per_step": done.tokens,
        "build_seconds": built,
        "first_step_seconds": seconds[0],
        "step_seconds": step_seconds,
        "steps": seconds[args.warmup :],
        "tokens_per_second_per_device": done.tokens / step_seconds / world.size,
        "tflops_per_device": tflops,
        "mfu_pct": 100 * tflops / peak if peak else None,
        "peak_tflops": peak,
        "matmul_tflops": matmul,
        "matmul_pct": 100 * tflops / matmul,
        "peak_gib": peak_gib,
        "collectives": beside,
        "losses": losses,
        "machine": machine() | {"cuda": torch.version.cuda},
    }


def rows_of(args: argparse.Namespace, model: Any, step: int) -> list[MicroBatch]:
    """This data rank's micro batches: random tokens, each row one document."""
    state = state_of(model)
    vocabulary, multiple = model.config.vocab_size, state.plan.layout.row_multiple
    rng = np.random.default_rng([SEED, step, state.plan.data_rank])
    tokens = rng.integers(0, vocabulary, (args.accumulation, args.rows, args.seq_length), dtype=np.uint32)
    length = -(-args.seq_length // multiple) * multiple
    return [assemble([[Piece(row, row[1:])] for row in part], row_length=length, pad_id=0) for part in tokens]


def report(result: dict[str, Any], args: argparse.Namespace) -> None:
    """A few lines for people, and the file."""
    mfu = "MFU unknown (no peak for this device)" if result["mfu_pct"] is None else f"MFU {result['mfu_pct']:.1f}%"
    print(
        f"{result['model']}, {result['parameters'] / 1e6:,.1f}M parameters, {result['seq_length']} tokens a row, "
        f"{result['layout']} on {result['devices']} x {result['device']}\n"
        f"{result['tokens_per_second_per_device']:,.0f} tokens/s a device, {result['tflops_per_device']:.4g} TFLOP/s: "
        f"{mfu}, {result['matmul_pct']:.1f}% of a matmul measured here; step {result['step_seconds']:.3f} s "
        f"(first {result['first_step_seconds']:.1f} s), peak {result['peak_gib'] or 0:.2f} GiB, "
        f"loss {result['losses'][0]:.3f} to {result['losses'][-1]:.3f}"
    )
    for each in result["collectives"]:
        part = 100 * each["covered"] / (each["milliseconds"] or 1.0)
        spent = f"{each['milliseconds']:.2f} ms a step"
        print(f"{each['kind']} over {each['axis']}: {spent}, {part:.0f}% of it beside compute")
    name = f"gpu_train-{result['devices']}x{slug(result['device'])}.json"
    target = args.json or (RESULTS / name if result["device"] != "cpu" else None)
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {target}")


if __name__ == "__main__":
    sys.exit(main())
