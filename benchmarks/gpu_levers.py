"""bf16 against fp8, recompute, offload and sequence lengths on one CUDA GPU: speed, MFU and peak memory of each.

python benchmarks/gpu_levers.py                  all that is not measured yet; `--again` measures anew
python benchmarks/gpu_levers.py --seconds 540    starts nothing that is likely to end later; the next call goes on
python benchmarks/gpu_levers.py --only 8b        the measurements whose name has this in it
python benchmarks/gpu_levers.py --no-kernels     without the comparison of fp8 kernels with their emulation
python benchmarks/gpu_levers.py --device cpu --tiny --only 1b      no GPU: only shows that it runs; writes nothing

First `fp8_kernels.py` holds every fp8 kernel of this GPU against its emulation: what is wrong there makes the rest of
no use. Each measurement is a process of `gpu_train.py`. benchmarks/results/gpu_levers-<GPU>.json is written after each.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, slug
from fivefold.core.units import parse_length

K = 1024
LENGTHS = (16 * K, 32 * K, 64 * K, 128 * K, 256 * K, 512 * K)
LIMIT = 420  # seconds of one measurement


@dataclass(frozen=True)
class Cell:
    """One measurement. `layout`: options of one device. `steps`: timed ones, after `warmup` others."""

    model: str
    length: int
    layout: str = "single"
    compiled: bool = True
    rows: int = 1
    warmup: int = 3
    steps: int = 8

    def __str__(self) -> str:
        return f"{self.model} {self.length // K}K x {self.rows} {self.layout}{'' if self.compiled else ' eager'}"

    @property
    def line(self) -> tuple[Any, ...]:
        """What it shares with measurements that only have longer rows."""
        return self.model, self.layout, self.compiled, self.rows


def cells() -> Iterator[Cell]:
    """What is worth most comes first."""
    small, large, full = "llama-3.2-1b", "llama-3.1-8b", "single+full+offload_optimizer"
    fp8 = ("fp8", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_blockwise")
    yield Cell(small, 8 * K, rows=2)
    yield Cell(large, 8 * K, "single+full")
    yield from (Cell(small, 8 * K, f"single+{recipe}", rows=2) for recipe in fp8)
    yield from (Cell(large, 8 * K, f"single+full+{recipe}") for recipe in fp8[:2])
    yield Cell(large, 128 * K, full, warmup=1, steps=2)
    yield from (Cell(small, 8 * K, f"single+{recompute}", rows=2) for recompute in ("selective", "full"))
    yield Cell(large, 8 * K, "single+selective")
    yield Cell(small, 8 * K, compiled=False, rows=2)
    yield Cell(small, 8 * K, "single+fp8", compiled=False, rows=2)
    for model, layout in ((small, "single"), (small, "single+selective"), (small, "single+full"), (large, full)):
        yield from (Cell(model, length, layout, warmup=1, steps=3) for length in LENGTHS)


def main() -> int:
    """The command: 2 for a request that cannot be met, 1 where a measurement failed for another reason than memory."""
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"this benchmark needs a CUDA GPU, and torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    target = RESULTS / f"gpu_levers-{slug(device)}.json" if args.device == "cuda" else None
    found: dict[str, Any] = {}
    if target and target.exists() and not args.again:
        found = json.loads(target.read_text())["cells"]
    started = time.monotonic()
    wrong = int(target is not None and not args.no_kernels and kernels_differ())
    chosen = list(dict.fromkeys(cell for cell in cells() if args.only in str(cell)))
    for cell in chosen:
        if str(cell) in found:
            continue
        left = args.seconds - (time.monotonic() - started)
        if left < min(LIMIT, args.seconds / 3):
            break
        found[str(cell)] = skipped(cell, chosen, found) or measured(cell, args, min(left, LIMIT))
        print(row(str(cell), found[str(cell)]), flush=True)
        if target:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(
                json.dumps({"device": device, "torch": torch.__version__, "cells": found}, indent=1) + "\n"
            )
    print(*ratios(found), sep="\n")
    missing = [str(cell) for cell in chosen if str(cell) not in found]
    if missing:
        print(f"{len(missing)} not measured yet; the same command goes on")
    return int(wrong or any("failed" in each for each in found.values()))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--seconds", type=float, default=7200.0, help="starts nothing that is likely to end later")
    add("--only", default="", help="measurements whose name has this text")
    add("--again", action="store_true", help="measure anew what the file of results has")
    add("--no-kernels", action="store_true", help="without the comparison of fp8 kernels with their emulation")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="toy models with rows of 64 tokens")
    args = parser.parse_args()
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu only goes with --tiny: the models would take hours there")
    return args


def kernels_differ() -> bool:
    """Whether an fp8 kernel of this GPU fails, or gives something else than its emulation. Writes its own file."""
    target = RESULTS / f"fp8_kernels-{slug(torch.cuda.get_device_name())}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("fp8_kernels.py")), "--json", str(target)]
    return bool(subprocess.run(command, timeout=LIMIT).returncode)


def measured(cell: Cell, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    """What `gpu_train.py` measured; or why not: it does not fit, it took too long, it failed."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        command = [
            sys.executable, str(Path(__file__).with_name("gpu_train.py")), "--model", cell.model,
            "--layout", cell.layout, "--rows", str(cell.rows), "--warmup", str(cell.warmup),
            "--steps", str(cell.steps), "--seq-length", str(parse_length("64") if args.tiny else cell.length),
            "--json", str(target), "--device", args.device,
        ]  # fmt: skip
        command += ["--no-compile"] * (not cell.compiled) + ["--tiny"] * args.tiny
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"more than {limit:.0f} s"}
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            full = "out of memory" in said.lower()
            return {"does not fit": True} if full else {"failed": said.splitlines()[0] if said else done.returncode}
        result: dict[str, Any] = json.loads(target.read_text())
        return result


def skipped(cell: Cell, chosen: list[Cell], found: Mapping[str, Any]) -> dict[str, Any] | None:
    """A longer row than one that does not fit is not tried."""
    shorter = (each for each in chosen if each.line == cell.line and each.length < cell.length)
    return {"does not fit": True} if any("does not fit" in found.get(str(each), {}) for each in shorter) else None


def row(name: str, result: Mapping[str, Any]) -> str:
    """One line of a measurement."""
    if "step_seconds" not in result:
        return f"{name:56} {'does not fit' if 'does not fit' in result else result['failed']}"
    mfu = f"{result['mfu_pct']:5.1f}%" if result["mfu_pct"] is not None else "     -"
    speed = f"{result['tokens_per_second_per_device']:10,.0f} tokens/s"
    return f"{name:56} {speed}  MFU {mfu}  peak {result['peak_gib'] or 0:6.1f} GiB  step {result['step_seconds']:.3f} s"


def ratios(found: Mapping[str, Any]) -> Iterator[str]:
    """fp8 over bf16, where all else is the same."""
    for name, result in found.items():
        base = found.get(name.partition("+fp8")[0] + (" eager" if name.endswith(" eager") else ""), {})
        if "+fp8" in name and "step_seconds" in base and "step_seconds" in result:
            yield f"{name}: {base['step_seconds'] / result['step_seconds']:.2f}x the speed of bf16"


if __name__ == "__main__":
    sys.exit(main())
