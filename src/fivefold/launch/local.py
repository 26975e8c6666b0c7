"""`fivefold train` on this machine: find the world that is there, or start the workers.

The data is prepared here, before any process group exists, so that nobody waits in a collective for a tokenizer.
"""

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from fivefold.config import RunConfig, check_supported, load_config
from fivefold.core import history
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.layout import Layout
from fivefold.core.terminal import say
from fivefold.launch.events import Listener, following
from fivefold.launch.failure import HANGS, failure_file, failures, hang_flag, is_out_of_memory, place, put_aside
from fivefold.launch.folder import claim_fresh, last_logged_step, last_saved_step, named, open_folder
from fivefold.launch.memory import GIB, Needs, Pressure, address_limit, room
from fivefold.launch.model import check_model
from fivefold.launch.processes import Workers, private_folder
from fivefold.launch.report_once import one_voice, said_once
from fivefold.launch.restart import WorkerDied, with_restarts
from fivefold.launch.watch import Watch
from fivefold.launch.worker import CLOSED, INTERRUPTED, TERMINATED, execute
from fivefold.launch.world import World, device_kind, find_world, join
from fivefold.verification import before_training

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
    layout.resolve(workers if nproc is None else nproc)
    if kind == "cuda" and workers > devices:
        raise UserError(
            f"{layout.product} needs {workers} GPUs, but this machine has {devices}",
            fix=f"choose a layout of {devices}, or {on_cpu}",
            more="docs/layouts.md",
        )
    return workers


def start_workers(verb: str, request: Mapping[str, Any], *, workers: int, logs: Path, patience: float = 0) -> None:
    """Start `workers` processes that do `verb` with `request`, and wait for them.

    Rank 0 keeps this terminal; the others write to `logs/rank-N.log`. `request` is plain data for JSON and says the
    kind of device under `device`. `patience`: seconds that a rank may be silent (0: for ever). Raises the first failing
    worker's `UserError`, `WorkerCrashed` when it was no user's error, `KeyboardInterrupt` on Ctrl-C.
    """
    logs.mkdir(parents=True, exist_ok=True)
    put_aside(logs)
    request_file = logs / "request.json"
    request_file.write_text(json.dumps(request, indent=1), encoding="utf-8")
    command = [sys.executable, "-m", "fivefold.launch.worker", verb, str(request_file)]
    _run_workers(command, workers=workers, logs=logs, patience=patience)


def _run_here(config: RunConfig, *, is_fresh: bool, nproc: int | None, verify: bool, listener: Listener | None) -> Path:
    kind = device_kind(config.train.device)
    workers = worker_count(config.layout, kind=kind, devices=gpus() if kind == "cuda" else 0, nproc=nproc)
    layout = config.layout.resolve(workers)
    check_model(config, layout=layout)
    if verify:
        before_training(config, layout)
    _prepare(config, show=True)
    config = claim_fresh(config) if is_fresh else config
    print(f"starting {workers} worker{'s' if workers > 1 else ''} on {kind} ...", flush=True)
    logs, patience = open_folder(config), config.train.collective_timeout
    with following(listener, logs) as told:
        request = {"config": config.to_yaml(), "device": kind, **told}
        with_restarts(
            lambda: start_workers("train", request, workers=workers, logs=logs, patience=patience),
            most=config.train.max_restarts,
            steps=lambda: (last_logged_step(config), last_saved_step(config)),
            say=partial(_tell_restart, config),
        )
    return config.run_dir


def _tell_restart(config: RunConfig, text: str) -> None:
    """On the screen, and in the run's history."""
    say(text)
    with history.opened(config.run_dir, say) as log:
        log.write("died", last_logged_step(config), what=text)


def _run_inside(
    config: RunConfig, world: World, *, is_fresh: bool, nproc: int | None, verify: bool, listener: Listener | None
) -> Path:
    """This process is one of the workers already."""
    with one_voice(world):
        if nproc is not None and nproc != world.size:
            raise UserError(f"--nproc is {nproc}, but {world.size} workers started", fix="leave --nproc out")
        layout = config.layout.resolve(world.size)
        check_model(config, layout=layout)
        _prepare(config, show=world.is_first)
    from fivefold import checkpoint  # imports torch

    here = find_world(config.train.device) or world
    with join(here):
        config = _agreed_name(config, here) if is_fresh else config
        with said_once(here):
            checkpoint.on_first_rank(lambda: put_aside(open_folder(config)))
            if verify:
                before_training(config, layout)
            execute("train", {"config": config.to_yaml(), "events": listener}, here)
    return config.run_dir


def _agreed_name(config: RunConfig, world: World) -> RunConfig:
    """Rank 0 claims a fresh run folder and tells the others its name."""
    from fivefold.parallel import plain

    return named(config, plain.of_first(claim_fresh(config).run.name if world.is_first else ""))


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


def _run_workers(command: Sequence[str], *, workers: int, logs: Path, patience: float) -> None:
    with private_folder() as folder, Workers(command, count=workers, folder=folder) as started:
        watch, pressure = Watch(folder, started, patience), Pressure()
        try:
            for _ in started.turns():
                pressure.look(started.ids)
                if watch.found_frozen():
                    break
            codes = started.codes
            frozen = watch.tell(logs)
        finally:
            _show_cursor()  # a killed display leaves none behind
        if started.signals and not any(failure["is_users"] for failure in failures(logs)):
            raise KeyboardInterrupt if started.signals[0] == signal.SIGINT else SystemExit(128 + started.signals[0])
        if frozen or any(codes.values()):
            raise _first_failure(logs, codes, pressure, Needs.load(folder)) from None


def _first_failure(logs: Path, codes: Mapping[int, int], pressure: Pressure, needs: Needs | None) -> BaseException:
    """What the first worker to fail left behind; failing that, what its exit code says."""
    if INTERRUPTED in codes.values():
        return KeyboardInterrupt()
    if TERMINATED in codes.values() or CLOSED in codes.values():
        return SystemExit(TERMINATED if TERMINATED in codes.values() else CLOSED)
    killed = {rank: code for rank, code in codes.items() if code < 0 and not failure_file(logs, rank).exists()}
    left = failures(logs)
    if killed or not left:
        return _killed(logs, killed or codes, pressure, needs)
    first = left[0]
    if first["is_users"]:
        kind = UserError if first["exit_code"] == UserError.exit_code else RunFailed
        return kind(first["what"], fix=first["fix"], more=first["more"])
    more = f"log: {logs / 'rank-{}.log'.format(first['rank'])}"
    if hang_flag(logs).exists() or first["type"] in HANGS:
        each = "; ".join(f"rank {failure['rank']}, {failure['last'] or failure['what']}" for failure in left)
        more = f"{each}; where they stand: {logs}/failure-*.json"
    what = f"rank {first['rank']} stopped: {first['what']}"
    if first["type"] == "Hung" and not first["waits"]:
        what += f", which it does not come to: it stands in {place(first['traceback'])}"
    crashed = WorkerCrashed(what, fix="--debug shows where", more=more)
    crashed.traceback, crashed.cause = first["traceback"], first["what"]
    if is_out_of_memory(first):
        crashed.fix, crashed.comes_again = _memory_advice(pressure, needs), True
    return crashed


def _killed(logs: Path, codes: Mapping[int, int], pressure: Pressure, needs: Needs | None) -> WorkerDied:
    rank, code = min(codes.items())
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    fix = None
    comes_again = code == -signal.SIGKILL and pressure.killed
    if comes_again:
        cause += ": the system ran out of memory"
        fix = _memory_advice(pressure, needs)
    elif code == -signal.SIGKILL:
        fix = "somebody or something outside ended it: the system still had memory"
    more = f"log: {logs / f'rank-{rank}.log'}"
    died = WorkerDied(f"rank {rank} {cause}{' and without a word' if code >= 0 else ''}", fix=fix, more=more)
    died.cause, died.comes_again = cause, comes_again
    return died


def _memory_advice(pressure: Pressure, needs: Needs | None) -> str:
    """What the workers took, what there is, and what can be had for less."""
    there = room()
    held = f"the workers held {pressure.held / GIB:.2f} GiB at most" if pressure.held else ""
    total = f"this machine has {there.total / GIB:.2f}" if there else ""
    limit = address_limit()
    addresses = f"ulimit -v gives each process {limit / GIB:.2f} GiB of addresses: raise that first" if limit else ""
    helps = "train.micro_batch_size, data.seq_length and memory.recompute: full make activations smaller"
    advice = needs.advice(there.total if there else 2**62) if needs else helps
    return "; ".join(part for part in (", ".join(filter(None, (held, total))), addresses, advice) if part)


def _show_cursor() -> None:
    with suppress(OSError, ValueError):
        sys.stdout.write("\x1b[?25h" if sys.stdout.isatty() else "")
