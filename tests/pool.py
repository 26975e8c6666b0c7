"""A persistent pool of gloo workers: a call costs some 30 ms, what it runs not counted.

`run_ranks(world, function, *args)` calls a module-level function once on every rank of a gloo world and returns the
results in rank order. Workers live as long as the test session; after an exception or a timeout their pool is
thrown away and the next call starts a fresh one. What workers need is imported once, in the forkserver
(`tests/preload.py`): a fresh worker is a fork, not ten seconds of imports.
"""

import atexit
import faulthandler
import gc
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import chdir
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests import starts

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 180.0
AFTER_FAILURE = 5.0  # seconds for the other ranks to fail too
END_GROUPS = "end groups"
MOST_THREADS = 100  # of a worker, then its pool is started afresh


def unsynchronised(_: int) -> None:
    """In the place of `os.fsync`: no test takes the power from the machine, and disks are slow."""


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds the traceback of every rank that raised."""


def forks() -> Any:
    """The context whose processes are forked from one that has imported everything: one for all of a test process."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    with chdir(ROOT):  # of which alone it finds `tests`; it does without what it does not find, and says nothing
        forkserver.ensure_running()
    return context


def collect_what_is_new() -> None:
    """Turn the collector of a forked process on: what was imported stays, 400,000 objects that it need not look at."""
    gc.freeze()
    gc.enable()


class _Pool:
    def __init__(self, world: int) -> None:
        self.world = world
        context = forks()
        self.store = tempfile.mktemp(prefix="fivefold-pool-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, self.store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = dict[int, tuple[bool, Any]]()
        while waiting := [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]:
            has_failed = any(not ok for ok, _ in answers.values())
            ready = wait(waiting, timeout=AFTER_FAILURE if has_failed else timeout)
            for rank in (self.pipes.index(pipe) for pipe in ready or waiting):
                answers[rank] = self._answer(rank) if ready else (False, "no answer, it hangs")
        errors = [f"rank {rank}: {value}" for rank, (ok, value) in sorted(answers.items()) if not ok]
        if errors:
            raise RankError("\n".join(errors))
        for pipe in self.pipes:  # no rank closes a group that another may still read from
            pipe.send(END_GROUPS)
        return [answers[rank][1] for rank in range(self.world)]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        """(whether the function returned, what it returned or the traceback)."""
        try:
            return self.pipes[rank].recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            return False, self._last_words(rank)

    @property
    def threads(self) -> int:
        """Of the first worker (0 where it cannot be told). Torch remembers every mesh it has seen, and with it groups
        whose threads poll: after a hundred layouts idle workers take half of the machine."""
        folder = f"/proc/{self.processes[0].pid}/task"
        return len(os.listdir(folder)) if os.path.isdir(folder) else 0

    @property
    def was_killed(self) -> bool:
        """A worker ended by a signal: nothing that a test could raise."""
        return any((process.exitcode or 0) < 0 for process in self.processes)

    @property
    def has_ended(self) -> bool:
        """A worker is gone: killed between two calls, by another test or for want of memory."""
        return any(process.exitcode is not None for process in self.processes)

    def _last_words(self, rank: int) -> str:
        """How a rank that is gone ended: its exit code (negative: a signal) and the stack that it left."""
        self.processes[rank].join(10)
        with open(_crash_file(self.store, rank)) as file:
            return f"died, exit code {self.processes[rank].exitcode}\n{file.read()}"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for path in [self.store, *(_crash_file(self.store, rank) for rank in range(self.world))]:
            if os.path.exists(path):
                os.unlink(path)


def _crash_file(store: str, rank: int) -> str:
    return f"{store}.rank{rank}.crash"


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    assert "tests.preload" in sys.modules, "not forked from a process that has imported everything"
    import torch
    import torch.distributed as dist

    crash = open(_crash_file(store, rank), "w")  # noqa: SIM115 - held open for as long as the worker lives
    faulthandler.enable(crash)
    torch.set_num_threads(1)
    collect_what_is_new()
    # At its end a run would give back to the collector all that was imported, and the collection that ends each call
    # would look through it from then on: a third of a second of every rank.
    vars(gc).update(freeze=lambda: None, unfreeze=lambda: None)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world,
        store=dist.FileStore(store, world),
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message == END_GROUPS:
            _end_groups()
            continue
        function, args = message
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _end_groups() -> None:
    """End the process groups a test made: each keeps threads, and a session makes thousands. Torch remembers meshes,
    and these their groups.

    DTensor remembers how it resharded for an operator, on which mesh. A later mesh of the same ranks counts as equal,
    and the ended groups of the first would be asked ("Could not resolve the process group").
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import _get_default_group, _world

    gc.collect()
    for each in gc.get_objects():
        if type(each) is DeviceMesh:
            each._pg_registry.clear()
    for group in list(_world.pg_map):
        if group is not _get_default_group():
            dist.destroy_process_group(group)
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


_pools: dict[int, _Pool] = {}


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_SECONDS, is_last: bool = False
) -> list[Any]:
    """Call `function(*args)` on each of `world` gloo ranks; results in rank order. Raises `RankError`.

    Where a worker was ended by a signal (once in some thousand tests gloo crashes) it is said, and tried once more.
    `is_last`: the workers end with the call, which may leave their world.
    """
    try:
        return _run(world, function, args, timeout)
    except _Killed as killed:
        print(f"a worker was killed, the call is made again: {killed}", file=sys.stderr)
        return _run(world, function, args, timeout)
    finally:
        if is_last:
            end(world)


def end(world: int) -> None:
    """End the workers of a world, which the next call starts afresh: they left it, or are out of step."""
    if world in _pools:
        _pools.pop(world).close()


class _Killed(RankError):
    """A worker was ended by a signal."""


def _run(world: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
    starts.note(f"{world} ranks")
    if world in _pools and (_pools[world].threads > MOST_THREADS or _pools[world].has_ended):
        _pools.pop(world).close()
    if world not in _pools:
        _pools[world] = _Pool(world)
    try:
        return _pools[world].run(function, args, timeout)
    except RankError as error:
        pool = _pools.pop(world)
        was_killed = pool.was_killed
        pool.close()
        if was_killed:
            raise _Killed(str(error)) from None
        raise


@atexit.register
def close_all() -> None:
    """End all workers, and the process that they are forked from."""
    while _pools:
        _pools.popitem()[1].close()
    forkserver._forkserver._stop()
