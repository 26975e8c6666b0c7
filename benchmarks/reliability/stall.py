"""How long does a save keep training waiting, synchronous and in the background, and what do its checksums cost?

    python benchmarks/reliability/stall.py            a Llama of 110M parameters; writes benchmarks/results/
    python benchmarks/reliability/stall.py --quick    a toy, written nowhere

In one process: weights and both moments of AdamW in fp32. Synchronous saves, asynchronous ones, and synchronous ones
whose checksums are not computed take turns in a random order, 15 of each after one of each to warm up; medians. The
stall is the time that `Saver.save` takes. A save hashes every byte twice: as it is written, and as it is read back.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from common import OPTIONS, RESULTS, SEED, SHAPES, machine, micro_batch
from fivefold.checkpoint import Metadata, Saver, shard
from fivefold.launch.world import alone, join
from fivefold.models.build import build_meta
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import train_step


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a toy model")
    parser.add_argument("--repeats", type=int, default=15, help="saves of each kind")
    args = parser.parse_args()
    shape = SHAPES["tiny" if args.quick else "110M"]
    with join(alone("cpu")), tempfile.TemporaryDirectory() as folder:
        layout = Layout.parse(f"single+mb{shape.rows}+fp32")
        model = parallelize(build_meta(shape.hf_config()), layout, device=torch.device("cpu"), seed=SEED)
        optimizer = build_optimizer(model, OPTIONS)
        train_step(model, optimizer, [micro_batch(shape, 0, packed=False)], learning_rate=1e-3, max_grad_norm=1.0)
        savers = {
            kind: Saver(Path(folder, kind), keep=1, asynchronous=kind == "asynchronous")
            for kind in ("synchronous", "asynchronous", "unhashed")
        }
        stalls: dict[str, list[float]] = {kind: [] for kind in savers}
        whole: dict[str, list[float]] = {kind: [] for kind in savers}
        for step in range(args.repeats + 1):
            for kind in random.Random(step).sample(sorted(savers), len(savers)):
                saver = savers[kind]
                with patch.object(shard, "_hasher", Nothing) if kind == "unhashed" else nullcontext():
                    started = time.perf_counter()
                    saver.save(model, optimizer, Metadata(step=step, state={}))
                    stalls[kind].append(time.perf_counter() - started)
                    saver.wait()
                    whole[kind].append(time.perf_counter() - started)
        for saver in savers.values():
            saver.close()
        size = sum(path.stat().st_size for path in Path(folder, "synchronous").glob("*/*.safetensors"))
    save, stall = median(whole["synchronous"][1:]), median(stalls["asynchronous"][1:])
    unhashed = median(whole["unhashed"][1:])
    result: dict[str, Any] = {
        "machine": machine(),
        "bytes": size,
        "repeats": args.repeats,
        "synchronous_seconds": save,
        "asynchronous_stall_seconds": stall,
        "asynchronous_whole_seconds": median(whole["asynchronous"][1:]),
        "stall_over_synchronous": stall / save,
        "seconds": whole,
        "unhashed_seconds": unhashed,
        "checksums_over_synchronous": (save - unhashed) / save,
    }
    print(json.dumps(result, indent=1))
    if not args.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "stall.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


class Nothing:
    """A hasher that does not look."""

    def __init__(self, *_: Any) -> None: ...

    def update(self, _: Any) -> None: ...

    def hexdigest(self) -> str:
        return "0" * 32


if __name__ == "__main__":
    sys.exit(main())
