"""`fivefold train` on this machine: join the processes that are already running, or start the workers.

The data is prepared here, before any process group exists, so that no rank waits in a collective for a tokenizer.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.config import RunConfig, check_named, check_supported, load_config
from fivefold.core import history
from fivefold.core.errors import UserError
from fivefold.core.text import say, shown
from fivefold.launch.cluster import cluster_here
from fivefold.launch.events import Listener, following
from fivefold.launch.failure import WorkerDied, one_voice, put_aside, said_once
from fivefold.launch.folder import (
    began_with,
    best_kept_step,
    check_shared,
    claim_fresh,
    holder_of,
    last_logged_step,
    last_saved_step,
    named,
    next_commands,
    open_folder,
)
from fivefold.launch.model import check_data, check_model
from fivefold.launch.processes import Workers
from fivefold.launch.torchrun import find_hosts
from fivefold.launch.worker import execute
from fivefold.launch.workers import gpus, start_workers, with_restarts, worker_count, workers_of_node
from fivefold.launch.world import check_nodes, device_kind, find_world, is_started_by_node, join
from fivefold.parallel.layout import Layout
from fivefold.training import advice

if TYPE_CHECKING:
    from rich.console import Console

    from fivefold.data import Progress
    from fivefold.data.prepare import PreparedData

BODY = "fivefold.training.run:on_worker"
Prove = Callable[[RunConfig, Layout], object]  # raises if a layout is wrong


def run(
    path: Path | None, overrides: Sequence[str] = (), *, nproc: int | None = None, prove: Prove | None = None,
    listener: Listener | None = None,
) -> Path:  # fmt: skip
    """Train the run file at `path` (None: the demo) and return the run folder.

    `prove` checks the layout first. `listener` receives the events of the first rank.
    Raises `UserError` for a request that cannot be met and `RunFailed` for a run that failed.
    """
    world = find_world("cpu")  # finds the world without importing torch; the device is determined below
    if world is None and (hosts := find_hosts()):
        raise UserError(
            f"SageMaker has started {len(hosts.names)} hosts, and this process is on {hosts.here} alone",
            fix="start fivefold train on each of them, or start this with torchrun",
            more="fivefold docs start/sagemaker",
        )
    with one_voice(world):
        config = load_config(path, overrides)
        check_supported(config)
        if config.train.node_range and is_started_by_node(world):
            if path is None and not any(override.startswith("run.name=") for override in overrides):
                raise UserError("train.nodes is set, and the run has no name that all nodes know", fix="run.name=demo")
            return _on_nodes(config, nproc, prove, listener)
        check_nodes(config.train.node_range, world)
        workers = _workers(config, nproc) if world is None else world.size
        if nproc not in (None, workers):
            raise UserError(f"--nproc is {nproc}, but {workers} workers started", fix="leave --nproc out")
        check_model(config, layout=None if config.is_automatic else config.layout.resolve(workers))
        check_named(config)
        is_fresh = path is None and not any(override.startswith("run.name=") for override in overrides)
        if world is None:
            config = _settled(config, workers, workers, is_fresh=is_fresh)
            if prove:
                prove(config, config.layout.resolve(workers))
    if world is None:
        with Workers(BODY, count=workers) as crew:  # they import their modules while the data is prepared
            data = _prepare(config, show=True)
            check_data(config, data)
            if not is_fresh and _is_finished(config, data):
                return config.run_dir
            return _start(claim_fresh(config) if is_fresh else config, crew, listener)
    with one_voice(world):
        _prepare(config, show=world.is_first)
    from fivefold import checkpoint  # imports torch

    here = find_world(config.train.device) or world
    with join(here, timeout=config.launch.timeout), said_once(here):
        if config.is_automatic:  # the first rank chooses for all, and assumes that their devices are like its own
            settled = partial(_settled, config, here.size, here.local_size, is_fresh=is_fresh)
            config = config.with_layout(Layout.parse(checkpoint.on_first_rank(lambda: str(settled().layout))))
        if is_fresh:
            config = named(config, checkpoint.on_first_rank(lambda: claim_fresh(config).run.name))
        holder = checkpoint.on_first_rank(lambda: _opened(config))
        if here.size > here.local_size:
            check_shared(config.run_dir, holder)
        if prove:
            prove(config, config.layout.resolve(here.size))
        execute(BODY, {"config": config.to_yaml(), "events": listener}, here)
    return config.run_dir


def _opened(config: RunConfig) -> str:
    put_aside(open_folder(config))
    return holder_of(config.run_dir)


def _on_nodes(config: RunConfig, nproc: int | None, prove: Prove | None, listener: Listener | None) -> Path:
    from fivefold.training import nodes  # imports torch

    kind = device_kind(config.train.device)
    workers = workers_of_node(kind=kind, devices=gpus() if kind == "cuda" else 0, nproc=nproc)
    nodes.check(config)
    check_model(config, layout=None)
    check_named(config)
    with Workers(BODY, count=workers) as crew:
        data = _prepare(config, show=True)
        check_data(config, data)
        if not _is_finished(config, data):
            nodes.train(config, crew, listener, data=data, settle=partial(_settled, is_fresh=False), prove=prove)
    return config.run_dir


def _workers(config: RunConfig, nproc: int | None) -> int:
    """The number of workers to start. Raises `UserError` for `train.attention: fa3` on a CPU."""
    kind, layout = device_kind(config.train.device), config.written_layout
    if kind == "cpu" and config.train.attention == "fa3":
        raise UserError(
            "train.attention: fa3 is for GPUs, and this run is on cpu",
            fix="train.attention: auto",
            more="fivefold docs explain/machine",
        )
    return worker_count(layout, kind=kind, devices=gpus() if kind == "cuda" else 0, nproc=nproc)


def _settled(config: RunConfig, size: int, local_size: int, *, is_fresh: bool) -> RunConfig:
    """Replace `layout: auto` with a layout for `size` workers: the one recorded in the run folder, else the planner's
    choice. Prints which."""
    if not config.is_automatic:
        return config
    began = None if is_fresh or config.checkpoint.resume == "never" else began_with(config, size)
    if began is not None:
        say(f"layout: auto: {began}, as this run began")
        return config.with_layout(began)
    here = cluster_here(device_kind(config.train.device), size, local_size, config.hardware)
    config, why = advice.chosen(config, here)
    for line in why:
        say(line)
    return config


def _is_finished(config: RunConfig, data: "PreparedData") -> bool:
    """Return whether all steps of the run are done and its folder holds the same config; if so, print it."""
    from fivefold.training.display import open_display
    from fivefold.training.schedule import settled, total_steps

    total = total_steps(config, data)
    if not 0 < total == last_saved_step(config) or (
        config.checkpoint.export_hf and not (config.run_dir / "hf").exists()
    ):
        return False
    try:
        before = load_config(config.run_dir)
    except UserError:  # the workers report it
        return False
    warmup = before.scheduler.warmup_steps
    if not isinstance(warmup, int) or before != settled(config, total, before=warmup):
        return False
    commands = next_commands(
        config, step=total, total_steps=total, best=best_kept_step(config), converses=data.converses
    )
    with open_display(total_steps=total, start=total) as display:
        done = f"this run is finished: {total} of {total} steps are done"
        display.closing([("done", done), *(("" if at else "next", line) for at, line in enumerate(commands))])
    return True


def _start(config: RunConfig, crew: Workers, listener: Listener | None) -> Path:
    kind = device_kind(config.train.device)
    print(f"starting {crew.count} worker{'s' if crew.count > 1 else ''} on {kind} ...", flush=True)
    logs, patience = open_folder(config), config.train.collective_timeout
    with following(listener, logs) as told:
        request = {"config": config.to_yaml(), "device": kind, "may_be_unseen": True, **told}
        with_restarts(
            lambda: _advised(config, crew, partial(start_workers, crew, request, logs=logs, patience=patience)),
            most=config.train.max_restarts,
            steps=lambda: (last_logged_step(config), last_saved_step(config)),
            say=partial(_tell_restart, config),
        )
    return config.run_dir


def _advised(config: RunConfig, crew: Workers, start: Callable[[], None]) -> None:
    """Start the workers. If the system kills one for lack of memory, the error also says what would fit."""
    try:
        start()
    except WorkerDied as death:
        if death.comes_again:
            from fivefold.training.memory import advise

            advise(death, config, crew.count)
        raise


def _tell_restart(config: RunConfig, text: str) -> None:
    say(text)
    with closing(history.Log(config.run_dir, say)) as log:
        log.write("died", last_logged_step(config), what=text)


def _prepare(config: RunConfig, *, show: bool) -> "PreparedData":
    from fivefold.data import prepare

    with preparing() if show else nullcontext() as progress:
        return prepare(config, progress=progress)


@contextmanager
def preparing(console: "Console | None" = None) -> "Iterator[Progress]":
    """Show progress while data is prepared: per stage a bar on a terminal, else a line; nothing for cached data."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = console or Console(file=sys.stdout)
    percentage = TextColumn("{task.percentage:>3.0f}%")
    bars = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), percentage,
        TimeRemainingColumn(compact=True), console=console, transient=True,
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}

    def show(stage: str, done: int, total: int) -> None:
        stage = shown(stage)
        if console.is_terminal:
            bars.start()
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=total)
        elif stage not in tasks:
            tasks[stage] = TaskID(0)
            console.print(f"{stage} ...", highlight=False, markup=False, soft_wrap=True)

    try:
        yield show
    finally:
        if tasks and console.is_terminal:
            bars.stop()
