"""The rendezvous of ranks under another launcher: a store of torch, at a port of rank 0 or of torchrun's agent.

While ranks wait, missing ones are named, and after a timeout the wait ends. A node may not have started, or another job
has left `RANK` and `WORLD_SIZE` in the environment.
"""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from typing import Any
from uuid import uuid4

from fivefold.core.errors import RunFailed, UserError, first_line
from fivefold.core.terminal import say
from fivefold.core.text import listed

LOOPBACK = "127.0.0.1"
FIRST, EVERY = 10.0, 60.0  # seconds until the first report of missing ranks, and between later ones
_PAUSE = 1.0  # most seconds between two checks
_ANSWER = 10.0  # seconds for a store to answer
_COUNT, _ALL, _WORLD = "fivefold/came", "fivefold/all-came", "fivefold/world"


def meet(rank: int, size: int, host: str, port: int, *, hosts: bool, timeout: float, attempt: int = 0) -> Any:
    """The store of all ranks, once all have arrived. `hosts`: this rank opens it, at `port` of this machine. `attempt`:
    the number of times that torchrun has restarted the ranks; its store outlives them.

    Raises `UserError` if the port is taken, another process is this rank, or world sizes differ; `RunFailed` if a rank
    is missing after `timeout` seconds.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, untyped

    wait = _Wait(timeout)
    opened = _open(size, host, port) if hosts else _reach(rank, size, host, port, wait)
    store = PrefixStore(f"attempt-{attempt}", opened)
    _wait_for_all(store, rank, size, f"{host}:{port}" + (f" (here: {socket.gethostname()})" if hosts else ""), wait)
    return store


class _Wait:
    """Reports a wait to the user, and ends it after a timeout."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._began, self._next = timeout, time.monotonic(), FIRST

    def look(self, what: Callable[[], str]) -> None:
        """Report what is missing (`what()`; "" if another rank does) when it is due, then sleep. Raises `RunFailed`."""
        waited = time.monotonic() - self._began
        if waited >= self._timeout:
            raise RunFailed(
                f"{what() or 'not all ranks have come'} ({self._timeout:g} s: launch.timeout)",
                fix="start the ranks that are missing; or unset RANK and WORLD_SIZE, which another job may have left, "
                "to let fivefold start its workers",
                more="docs/explain/machine.md",
            )
        if waited >= self._next:
            self._next += EVERY
            if said := what():
                say(f"{said} ({waited:.0f} s)", stream=sys.stderr)
        time.sleep(min(_PAUSE, 0.01 + waited / 8))


def _open(size: int, host: str, port: int) -> Any:
    """Open the store at a port of this machine: on the loopback interface if `host` is that, else on all."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, untyped

    try:
        listening = _listen(host, port).detach()
    except OSError as error:
        raise UserError(
            f"rank 0 cannot listen at port {port} of {socket.gethostname()}: {os.strerror(error.errno or 0)}",
            fix="set MASTER_PORT to a free port, the same for every rank, or end what uses it",
        ) from error
    return TCPStore(LOOPBACK, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listening)


def _listen(host: str, port: int) -> socket.socket:
    if host != LOOPBACK and socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 is disabled on this machine
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((LOOPBACK if host == LOOPBACK else "", port))


def _reach(rank: int, size: int, host: str, port: int, wait: _Wait) -> Any:
    """Connect to the store of another process, once it is open."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, untyped

    while True:
        try:
            address = _address(host)
            # Try the port first: torch logs every failed attempt, in C++.
            socket.create_connection((address, port), timeout=_PAUSE).close()
            return _answered(partial(TCPStore, address, port, size, is_master=False, wait_for_workers=False))
        except (OSError, RuntimeError) as error:
            why = "no answer" if isinstance(error, TimeoutError) else first_line(error)
            if isinstance(error, socket.gaierror):
                why = f"no address of {host} is known"
        wait.look(partial(str, f"rank {rank} waits for rank 0 at {host}:{port}: {why}"))


def _answered(connect: Callable[[], Any]) -> Any:
    """Run `connect` in a thread with a timeout: torch waits forever for other services. Raises `TimeoutError`."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(connect())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(_ANSWER)


def _address(host: str) -> str:
    """`host` if its address is known, else Slurm's address of the node with this name. Raises `OSError`."""
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        if not (address := _of_slurm(host)):
            raise
    return address


@cache
def _of_slurm(node: str) -> str:
    """The `NodeAddr` of a node; "" if Slurm knows none."""
    with suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            ["scontrol", "show", "node", node], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5
        )
        if found := re.search(r"\bNodeAddr=(\S+)", asked.stdout):
            return found[1]
    return ""


def _wait_for_all(store: Any, rank: int, size: int, place: str, wait: _Wait) -> None:
    from torch.distributed import DistNetworkError

    try:
        _present(store, rank, size)
        if store.add(_COUNT, 1) >= size:
            store.set(_ALL, "")
        while not store.check([_ALL]):  # polled: torch's own wait logs every second
            wait.look(partial(_missing, store, rank, size, place))
    except DistNetworkError as error:
        raise RunFailed(
            f"rank {rank} was waiting at {place}, and the process that listened there has ended",
            fix="look at what rank 0 has said",
        ) from error


def _present(store: Any, rank: int, size: int) -> None:
    """Register this rank. Raises `UserError` if another process has this rank, or registered with another world size.

    `compare_set` sets a value only if there is none and returns the stored one: that of the first process.
    """
    me = f"process {os.getpid()} of {socket.gethostname()}"
    first = store.compare_set(_WORLD, "", f"{size} {rank}").decode().split()
    if int(first[0]) != size:
        raise UserError(
            f"rank {rank} was started with WORLD_SIZE {size}, and rank {first[1]} with {first[0]}",
            fix="start all ranks with the same WORLD_SIZE",
        )
    mine = f"{me}, {uuid4()}"
    if (came := store.compare_set(_key(rank), "", mine).decode()) != mine:
        raise UserError(
            f"rank {rank} has come already: it is {came.rpartition(', ')[0]}, and this is {me}",
            fix="give each process a RANK of its own: 0 to WORLD_SIZE - 1",
        )


def _missing(store: Any, rank: int, size: int, place: str) -> str:
    """The missing ranks, in words, on the first rank that is present; "" on the others."""
    first = next(each for each in range(size) if store.check([_key(each)]))
    if first != rank:
        return ""
    missing = [each for each in range(size) if not store.check([_key(each)])]
    return f"rank {rank} waits at {place} for rank {listed(missing, 8)}: {size - len(missing)} of {size} have come"


def _key(rank: int) -> str:
    return f"{_COUNT}/{rank}"
