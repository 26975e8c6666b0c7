"""Collectives between processes of this machine: gloo beside shared memory, microseconds of one.

    python benchmarks/collectives.py               two processes, fp32 and bf16
    python benchmarks/collectives.py --ranks 4

Both take turns, so that the machine's noise hits both alike. Medians and minima are over the turns. Bytes are those of
the larger buffer. Processes have one thread each.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fivefold.ops.cpu import shared_memory
from fivefold.torch_internals import carried_by

SIZES = (8, 256, 2048, 16384)  # KiB
TURNS, LEAST = 15, 0.01  # of each; seconds of a turn


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    if lacks := shared_memory.lacks():
        parser.exit(1, f"no shared memory here: {lacks}\n")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (args.ranks, f"{folder}/store"), nprocs=args.ranks)


def measure(rank: int, ranks: int, store: str) -> None:
    """One rank; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    gloo, shared = dist.new_group(), dist.new_group()
    shared_memory.connect(shared)
    if not carried_by(shared):
        raise SystemExit("the ranks do not share memory")
    say(rank, f"{'KiB':>6} {'type':8} {'collective':14} {'gloo':>16} {'shared memory':>16}   median (least), us")
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            whole = torch.zeros(size * 1024 // dtype.itemsize // ranks * ranks, dtype=dtype)
            part = torch.zeros(len(whole) // ranks, dtype=dtype)
            for name, issue in kinds(whole, part).items():
                found: tuple[list[float], list[float]] = ([], [])
                for _ in range(TURNS):
                    for group, seconds in zip((gloo, shared), found, strict=True):
                        seconds.append(of_one(issue, group, shared))
                texts = [f"{1e6 * median(each):.0f} ({1e6 * min(each):.0f})" for each in found]
                say(rank, f"{size:6} {str(dtype)[6:]:8} {name:14} {texts[0]:>16} {texts[1]:>16}")
    dist.destroy_process_group()


def kinds(whole: torch.Tensor, part: torch.Tensor) -> dict[str, Callable[[dist.ProcessGroup], object]]:
    """Those that training issues most."""
    return {
        "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
    }


def of_one(issue: Callable[[dist.ProcessGroup], object], group: dist.ProcessGroup, meeting: dist.ProcessGroup) -> float:
    """Seconds of one, over a turn: as many repeats on every rank."""
    dist.barrier(meeting)
    started = time.perf_counter()
    issue(group)
    repeats = torch.tensor(int(LEAST / (time.perf_counter() - started)) + 1)
    dist.all_reduce(repeats, dist.ReduceOp.MIN, group=meeting)
    started = time.perf_counter()
    for _ in range(int(repeats)):
        issue(group)
    return (time.perf_counter() - started) / int(repeats)


def say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
