"""How long does a save keep training waiting, synchronous and in the background, and what do its checksums cost?

    python benchmarks/reliability/stall.py            a Llama of 110M parameters; writes benchmarks/results/
    python benchmarks/reliability/stall.py --quick    a toy, written nowhere

In one process: weights and both moments of AdamW in fp32. Synchronous and asynchronous saves take turns, five of each
after one of each to warm up; medians. The stall is the time that `Saver.save` takes. Checksums are timed alone, over
the same bytes, as a share of the synchronous save.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from common import OPTIONS, RESULTS, SEED, SHAPES, machine, micro_batch
from fivefold.checkpoint import About, Saver, shard
from fivefold.launch.world import alone, join
from fivefold.layout import Layout
from fivefold.models.build import build_meta
from fivefold.parallel.apply import parallelize
from fivefold.training.optimizer import build_optimizer
from fivefold.training.step import train_step


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a toy model")
    parser.add_argument("--repeats", type=int, default=5, help="saves of each kind")
    args = parser.parse_args()
    shape = SHAPES["tiny" if args.quick else "110M"]
    with join(alone("cpu")), tempfile.TemporaryDirectory() as folder:
        layout = Layout.parse(f"single+mb{shape.rows}+fp32")
        model = parallelize(build_meta(shape.hf_config()), layout, device=torch.device("cpu"), seed=SEED)
        optimizer = build_optimizer(model, OPTIONS)
        train_step(model, optimizer, [micro_batch(shape, 0, packed=False)], learning_rate=1e-3, max_grad_norm=1.0)
        savers = {
            kind: Saver(Path(folder, kind), keep=1, asynchronous=kind == "asynchronous")
            for kind in ("synchronous", "asynchronous")
        }
        stalls: dict[str, list[float]] = {kind: [] for kind in savers}
        whole: dict[str, list[float]] = {kind: [] for kind in savers}
        for step in range(args.repeats + 1):
            for kind, saver in savers.items():
                started = time.perf_counter()
                saver.save(model, optimizer, About(step=step, state={}))
                stalls[kind].append(time.perf_counter() - started)
                saver.wait()
                whole[kind].append(time.perf_counter() - started)
        for saver in savers.values():
            saver.close()
        tensors = [p.detach() for p in model.parameters()] + [
            value for state in optimizer.state.values() for value in state.values() if value.ndim
        ]
        size = sum(tensor.nbytes for tensor in tensors)
        hashing = []
        for _ in range(args.repeats):
            started = time.perf_counter()
            for tensor in tensors:
                shard.checksum_of("key", tensor.to_local() if hasattr(tensor, "to_local") else tensor)
            hashing.append(time.perf_counter() - started)
    save, stall = median(whole["synchronous"][1:]), median(stalls["asynchronous"][1:])
    result: dict[str, Any] = {
        "machine": machine(),
        "bytes": size,
        "repeats": args.repeats,
        "synchronous_seconds": save,
        "asynchronous_stall_seconds": stall,
        "asynchronous_whole_seconds": median(whole["asynchronous"][1:]),
        "stall_over_synchronous": stall / save,
        "checksum_seconds": median(hashing),
        "checksums_over_synchronous": median(hashing) / save,
    }
    print(json.dumps(result, indent=1))
    if not args.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "stall.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
