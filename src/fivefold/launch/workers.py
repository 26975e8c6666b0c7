"""The workers of a command on this machine: their number, start, restarts after a death, and the first failure."""

import json
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fivefold.core.errors import RunFailed, UserError
from fivefold.core.files import writing
from fivefold.core.units import GIB
from fivefold.launch.failure import (
    HANGS,
    Suspected,
    WorkerDied,
    failure_file,
    failures,
    hang_flag,
    is_of_others,
    is_out_of_memory,
    place,
    put_aside,
    room_for_failures,
)
from fivefold.launch.meeting import OthersGone
from fivefold.launch.memory import ENDING, Pressure, room
from fivefold.launch.processes import Awaits, Workers, private_folder
from fivefold.launch.watch import BeatWatch
from fivefold.launch.worker import CLOSED, INTERRUPTED, TERMINATED
from fivefold.launch.world import NodeRanks
from fivefold.parallel.layout import Layout

CPU_WORKERS = 2  # by default: the smallest number that trains in parallel


def worker_count(
    layout: Layout, *, kind: str, devices: int, nproc: int | None, on_cpu: str = "train.device=cpu"
) -> int:
    """The number of workers to start: the layout's product; if it contains a -1, `nproc`, else every GPU, or 2 on CPU.

    Raises `UserError` with the arithmetic if `nproc` or the number of GPUs disagrees.
    """
    fixed = prod(degree for degree in layout.shape if degree != -1)
    if not layout.rest:
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
            more="fivefold docs explain/layouts",
        )
    return workers


@dataclass(frozen=True)
class OtherNodes:
    """The nodes with which this one trains: its `ranks` among theirs. `news`: `GONE` if one of them is no longer there,
    `CAME` if another one waits to take part, else "". `awaits`: whether a worker may still write the step that it holds
    to memory."""

    ranks: NodeRanks
    news: Callable[[], str]
    awaits: Awaits = lambda ranks: False


CAME, GONE = "came", "gone"
LEAVE_SECONDS = 2.0  # from SIGTERM to SIGKILL, for workers whose peers on another node are gone


class NodesChanged(Exception):
    """The workers ended because the nodes that train have changed; the last step is saved unless a node is gone."""


def start_workers(
    workers: Workers, request: Mapping[str, Any], *, logs: Path, patience: float = 0, others: OtherNodes | None = None
) -> None:
    """Start `workers`, which call their `body(request, world)`, and wait for them.

    `request` is plain data for JSON with the kind of device under `device`. Rank 0 keeps this terminal; the others
    write to `logs/rank-N.log`. `patience`: seconds that a rank may be silent (0: forever). `others`: nodes with the
    other ranks, with the same `logs`, new for this start. Raises the first failing worker's `UserError`, `WorkerDied`
    if it was no user's error, `KeyboardInterrupt` on Ctrl-C, `NodesChanged` if `others` did.
    """
    among = others.ranks if others else None
    file, first = logs / (f"request-{among.node}.json" if among else "request.json"), among.first if among else 0
    with writing(logs, instead=""):
        logs.mkdir(parents=True, exist_ok=True)
        if among is None:
            put_aside(logs)
        file.write_text(json.dumps(request, indent=1), encoding="utf-8")
    reserved = room_for_failures(logs, workers.count, first=first)
    workers.awaits = others.awaits if others else lambda ranks: False
    with private_folder() as folder, reserved, workers.started(file, folder, among):
        watch, pressure, news = BeatWatch(folder, workers, patience), Pressure(), ""
        try:
            for _ in workers.turns():
                pressure.look(workers.ids)
                if watch.found_frozen():
                    break
                if not (others and workers.ids):  # nobody to end before the fork
                    continue
                before, news = news, others.news() or news
                if news == GONE:  # its ranks are waited for in vain
                    (folder / ENDING).touch()
                    workers.end(grace=LEAVE_SECONDS)
                    break
                if news != before:
                    workers.send(signal.SIGTERM, workers.running)  # all ranks save and end after the same step
            codes = {first + number: code for number, code in workers.codes.items()}
            if any(codes.values()):
                (folder / ENDING).touch()
            frozen = watch.tell(logs)
        finally:
            _show_cursor()  # a killed display leaves none behind
        if workers.signals and not any(failure["is_users"] for failure in failures(logs)):
            raise KeyboardInterrupt if workers.signals[0] == signal.SIGINT else SystemExit(128 + workers.signals[0])
        if watch.server and not failures(logs):
            died = WorkerDied(watch.server, more=f"logs: {logs}")
            died.cause = watch.server
            raise died
        is_changed = any(codes.values()) and (news or {TERMINATED, INTERRUPTED} & {*codes.values()})
        own = [each for each in failures(logs) if each["is_users"] and each["type"] != OthersGone.__name__]
        if others and is_changed and not own:
            raise NodesChanged(news)
        if frozen or watch.server or any(codes.values()):
            raise _first_failure(logs, codes, pressure) from None


def with_restarts(
    start: Callable[[], None], *, most: int, steps: Callable[[], tuple[int, int]], say: Callable[[str], None]
) -> None:
    """Call `start`, and again when it raises `WorkerDied`, up to `most` times without a new checkpoint in between.

    `steps`: (the last logged step, the last saved step). Raises the last `WorkerDied` when the restarts are used up,
    and at once if it is certain to recur or the same cause occurred twice at the same step.
    """
    restarts, last, saved = 0, None, -1
    while True:
        try:
            return start()
        except WorkerDied as death:
            step, newest = steps()
            same = last == (death.cause, step)
            restarts = restarts if newest <= saved else 0
            if same or death.comes_again or restarts == most:
                raise _final(death, step, same=same, restarts=restarts) from None
            last, saved, restarts = (death.cause, step), newest, restarts + 1
            origin = f"from step {newest}" if newest else "from the start"
            say(f"{death.what} at step {step}; starting again {origin} (restart {restarts} of {most})")


def _final(death: WorkerDied, step: int, *, same: bool, restarts: int) -> WorkerDied:
    what = death.what
    if same:
        what += f", twice at step {step}: it would come again"
    elif restarts:
        what += f", after {restarts} restarts without a new checkpoint"
    final = type(death)(what, fix=death.fix, more=death.more)
    vars(final).update({**vars(death), "what": what})
    return final


def workers_of_node(*, kind: str, devices: int, nproc: int | None) -> int:
    """The number of workers of one of several nodes: `nproc`, else every GPU, or 2 on CPU. Raises `UserError`."""
    if kind == "cuda" and nproc is not None and nproc > devices:
        raise UserError(f"--nproc is {nproc}, but this machine has {devices} GPUs", fix=f"--nproc {devices}")
    return nproc or (devices if kind == "cuda" else CPU_WORKERS)


def gpus() -> int:
    from torch import cuda

    return cuda.device_count()


def _first_failure(logs: Path, codes: Mapping[int, int], pressure: Pressure) -> BaseException:
    """The failure file of the first worker to fail; without one, an error from its exit code."""
    if INTERRUPTED in codes.values():
        return KeyboardInterrupt()
    if TERMINATED in codes.values() or CLOSED in codes.values():
        return SystemExit(TERMINATED if TERMINATED in codes.values() else CLOSED)
    killed = {rank: code for rank, code in codes.items() if code < 0 and not failure_file(logs, rank).exists()}
    left = failures(logs)
    if killed or not left:
        return _killed(logs, killed or codes, pressure)
    first = left[0]
    if first["is_users"]:
        if suspects := first["suspects"]:
            return Suspected(first["what"], fix=first["fix"], more=first["more"], ranks=suspects)
        if first["type"] == OthersGone.__name__:
            return OthersGone(first["what"], fix=first["fix"], more=first["more"])
        kind = UserError if first["exit_code"] == UserError.exit_code else RunFailed
        return kind(first["what"], fix=first["fix"], more=first["more"])
    more = f"log: {logs / 'rank-{}.log'.format(first['rank'])}"
    if hang_flag(logs).exists() or first["type"] in HANGS:
        each = "; ".join(f"rank {failure['rank']}, {failure['last'] or failure['what']}" for failure in left)
        more = f"{each}; where they stand: {logs}/failure-*.json"
    what = f"rank {first['rank']} stopped: {first['what']}"
    if first["type"] == "Hung" and not first["waits"]:
        what += f", which it does not come to: it stands in {place(first['traceback'])}"
    crashed = WorkerDied(what, fix="--debug shows where", more=more)
    crashed.traceback, crashed.cause = first["traceback"], first["what"]
    crashed.is_own = any(failure["rank"] in codes and not is_of_others(failure) for failure in left)
    if is_out_of_memory(first):
        crashed.fix, crashed.comes_again = _memory_advice(pressure), True
    return crashed


def _killed(logs: Path, codes: Mapping[int, int], pressure: Pressure) -> WorkerDied:
    rank, code = min(codes.items())
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    fix = None
    comes_again = code == -signal.SIGKILL and pressure.killed
    if comes_again:
        cause += ": the system ran out of memory"
        fix = _memory_advice(pressure)
    elif code == -signal.SIGKILL:
        fix = "somebody or something outside ended it: the system still had memory"
    more = f"log: {logs / f'rank-{rank}.log'}"
    died = WorkerDied(f"rank {rank} {cause}{' and without a word' if code >= 0 else ''}", fix=fix, more=more)
    died.cause, died.comes_again = cause, comes_again
    died.is_own = code != -signal.SIGABRT  # as NCCL ends a process whose peers are gone
    return died


def _memory_advice(pressure: Pressure) -> str:
    """The memory that the workers took, the memory of the machine, and ways to need less."""
    there = room()
    held = f"the workers held {pressure.held / GIB:.2f} GiB at most" if pressure.held else ""
    total = f"this machine has {there.total / GIB:.2f}" if there else ""
    helps = "train.micro_batch_size, data.seq_length and memory.recompute: full make activations smaller"
    return "; ".join(filter(None, (", ".join(filter(None, (held, total))), helps)))


def _show_cursor() -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed when this process began: None
        sys.stdout.write("\x1b[?25h" if sys.stdout.isatty() else "")
