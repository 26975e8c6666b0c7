"""The process of a rank: the real trainer, watched. `python -m fivefold.rehearsal.stage FOLDER`: the request is there,
and what was seen is left beside it."""

import faulthandler
import json
import os
import signal
import sys
import traceback
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from fivefold.config import parse_config
from fivefold.core.errors import UserError
from fivefold.core.interrupts import Stopped
from fivefold.data.prepare import prepare
from fivefold.launch.world import World, join
from fivefold.rehearsal.changes import changed
from fivefold.rehearsal.request import Request, Seen
from fivefold.rehearsal.synthetic import synthetic
from fivefold.rehearsal.watch import Watch
from fivefold.training.run import Trainer
from fivefold.training.run_log import RunLog


def rehearse(request: Request) -> Seen:
    """The run of `request` on its rank, from the build to the save after its last step."""
    watch = Watch.of(request)
    try:
        with ExitStack() as stack:
            stack.enter_context(changed(is_full=request.is_full))
            if not request.is_full:
                import_module("torch.testing._internal.distributed.fake_pg")  # the group that sends nothing
            stack.enter_context(watch.watching())
            stack.enter_context(join(world_of(request)))
            _train(request, watch)
    except Stopped:
        return watch.seen()
    except UserError as error:
        return watch.seen(failed=error.what)
    except Exception as error:
        if watch.is_out_of_memory(error):
            return watch.seen()
        traceback.print_exc()
        return watch.seen(failed=f"{type(error).__name__}: {error}")
    return watch.seen()


def world_of(request: Request) -> World:
    """The rank in its world, as `launch/world.py` would have found it in the environment."""
    if not request.is_full:  # this machine has the memory of one rank to give
        return World(rank=request.rank, size=request.world, backend="fake")
    local = request.rank % request.local_size
    return World(
        rank=request.rank,
        local_rank=local,
        size=request.world,
        local_size=request.local_size,
        device=f"cuda:{local}",
        backend="nccl",
    )


def _train(request: Request, watch: Watch) -> None:
    """As `training.run.train`, without its watchdog: nobody is waited for."""
    config = parse_config(request.config)
    (config.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    data = synthetic(config, Path(request.folder)) if request.synthetic else prepare(config)
    with ExitStack() as stack:
        with watch.phase("build"):
            job = Trainer.build(config, world_of(request), data, RunLog(config.run_dir), stack)
        watch.built(job.model)
        job.run()


def main() -> None:
    """Rehearse, and end this process at once: threads of NCCL would wait for the other ranks."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # says where it is
    folder = Path(sys.argv[1])
    request = Request(**json.loads((folder / "request.json").read_text(encoding="utf-8")))
    seen = json.dumps(rehearse(request).to_json())
    (folder / "seen.json").write_text(seen, encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
