"""What compiling each block gains: seconds of a training step with and without `train.compile`, side by side.

    python benchmarks/compile.py            15M parameters, Llama and Qwen3; writes benchmarks/results/
    python benchmarks/compile.py --quick    a toy, written nowhere

One process, fp32, rows of four packed documents. The plain and the compiled model take turns, a step each; medians. The
first compiled step, which compiles, is reported apart, and so are graph breaks: there must be none.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig

from common import OPTIONS, RESULTS, SEED, SHAPES, Shape, machine, micro_batch
from fivefold.launch.world import alone, join
from fivefold.models.build import build_meta
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import train_step

FAMILIES = ("llama", "qwen3")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a toy model")
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each")
    args = parser.parse_args()
    shape = SHAPES["tiny" if args.quick else "15M"]
    with join(alone("cpu")):
        rows = [measured(family, shape, args.steps) for family in FAMILIES]
    result = {"machine": machine(), "threads": torch.get_num_threads(), "rows": rows}
    print(json.dumps(result, indent=1))
    if not args.quick:
        (RESULTS / "compile.json").write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(row["graph_breaks"] for row in rows) else 0


def measured(family: str, shape: Shape, steps: int) -> dict[str, Any]:
    """Both models of a family, a step each by turns."""
    torch._dynamo.reset()
    counters.clear()
    values = {**shape.hf_config().to_dict(), "model_type": family, "head_dim": shape.hidden // shape.heads}
    config = AutoConfig.for_model(**values)
    layout = Layout.parse(f"single+mb{shape.rows}+fp32")
    models = {}
    for name in ("plain", "compiled"):
        model = parallelize(build_meta(config), layout, seed=SEED, compile_blocks=name == "compiled")
        models[name] = (model, build_optimizer(model, OPTIONS))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, list[float]] = {name: [] for name in models}
    for step in range(steps + 2):  # one compiles, one more for what is compiled when documents differ
        for name, (model, optimizer) in models.items():
            batch = micro_batch(shape, step, packed=True)
            started = time.perf_counter()
            result = train_step(model, optimizer, [batch], learning_rate=1e-4, max_grad_norm=1.0)
            seconds[name].append(time.perf_counter() - started)
            losses[name].append(result.loss)
    plain, compiled = (median(seconds[name][2:]) for name in models)
    return {
        "family": family,
        "plain_seconds": plain,
        "compiled_seconds": compiled,
        "speedup": plain / compiled,
        "first_step_seconds": seconds["compiled"][0],
        "graph_breaks": sum(counters["graph_break"].values()),
        "largest_loss_difference": max(
            abs(a - b) / a for a, b in zip(losses["plain"], losses["compiled"], strict=True)
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
