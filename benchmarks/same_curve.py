"""Is the demo's loss curve that of a plain PyTorch loop? The same rows, weights, schedule and clipping, step by step.

    python benchmarks/same_curve.py                  100 steps of the demo with AdamW, fp32 and (where the CPU has
                                                    instructions for it) bf16; writes benchmarks/results/
    python benchmarks/same_curve.py --quick          a toy run in a temporary folder: does it run?
    python benchmarks/same_curve.py --steps 200 optimizer.learning_rate=1e-3       other keys of the run file

fivefold's curve is that of the command itself, `fivefold train`, on its usual processes. The plain loop is
plain_loop.py on the unmodified `transformers` model in one process; packed documents are kept apart by a mask.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

import fivefold
import plain_loop
from common import PRECISIONS, RESULTS, machine, plain_model
from fivefold.config import RunConfig, load_config
from fivefold.core.json_lines import read
from fivefold.data import prepare
from fivefold.launch.world import threads_per_worker
from fivefold.training.model import build_model
from fivefold.training.schedule import learning_rate

ADAMW = ["optimizer.name=adamw", "optimizer.learning_rate=2e-3"]  # what the plain loop has; the demo's is Muon
PARITY_STEPS, FIRST, FOLLOWING = 20, 1e-6, 1e-4  # of the design: fp32 at step 1, and over 20 steps
QUICK = [
    "tokenizer.name_or_path=byte", "data.seq_length=64", "train.global_batch_size=4", "train.micro_batch_size=2",
    "scheduler.warmup_steps=2", "model.overrides.hidden_size=64", "model.overrides.intermediate_size=96",
    "model.overrides.num_hidden_layers=2", "model.overrides.head_dim=16",
]  # fmt: skip


def main() -> int:
    """The command; 1 when the fp32 curve is not that of the plain loop."""
    args = arguments()
    torch.set_num_threads(threads_per_worker(1))
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*ADAMW, *args.overrides, f"train.max_steps={args.steps}"]
        if args.quick:
            overrides = [*QUICK, f"data.train={_small_text(Path(folder))}", *overrides]
        curves = {f"plain {p}": plain_curve(overrides, p) for p in args.precisions}
        curves |= {f"fivefold {p}": fivefold_curve(overrides, p, Path(folder) / p) for p in args.precisions}
    result = {"machine": machine(), "overrides": overrides, "precisions": args.precisions, "curves": curves}
    result["differences"] = {p: difference(curves[f"fivefold {p}"], curves[f"plain {p}"]) for p in args.precisions}
    if len(args.precisions) == 2:
        result["differences"]["plain bf16 from plain fp32"] = difference(curves["plain bf16"], curves["plain fp32"])
    print(*statements(result), sep="\n")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "same_curve.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, args.out / "same_curve.png")
    print(f"written: {args.out / 'same_curve.json'} and same_curve.png")
    return 0 if is_parity(result) else 1


def arguments() -> argparse.Namespace:
    """The command line, checked. bf16 needs fp32 beside it, as the measure of what rounding does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps; default 100 (4 with --quick)")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="fp32, or fp32,bf16")
    parser.add_argument("--quick", action="store_true", help="a toy model on a little text, to see that it runs")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON and the PNG")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the run file")
    args = parser.parse_args()
    args.precisions = args.precisions.split(",")
    if tuple(args.precisions) not in (("fp32",), ("fp32", "bf16")):
        parser.error(f"--precisions {','.join(args.precisions)}: choose fp32, or fp32,bf16")
    args.steps = args.steps or (4 if args.quick else 100)
    args.out = args.out or (Path(tempfile.mkdtemp(prefix="same-curve-")) if args.quick else RESULTS)
    return args


# ---- the two curves -------------------------------------------------------------------------------------------------


def fivefold_curve(overrides: list[str], precision: str, folder: Path) -> list[float]:
    """The losses that `fivefold train` writes, step by step."""
    own = [
        f"precision.compute={precision}", f"run.dir={folder}", "run.name=curve", "log.every=1", "eval.every=0",
        "eval.max_tokens=1k", "sample.every=0", "sample.prompts=[]", "checkpoint.every=0",
    ]  # fmt: skip
    command = [sys.executable, "-m", "fivefold", "train", *overrides, *own]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return [row["train/loss"] for row in read(folder / "curve" / "metrics.jsonl").rows]


def plain_curve(overrides: list[str], precision: str) -> list[float]:
    """The losses of the plain loop on the rows, weights and learning rates of the same run file."""
    config = load_config(None, overrides)
    data = prepare(config)
    model = plain_model(build_model(config, data).config, config.train.seed)
    steps, options = config.train.max_steps or 0, config.optimizer
    batches = (
        data.train.batch(
            step, global_batch_size=config.train.global_batch_size, data_rank=0, data_ranks=1,
            micro_batch_size=config.train.micro_batch_size, row_multiple=config.layout.row_multiple,
        )
        for step in range(steps)
    )  # fmt: skip
    losses = plain_loop.train(
        model, batches, [rate(config, step, steps) for step in range(steps)], bf16=precision == "bf16",
        betas=options.betas, eps=options.eps, weight_decay=options.weight_decay, max_grad_norm=options.max_grad_norm,
    )  # fmt: skip
    return list(losses)


def rate(config: RunConfig, step: int, steps: int) -> float:
    """The learning rate of a step, as the run file asks for it."""
    scheduler = config.scheduler
    return learning_rate(
        step, name=scheduler.name, peak=config.optimizer.learning_rate, warmup_steps=scheduler.warmup_steps,
        total_steps=steps, min_lr_ratio=scheduler.min_lr_ratio,
    )  # fmt: skip


def _small_text(folder: Path) -> Path:
    """fivefold's own source as a text."""
    sources = sorted(Path(fivefold.__file__).parent.glob("core/*.py"))
    text = folder / "small.txt"
    text.write_text("\n".join(source.read_text(encoding="utf-8") for source in sources), encoding="utf-8")
    return text


# ---- what they say --------------------------------------------------------------------------------------------------


def relative(found: list[float], expected: list[float]) -> Any:
    """(found - expected) / expected, step by step."""
    return np.array(found) / np.array(expected) - 1


def difference(found: list[float], expected: list[float]) -> dict[str, float]:
    """How far two curves are apart: at step 1, at most over 20 steps and over all, and on average with its sign."""
    signed = relative(found, expected)
    return {
        "first": float(abs(signed[0])),
        "max_20": float(abs(signed[:PARITY_STEPS]).max()),
        "max": float(abs(signed).max()),
        "mean_signed": float(signed.mean()),
    }


def is_parity(result: dict[str, Any]) -> bool:
    """Whether the fp32 curves agree as the design demands."""
    found = result["differences"]["fp32"]
    return bool(found["first"] <= FIRST and found["max_20"] <= FOLLOWING)


def statements(result: dict[str, Any]) -> list[str]:
    """What was found, in words."""
    differences, steps = result["differences"], len(result["curves"]["plain fp32"])
    lines = [
        f"{name}: step 1 {d['first']:.1e}, at most {d['max_20']:.1e} over {PARITY_STEPS} steps and {d['max']:.1e} over "
        f"{steps}, on average {d['mean_signed']:+.1e}"
        for name, d in ((n if "plain" in n else f"fivefold from plain, {n}", d) for n, d in differences.items())
    ]
    verdict = "is" if is_parity(result) else "IS NOT"
    lines.append(f"fp32: the curve {verdict} that of the plain loop ({FIRST:g} at step 1, {FOLLOWING:g} over 20 steps)")
    if "bf16" in differences:
        ours, theirs = differences["bf16"]["max"], differences["plain bf16 from plain fp32"]["max"]
        lines.append(
            f"bf16: fivefold is at most {ours:.1e} from the plain autocast loop, which is itself at most {theirs:.1e} "
            "from its own fp32. The two round differently: autocast keeps the residual stream in fp32, fivefold in bf16"
        )
    tail = max(1, steps // 10)
    means = ", ".join(f"{name} {np.mean(losses[-tail:]):.4f}" for name, losses in result["curves"].items())
    lines.append(f"mean loss of the last {tail} step{'s' * (tail > 1)}: {means}")
    return lines


def plot(result: dict[str, Any], target: Path) -> None:
    """Both curves above, their relative differences below."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    curves, steps = result["curves"], range(1, len(result["curves"]["plain fp32"]) + 1)
    for name, losses in curves.items():
        above.plot(
            steps, losses, label=name, linewidth=3 if "plain" in name else 1, alpha=0.5 if "plain" in name else 1
        )
    for precision in result["precisions"]:
        apart = abs(relative(curves[f"fivefold {precision}"], curves[f"plain {precision}"]))
        below.semilogy(steps, apart, label=f"fivefold from plain, {precision}")
    if "plain bf16" in curves:
        apart = abs(relative(curves["plain bf16"], curves["plain fp32"]))
        below.semilogy(steps, apart, label="plain bf16 from plain fp32", linestyle=":")
    above.set(ylabel="loss, nats per token", title="The demo's model under AdamW: fivefold and a plain PyTorch loop")
    below.set(ylabel="relative difference", xlabel="optimizer step")
    for panel in (above, below):
        panel.legend(frameon=False)
        panel.grid(alpha=0.2)
    figure.savefig(target, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
