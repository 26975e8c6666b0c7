"""`fivefold train` on this machine: find the world that is there, or start the workers through torchelastic.

The data is prepared here, before any process group exists, so that nobody waits in a collective for a tokenizer.
"""

import json
import logging
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any
from uuid import uuid4

from fivefold.config import RunConfig, check_supported, load_config
from fivefold.errors import RunFailed, UserError
from fivefold.launch.events import Listener, following
from fivefold.launch.failure import failure_file, failures, hang_flag
from fivefold.launch.folder import claim_fresh, last_logged_step, last_saved_step, named, open_folder
from fivefold.launch.model import check_model
from fivefold.launch.restart import WorkerDied, with_restarts
from fivefold.launch.voice import one_voice, said_once
from fivefold.launch.world import (
    LOOPBACK,
    World,
    device_kind,
    find_world,
    join,
    worker_environment,
)
from fivefold.layout import MESH_AXES, Layout
from fivefold.verification import before_training
from fivefold.worker import INTERRUPTED, TERMINATED, execute

CPU_WORKERS = 2  # by default: the smallest number that shows parallel training


class WorkerCrashed(WorkerDied):
    """A worker ended on an error that is not the user's; `traceback` is the text of it, for `--debug`."""

    traceback = ""


def run(
    path: Path | None, overrides: Sequence[str] = (), *, nproc: int | None = None, verify: bool = False,
    listener: Listener | None = None,
) -> Path:  # fmt: skip
    """Train the run file at `path` (None: the demo) and return the run folder.

    `verify`: prove the layout on thin weights first. `listener` is told what happens, by the first rank.
    Raises `UserError` for a request that cannot be met and `RunFailed` for a run that failed.
    """
    world = find_world("cpu")  # the place is known before torch is; the device is looked up below
    with one_voice(world):
        config = load_config(path, overrides)
        check_supported(config)
        is_fresh = path is None and not any(override.startswith("run.name=") for override in overrides)
    if world is None:
        return _run_here(config, is_fresh=is_fresh, nproc=nproc, verify=verify, listener=listener)
    return _run_inside(config, world, is_fresh=is_fresh, nproc=nproc, verify=verify, listener=listener)


def worker_count(
    layout: Layout, *, kind: str, devices: int, nproc: int | None, on_cpu: str = "train.device=cpu"
) -> int:
    """How many workers to start: the layout's product; where it holds a -1, `nproc`, else every GPU, or 2 on CPU.

    Raises `UserError` with the arithmetic when `nproc` or the number of GPUs disagrees.
    """
    fixed = prod(degree for degree in layout.shape if degree != -1)
    if layout.dp_shard != -1:
        workers = layout.world
    elif nproc is not None:
        workers = nproc
    else:
        workers = devices if kind == "cuda" else -(-CPU_WORKERS // fixed) * fixed
    with _arithmetic():
        layout.resolve(workers if nproc is None else nproc)
    if kind == "cuda" and workers > devices:
        raise UserError(
            f"{_product(layout)} needs {workers} GPUs, but this machine has {devices}",
            fix=f"choose a layout of {devices}, or {on_cpu}",
            more="docs/layouts.md",
        )
    return workers


def start_workers(verb: str, request: Mapping[str, Any], *, workers: int, logs: Path) -> None:
    """Start `workers` processes that do `verb` with `request`, and wait for them.

    Rank 0 keeps this terminal; the others write to `logs/rank-N.log`. `request` is plain data for JSON and says the
    kind of device under `device`. Raises the first failing worker's `UserError`, `WorkerCrashed` when it was no
    user's error, `KeyboardInterrupt` on Ctrl-C.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for old in (*logs.glob("failure-*.json"), *logs.glob("rank-*.log")):
        old.replace(old.with_name(f"before-{old.name}"))
    hang_flag(logs).unlink(missing_ok=True)
    request_file = logs / "request.json"
    request_file.write_text(json.dumps(request, indent=1), encoding="utf-8")
    _elastic(["-m", "fivefold.worker", verb, str(request_file)], workers=workers, logs=logs)


def _run_here(config: RunConfig, *, is_fresh: bool, nproc: int | None, verify: bool, listener: Listener | None) -> Path:
    kind = device_kind(config.train.device)
    workers = worker_count(config.layout, kind=kind, devices=gpus() if kind == "cuda" else 0, nproc=nproc)
    with _arithmetic():
        layout = config.layout.resolve(workers)
        layout.accumulation(config.train.global_batch_size)
    check_model(config)
    if verify:
        before_training(config, layout)
    _prepare(config, show=True)
    config = claim_fresh(config) if is_fresh else config
    print(f"starting {workers} worker{'s' if workers > 1 else ''} on {kind} ...", flush=True)
    logs = open_folder(config)
    with following(listener, logs) as told:
        request = {"config": config.to_yaml(), "device": kind, **told}
        with_restarts(
            lambda: start_workers("train", request, workers=workers, logs=logs),
            most=config.train.max_restarts,
            steps=lambda: (last_logged_step(config), last_saved_step(config)),
            say=lambda text: print(text, flush=True),
        )
    return config.run_dir


def _run_inside(
    config: RunConfig, world: World, *, is_fresh: bool, nproc: int | None, verify: bool, listener: Listener | None
) -> Path:
    """This process is one of the workers already."""
    with one_voice(world):
        if nproc is not None and nproc != world.size:
            raise UserError(f"--nproc is {nproc}, but {world.size} workers started", fix="leave --nproc out")
        with _arithmetic():
            layout = config.layout.resolve(world.size)
            layout.accumulation(config.train.global_batch_size)
        check_model(config)
        _prepare(config, show=world.is_first)
    here = find_world(config.train.device) or world
    with join(here):
        config = _agreed_name(config, here) if is_fresh else config
        if here.is_first:
            open_folder(config)
        with said_once(here):
            if verify:
                before_training(config, layout)
            execute("train", {"config": config.to_yaml(), "events": listener}, here)
    return config.run_dir


def _agreed_name(config: RunConfig, world: World) -> RunConfig:
    """Rank 0 claims a fresh run folder and tells the others its name."""
    import torch.distributed as dist

    name = [claim_fresh(config).run.name if world.is_first else ""]
    dist.broadcast_object_list(name, src=0)
    return named(config, name[0])


@contextmanager
def _arithmetic() -> Iterator[None]:
    """Adds to the sums of a layout what to do about them and where to read more."""
    try:
        yield
    except UserError as error:
        fix = error.fix or "change the layout, or the number of workers: --nproc; dp_shard -1 takes those that are left"
        raise type(error)(error.what, fix=fix, more=error.more or "docs/layouts.md") from None


def _prepare(config: RunConfig, *, show: bool) -> None:
    from fivefold.data import prepare
    from fivefold.launch.preparing import Preparing

    if not show:
        prepare(config)
        return
    with Preparing() as progress:
        prepare(config, progress=progress)


def gpus() -> int:
    """GPUs that torch sees on this machine."""
    from torch import cuda

    return cuda.device_count()


def _product(layout: Layout) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, layout.shape, strict=True) if size != 1)


def _elastic(command: list[str], *, workers: int, logs: Path) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    scratch = tempfile.mkdtemp(prefix="fivefold-agent-")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=scratch),
    )
    try:
        with worker_environment(workers), _own_signals(), _quiet_elastic():
            elastic_launch(config, sys.executable)(*command)
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + int(stopped.sigval)) from None
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        raise _first_failure(logs, codes) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        sys.stdout.write("\x1b[?25h" if sys.stdout.isatty() else "")  # a killed display leaves no cursor behind


def _first_failure(logs: Path, codes: Mapping[int, int]) -> BaseException:
    """What the first worker to fail left behind; failing that, what its exit code says."""
    if INTERRUPTED in codes.values():
        return KeyboardInterrupt()
    if TERMINATED in codes.values():
        return SystemExit(TERMINATED)
    # SIGTERM is how the agent ends those that are left when one has failed.
    killed = {rank: code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}
    killed = {rank: code for rank, code in killed.items() if not failure_file(logs, rank).exists()}
    left = failures(logs)
    if killed or not left:
        return _killed(logs, killed or codes)
    first = left[0]
    if first["is_users"]:
        kind = UserError if first["exit_code"] == UserError.exit_code else RunFailed
        return kind(first["what"], fix=first["fix"], more=first["more"])
    more = f"log: {logs / 'rank-{}.log'.format(first['rank'])}"
    if hang_flag(logs).exists():
        each = "; ".join(f"rank {failure['rank']}, {failure['what'].rpartition('; ')[2]}" for failure in left)
        more = f"{each}; where they stand: {logs}/failure-*.json"
    crashed = WorkerCrashed(f"rank {first['rank']} stopped: {first['what']}", fix="--debug shows where", more=more)
    crashed.traceback, crashed.cause = first["traceback"], first["what"]
    return crashed


def _killed(logs: Path, codes: Mapping[int, int]) -> WorkerDied:
    rank, code = min(codes.items())
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    fix = None
    if code == -signal.SIGKILL:
        fix = "most often the machine ran out of memory: a smaller train.micro_batch_size or data.seq_length helps"
    more = f"log: {logs / f'rank-{rank}.log'}"
    died = WorkerDied(f"rank {rank} {cause}{' and without a word' if code >= 0 else ''}", fix=fix, more=more)
    died.cause, died.by_chance = cause, code == -signal.SIGKILL
    return died


@contextmanager
def _own_signals() -> Iterator[None]:
    """The elastic agent installs signal handlers; put back those that were there."""
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {each: signal.getsignal(each) for each in handled}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for each, handler in before.items():
                signal.signal(each, handler)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """The agent logs every failure at length; what matters of it is said once, by this module."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if "torch.distributed" in name]
    before = {logger: logger.level for logger in loggers}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)
