"""The rendezvous of ranks under another launcher: a store of torch, at a port of rank 0 or of torchrun's agent.

While ranks wait, missing ones are named, and after a timeout the wait ends. A node may not have started, or another job
has left `RANK` and `WORLD_SIZE` in the environment. Each rank that waits renews its heartbeat. Once rank 0 sees that of
all ranks, it opens a round with keys of its own: a rank that came and died is missing until it comes again.
"""

import errno
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
from ipaddress import ip_address
from typing import Any, NamedTuple
from uuid import uuid4

from fivefold.core.errors import RunFailed, UserError, first_line
from fivefold.core.text import listed, say

LOOPBACK = "127.0.0.1"
FIRST, EVERY = 10.0, 60.0  # seconds until the first report of missing ranks, and between later ones
_PAUSE = 1.0  # most seconds between two checks
_ANSWER = 10.0  # seconds for a store to answer
_GONE = 3.0  # seconds without a heartbeat after which a rank counts as ended: it has one each `_PAUSE`
_ROUND, _ENDED = "fivefold/round", "ended"  # key: the processes of all ranks, or that its store ends


def meet(rank: int, size: int, host: str, port: int, *, hosts: bool, timeout: float) -> Any:
    """The store of all ranks, once all are present. `hosts`: this rank opens it, at `port` of this machine; otherwise
    it may be torchrun's, which outlives the ranks, and keys of earlier ranks are not seen.

    Raises `UserError` if the port is taken, another process is this rank, or world sizes differ; `RunFailed` if a rank
    is missing after `timeout` seconds.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, untyped

    wait = _Wait(timeout)
    store = _open(size, host, port) if hosts else _reach(rank, size, host, port, wait)
    place = f"{host}:{port}" + (f" (here: {socket.gethostname()})" if hosts else "")
    try:
        return PrefixStore(_wait_for_all(store, rank, size, place, wait), store)
    except BaseException:
        if hosts:  # the others read this before the store ends: torch prints stacks of C++ if it is in use
            store.set(_ROUND, _ENDED)
            time.sleep(2 * _PAUSE)
        raise


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
                more="fivefold docs explain/machine",
            )
        if waited >= self._next:
            self._next += EVERY
            if said := what():
                say(f"{said} ({waited:.0f} s)", stream=sys.stderr)
        time.sleep(min(_PAUSE, 0.01 + waited / 8))


def _open(size: int, host: str, port: int) -> Any:
    """Open the store at a port of this machine: see `_listen`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, untyped

    try:
        listening = _listen(host, port)
    except OSError as error:
        raise UserError(
            f"rank 0 cannot listen at port {port} of {socket.gethostname()}: {os.strerror(error.errno or 0)}",
            fix="set MASTER_PORT to a free port, the same for every rank, or end what uses it",
        ) from error
    bound = str(listening.getsockname()[0])
    here = LOOPBACK if bound in ("::", "0.0.0.0") else bound
    return TCPStore(here, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _listen(host: str, port: int) -> socket.socket:
    """A socket at the one address that `host` names. On all addresses of this machine if it names several or none of
    this machine's, or by a name the loopback interface, as /etc/hosts may: other machines may resolve it otherwise."""
    found = {LOOPBACK} if host == "localhost" else set[str]()
    with suppress(OSError):
        found = found or {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    for address in found if len(found) == 1 and (is_loopback(host) or not any(map(is_loopback, found))) else ():
        try:
            return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # the address of a service in front of this machine
                raise
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 is disabled on this machine
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def is_loopback(host: str) -> bool:
    """True for an address, or a name, that means the machine itself on every machine."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


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


def _wait_for_all(store: Any, rank: int, size: int, place: str, wait: _Wait) -> str:
    """Wait until all ranks are present at once. Returns the name of this round, the same on each of them."""
    from torch.distributed import DistNetworkError

    presence = _RankPresence(store, rank, size, place)
    try:
        try:
            while not (name := presence.round()):
                wait.look(presence.missing)
            return name
        finally:
            presence.withdraw()
    except DistNetworkError as error:
        raise _store_has_ended(rank, place) from error


class OthersGone(RunFailed):
    """A rank waited to meet or to connect to others, one of which has ended."""


def _store_has_ended(rank: int, place: str) -> OthersGone:
    return OthersGone(
        f"rank {rank} was waiting at {place}, and the process that listened there has ended",
        fix="look at what rank 0 has said",
    )


class _Heartbeat(NamedTuple):
    """A heartbeat, the value of a rank's key: the same but for `number` as long as a process waits."""

    process: str  # unique over all machines and starts
    number: int
    size: int
    pid: int
    host: str


class _RankPresence:
    """The heartbeat of this rank, renewed whenever it looks, and its view of the others' heartbeats.

    torchrun's store outlives its ranks, and the last heartbeat of a dead process stays there. Only one that changes
    while this rank looks is of a living process. Clocks of different machines are never compared.
    """

    def __init__(self, store: Any, rank: int, size: int, place: str) -> None:
        self._store, self._rank, self._place = store, rank, place
        self._next = _Heartbeat(uuid4().hex, 0, size, os.getpid(), socket.gethostname())
        self._last = ""  # value that the next heartbeat replaces
        self._seen: dict[
            int, tuple[str, float, bool]
        ] = {}  # by rank: the heartbeat, since when, and whether it is a change
        self._living: list[int] = []
        if rank == 0:
            for member in range(size):
                store.compare_set(_key(member), "", "")  # all can then be read in one call

    def round(self) -> str:
        """Renew the heartbeat. Returns the name of the round that this process is in; "" before rank 0 has opened it.

        Raises `UserError` if another process has this rank, or started with another world size; `RunFailed` if rank 0
        has ended, and the store with it.
        """
        self._renew()
        if self._rank == 0:
            beats = [beat.decode() for beat in self._store.multi_get([*map(_key, range(self._next.size))])]
            living = [rank for rank, beat in enumerate(beats) if self._lives(rank, beat)]
            self._living = [rank for rank in living if _parsed(beats[rank]).size == self._next.size]
            if len(self._living) == len(beats):
                self._store.set(_ROUND, " ".join(beat.split()[0] for beat in beats))
        elif self._lives(0, first := self._read(_key(0))):
            size = _parsed(first).size
            if size != self._next.size:
                raise UserError(
                    f"rank {self._rank} was started with WORLD_SIZE {self._next.size}, and rank 0 with {size}",
                    fix="start all ranks with the same WORLD_SIZE",
                )
        members = self._read(_ROUND).split()
        if members == [_ENDED]:
            raise _store_has_ended(self._rank, self._place)
        return members[0] if members[self._rank : self._rank + 1] == [self._next.process] else ""

    def missing(self) -> str:
        """The missing ranks, in words, on rank 0, and on the others if rank 0 itself is missing; "" otherwise."""
        waits = f"rank {self._rank} waits at {self._place} for rank"
        if self._rank != 0:
            return "" if self._lives(0, self._read(_key(0))) else f"{waits} 0"
        missing = [rank for rank in range(self._next.size) if rank not in self._living]
        ended = [rank for rank in missing if self._seen[rank][2]]
        had_come = f"; rank {listed(ended, 8)} had come, and ended" if ended else ""
        return f"{waits} {listed(missing, 8)}: {len(self._living)} of {self._next.size} have come{had_come}"

    def withdraw(self) -> None:
        with suppress(RuntimeError):  # the store has ended
            self._store.compare_set(_key(self._rank), self._last, "")

    def _renew(self) -> None:
        self._next = self._next._replace(number=self._next.number + 1)
        mine = " ".join(map(str, self._next))
        found = self._store.compare_set(_key(self._rank), self._last, mine).decode()
        if found == mine:
            self._last = mine
        elif self._lives(self._rank, found):
            other, me = (f"process {beat.pid} of {beat.host}" for beat in (_parsed(found), self._next))
            raise UserError(
                f"rank {self._rank} has come already: it is {other}, and this is {me}",
                fix="give each process a RANK of its own: 0 to WORLD_SIZE - 1",
            )
        elif not found or self._age(self._rank) >= _GONE:
            self._last = found

    def _lives(self, rank: int, beat: str) -> bool:
        """True if `beat`, which the store holds now, is of a living process."""
        if rank not in self._seen or self._seen[rank][0] != beat:
            self._seen[rank] = beat, time.monotonic(), rank in self._seen
        return bool(beat) and self._seen[rank][2] and self._age(rank) < _GONE

    def _age(self, rank: int) -> float:
        return time.monotonic() - self._seen[rank][1]

    def _read(self, key: str) -> str:
        """The value of a key; "" if there is none, for which torch would wait."""
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _parsed(text: str) -> _Heartbeat:
    process, number, size, pid, host = text.split(" ", 4)
    return _Heartbeat(process, int(number), int(size), int(pid), host)


def _key(rank: int) -> str:
    return f"fivefold/came/{rank}"
