"""What the workers of the launch tests do. Named as `tests.launch.bodies:NAME`."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fivefold.errors import RunFailed, UserError
from fivefold.launch.world import World
from fivefold.training.watchdog import watching


def sum_ranks(request: Mapping[str, Any], world: World) -> None:
    """Every rank writes what it sees to a file of its own."""
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    print(f"hello from rank {world.rank}")
    seen = {"sum": total.item(), "threads": torch.get_num_threads(), "omp": os.environ["OMP_NUM_THREADS"]}
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


def slumber() -> None:
    time.sleep(120)
