"""Run a body once over the ranks of a layout and return its result: over new workers, or in the world of this
process."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from fivefold.launch.processes import Workers, kept_if_one_dies
from fivefold.launch.worker import imported
from fivefold.launch.workers import gpus, start_workers, worker_count
from fivefold.launch.world import World, alone, device_kind, find_world, join
from fivefold.parallel.layout import Layout

Body = Callable[[Mapping[str, Any], World], Any]
_STDIN = "stdin"  # key of a request: the pipe that the first rank reads as its standard input
_READ = 2**16  # bytes at once


def run_once(
    module: str, request: Mapping[str, Any], *, layout: str, device: str = "auto", what: str, reads: bool = False,
    patience: float = 0,
) -> Any:  # fmt: skip
    """The value of `module.on_rank(request, world)` on the first rank, as JSON values.

    `module.on_worker` is `as_worker(on_rank)`. `device`: auto, cpu or cuda. `what`: names the folder of the workers'
    logs. `reads`: the first rank reads this process's standard input, from `standard_input(request)`. `patience`:
    seconds that a worker may be silent (0: forever). Raises `UserError` if the layout does not fit the machine.
    """
    world = find_world(device)
    if world is None:
        kind = device_kind(device)
        devices = gpus() if kind == "cuda" else 0
        workers = worker_count(Layout.parse(layout), kind=kind, devices=devices, nproc=None, on_cpu="--device cpu")
        if workers > 1:
            return _over_workers(module, request, workers, kind, what=what, reads=reads, patience=patience)
    on_rank: Body = imported(module).on_rank
    with join(world or alone(device)) as here:
        return on_rank(request, here)


def as_worker(body: Body) -> Callable[[Mapping[str, Any], World], None]:
    """The body of a worker; it writes the first rank's result to a file."""

    def on_worker(request: Mapping[str, Any], world: World) -> None:
        found = body(request["body"], world)
        if world.is_first:
            Path(request["result"]).write_text(json.dumps(found), encoding="utf-8")

    return on_worker


def _over_workers(
    module: str, request: Mapping[str, Any], workers: int, device: str, *, what: str, reads: bool, patience: float
) -> Any:
    """Run over new workers. The folder of their logs is kept only after a failure, whose message names it."""
    with kept_if_one_dies(what) as logs:
        result, pipe = logs / "result.json", logs / "stdin"
        body = {**request, _STDIN: str(pipe)} if reads else dict(request)
        outer = {"body": body, "result": str(result), "device": device}
        with _forwarded(pipe) if reads else nullcontext(), Workers(f"{module}:on_worker", count=workers) as crew:
            start_workers(crew, outer, logs=logs, patience=patience)
        return json.loads(result.read_text(encoding="utf-8"))


@contextmanager
def _forwarded(pipe: Path) -> Iterator[None]:
    """Inside, copy standard input into `pipe`. Workers are in a session of their own, where terminals cannot be
    read."""
    os.mkfifo(pipe, 0o600)
    threading.Thread(target=_forward, args=(pipe,), daemon=True).start()
    yield


def _forward(pipe: Path) -> None:
    with suppress(OSError), pipe.open("wb", buffering=0) as out:  # the reader has gone
        while part := os.read(0, _READ):  # not `sys.stdin`: its lock would be held when this process ends
            out.write(part)


def standard_input(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the launching process's standard input, without their ends. For the first rank."""
    if _STDIN not in request:
        yield from (line.rstrip("\n") for line in iter(sys.stdin.readline, ""))
        return
    with Path(request[_STDIN]).open(encoding="utf-8", errors="replace") as lines:
        yield from (line.rstrip("\n") for line in iter(lines.readline, ""))
