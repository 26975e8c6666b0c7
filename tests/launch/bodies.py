"""What the workers of the launch tests do. Named as `tests.launch.bodies:NAME`."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fivefold.core.errors import RunFailed, UserError
from fivefold.launch.world import World
from fivefold.training.watchdog import watching

IMPORTED_BY = os.getpid()


def named(request: Mapping[str, Any], world: World) -> None:
    """The body that the request names: one process imports for all of them."""
    globals()[request["body"]](request, world)


def sum_ranks(request: Mapping[str, Any], world: World) -> None:
    """Every rank writes what it sees to a file of its own."""
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    print(f"hello from rank {world.rank}")
    seen = {"sum": total.item(), "threads": torch.get_num_threads(), "omp": os.environ["OMP_NUM_THREADS"]}
    seen |= {"pid": os.getpid(), "imported_by": IMPORTED_BY}
    Path(request["out"], f"rank-{world.rank}.json").write_text(json.dumps(seen | vars(world)))


def wrong_request(request: Mapping[str, Any], world: World) -> None:
    if world.rank == 1:
        raise UserError("train.jsonl:3 has no key 'text'", fix="set text_key", more="see the docs")
    dist.barrier()


def run_fails(request: Mapping[str, Any], world: World) -> None:
    raise RunFailed("3 steps in a row were not finite")


def crash(request: Mapping[str, Any], world: World) -> None:
    if world.rank == 1:
        print("last words of rank 1", file=sys.stderr)
        raise RuntimeError("boom\nand pages of C++")
    dist.barrier()


def killed(request: Mapping[str, Any], world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait(request: Mapping[str, Any], world: World) -> None:
    """Rank 0 waits inside a collective, the others outside."""
    dist.barrier()
    Path(request["out"], f"pid-{world.rank}").write_text(str(os.getpid()))
    if world.is_first:
        dist.barrier()
    time.sleep(120)


def hang(request: Mapping[str, Any], world: World) -> None:
    """Rank 1 never comes to the collective that rank 0 waits in."""
    with watching(Path(request["out"], "logs"), world.rank, timeout=2.0):
        dist.all_reduce(torch.ones(7))
        if world.rank == 1:
            slumber()
        dist.all_reduce(torch.ones(3))


def fills_its_gpu(request: Mapping[str, Any], world: World) -> None:
    """As torch says it."""
    if world.rank == 1:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of ..."
        )
    dist.barrier()


def slumber() -> None:
    time.sleep(120)


# ---- frozen where no collective is under way -------------------------------------------------------------------------


def sleeps_in_a_save(request: Mapping[str, Any], world: World) -> None:
    """A synchronous save: a thread of rank 1 never ends, rank 0 waits as long as it takes."""
    _in_a_save(request, world, slumber)


def is_stopped_in_a_save(request: Mapping[str, Any], world: World) -> None:
    _in_a_save(request, world, None)


def _in_a_save(request: Mapping[str, Any], world: World, freeze: Any) -> None:
    logs = Path(request["out"], "logs")
    with watching(logs, world.rank, request["timeout"], folder=world.folder), ThreadPoolExecutor(1) as thread:
        group = dist.new_group(group_desc="checkpoint")
        time.sleep(1.0)  # some beats
        if world.rank == 1:
            Path(request["out"], "froze").write_text(str(time.monotonic()))
            save(thread, freeze or stop)
        dist.barrier(group)


def save(thread: ThreadPoolExecutor, freeze: Any) -> None:
    if freeze is stop:
        stop()
    thread.submit(freeze).result()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    slumber()
