"""The meeting of the launchers of several nodes, `train.nodes`: torch's elastic rendezvous in the run folder.

Nodes that train together see one run folder, so no node is special, and none needs the address of another before they
meet. torch decides which nodes take part, and in what order. Its state is a file of JSON: a pickle would run what
another user writes there. Each launcher holds a lock as long as it lives: the others see at once that it has ended. A
machine that has lost its power or its way to the folder is gone when its signs of life stay out.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, untyped
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from fivefold.core.errors import RunFailed, UserError
from fivefold.core.text import listed
from fivefold.launch.meeting import LOOPBACK
from fivefold.launch.workers import CAME, GONE, NodesChanged
from fivefold.launch.world import NodeRanks
from fivefold.torch_internals import participants, rendezvous_of_json, rendezvous_to_json

FOLDER = ".nodes"
LAST_CALL = timedelta(seconds=1)  # time for further nodes to come once the least number of them is there
HEARTBEAT, MISSED = 1, 10  # seconds between a node's signs of life, and how many may be missing
_PAUSE = 0.05  # seconds between two looks at what the others have said
_OWN = 0o600
_SIOCGIFADDR = 0x8915


class Ended(Exception):
    """The run has ended on the other nodes, while this one waited."""


class Member(NamedTuple):
    """A node of a round: its host, the id of its launcher, and the number of its workers."""

    host: str
    pid: int
    workers: int

    def __str__(self) -> str:
        return f"{self.host} (process {self.pid})"


@dataclass
class Round:
    """The nodes that train together until one is gone or another one comes; this one is number `node`.

    `meets`: `host:port` for the ranks. `store`: for the launchers of this round.
    """

    node: int
    members: Sequence[Member]
    meets: str
    store: Any
    wait: Callable[[list[str]], None]

    def agreed(self, choose: Callable[[Sequence[Member]], str]) -> str:
        """What the first node chooses, on all of them. Raises `NodesChanged` if it is gone before."""
        if self.node == 0:
            self.store.set("choice", choice := choose(self.members))
            return choice
        self.wait(["choice"])
        return str(self.store.get("choice").decode())

    def ranks(self, used: int) -> NodeRanks | None:
        """The ranks of this node if the first `used` nodes train; None if it is not one of them."""
        sizes = [member.workers for member in self.members[:used]]
        if self.node >= used:
            return None
        return NodeRanks(first=sum(sizes[: self.node]), size=sum(sizes), node=self.node, nodes=used, meets=self.meets)


class Meeting:
    """The meeting of a node with the others in the folder `.nodes` of a run folder: a context manager.

    Between `least` and `most` nodes train; `timeout`: seconds to wait until they have come.
    """

    def __init__(self, run_dir: Path, least: int, most: int, *, timeout: float) -> None:
        self._folder, self._least, self._timeout = run_dir / FOLDER, least, timeout
        self._there: frozenset[str] = frozenset()
        here = address()
        self._presence = _Presence(self._folder, here)
        # Without this, rank 0 of a later round could be sent to the store of a node that is gone.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        store = FileStore(str(self._folder / "store"))
        self._rendezvous = DynamicRendezvousHandler.from_backend(
            "nodes", store, FileBackend(self._folder / "state", self._presence.lives), least, most, local_addr=here,
            timeout=RendezvousTimeout(join=timedelta(seconds=timeout), last_call=LAST_CALL),
            keep_alive_interval=HEARTBEAT, keep_alive_max_attempt=MISSED,
        )  # fmt: skip

    def join(self, workers: int) -> Round:
        """Wait for the next round, with `workers` workers of this node.

        Raises `Ended` if the run ends meanwhile, `NodesChanged` if a node is gone before it has said who it is, and
        `RunFailed` if too few nodes come.
        """
        try:
            info = self._rendezvous.next_rendezvous()
        except RendezvousClosedError:
            raise Ended from None
        except RendezvousTimeoutError as error:
            raise RunFailed(
                f"fewer than {self._least} nodes have come in {self._timeout:g} s (train.nodes, launch.timeout)",
                fix="start the same command on each of them, with a run.dir that all see",
                more="docs/howto/elastic.md",
            ) from error
        self._there = participants(self._rendezvous)
        mine = Member(socket.gethostname(), os.getpid(), workers)
        info.store.set(f"member/{info.rank}", json.dumps(mine))
        keys = [f"member/{node}" for node in range(info.world_size)]
        wait = partial(self._wait, info.store)
        wait(keys)
        members = [Member(*json.loads(info.store.get(key))) for key in keys]
        met = info.bootstrap_store_info
        return Round(info.rank, members, f"{met.master_addr}:{met.master_port}", info.store, wait)

    def _wait(self, store: Any, keys: list[str]) -> None:
        """Wait for values of the other nodes of this round. Raises `NodesChanged` if one is gone, and `Ended`."""
        while not store.check(keys):
            if self.news() == GONE:
                raise NodesChanged(GONE)
            if self.has_ended():
                raise Ended
            time.sleep(_PAUSE)

    def news(self) -> str:
        """`GONE` if a node of this round is no longer there, `CAME` if another one waits, else ""."""
        try:
            waiting = self._rendezvous.num_nodes_waiting()
        except RendezvousConnectionError:
            return ""
        if participants(self._rendezvous) != self._there:
            return GONE
        return CAME if waiting else ""

    def has_news_within(self, seconds: float) -> bool:
        """True if there are news, now or soon."""
        deadline = time.monotonic() + seconds
        while not (news := self.news()) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        return bool(news)

    def has_ended(self) -> bool:
        """True if the run has ended on another node."""
        return bool(self._rendezvous.is_closed())

    def end(self) -> None:
        """End the run on all nodes that wait, or will."""
        self._rendezvous.shutdown()

    def close(self) -> None:
        """Leave; the others notice."""
        del self._rendezvous  # its signs of life end with it
        self._presence.release()


class FileBackend(RendezvousBackend):
    """torch's state of a rendezvous, as JSON in a file, changed under a lock. `lives(address, process id)`: whether the
    launcher of a node does."""

    def __init__(self, file: Path, lives: Callable[[str, int], bool]) -> None:
        self._file, self._lives = file, lives

    @property
    def name(self) -> str:
        return "file"

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state, and its text as the fencing token; None if there is none."""
        with _Locked(self._file, exclusive=False) as locked:
            text = locked.read()
        return (rendezvous_of_json(text, self._lives), text) if text else None

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool]:
        """Replace the state if it is still the one of `token`. Returns the state, its token, and whether it did."""
        new = rendezvous_to_json(state)
        with _Locked(self._file, exclusive=True) as locked:
            before = locked.read()
            if is_set := before == (token or ""):
                locked.write(new)
        text = new if is_set else before
        return rendezvous_of_json(text, self._lives), text, is_set


class _Locked:
    """A file of this user alone, open and locked: a context manager."""

    def __init__(self, file: Path, *, exclusive: bool) -> None:
        self._file, self._exclusive = file, exclusive

    def __enter__(self) -> "_Locked":
        import fcntl

        try:
            self._descriptor = _open(self._file)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX if self._exclusive else fcntl.LOCK_SH)
        except OSError as error:
            raise RendezvousConnectionError(f"{self._file}: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self) -> str:
        """The first line; "" if there is none."""
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).partition(b"\n")[0].decode()

    def write(self, line: str) -> None:
        # In one call, so that a process that is killed leaves the old line or the new one.
        os.pwrite(self._descriptor, line.encode() + b"\n", 0)


class _Presence:
    """The locks that this launcher holds until it ends: one that all share, and one of its own."""

    def __init__(self, folder: Path, here: str) -> None:
        """Take them. Whoever is alone removes what an earlier start has left. `here`: the address of this node."""
        self._folder = folder
        try:
            import fcntl
        except ImportError:
            raise UserError("train.nodes needs Linux or macOS", fix="start the ranks with torchrun") from None
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            self._descriptor = _open(folder / "present")
            with suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in (folder / "state", folder / "store", *folder.glob("lives-*")):
                    left.unlink(missing_ok=True)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            self._own = _open(self._file(here, os.getpid()))
            fcntl.flock(self._own, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"the nodes cannot meet in {folder}: {error.strerror or error}",
                fix="set run.dir to a filesystem with locks that all nodes see, or start the ranks with "
                "torchrun --nnodes MIN:MAX",
                more="docs/howto/elastic.md",
            ) from error

    def lives(self, there: str, process: int) -> bool:
        """True if a launcher holds its lock."""
        import fcntl

        try:
            descriptor = os.open(self._file(there, process), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Give them back."""
        os.close(self._own)
        os.close(self._descriptor)

    def _file(self, there: str, process: int) -> Path:
        return self._folder / f"lives-{there}-{process}"


def _open(file: Path) -> int:
    """Open a file for reading and writing. Raises `UserError` if another user could have written it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _OWN)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(descriptor)
        raise UserError(
            f"{file} belongs to another user, or others may write to it",
            fix="remove it, and train as one user on all nodes",
            more="docs/howto/elastic.md",
        )
    return descriptor


def address() -> str:
    """An address of this machine that other nodes can reach: that of its name, else one of its interfaces."""
    candidates = []
    with suppress(OSError):
        candidates += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    candidates += _of_interfaces()
    return next((found for found in candidates if not found.startswith("127.") and _is_own(found)), LOOPBACK)


def _of_interfaces() -> list[str]:
    """The IPv4 address of each interface, on Linux."""
    import fcntl

    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                asked = struct.pack("256s", name.encode()[:15])
                addresses.append(socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)[20:24]))
    return addresses


def _is_own(candidate: str) -> bool:
    """True if an interface of this machine, or of this network namespace, has the address."""
    try:
        socket.create_server((candidate, 0)).close()
    except OSError:
        return False
    return True


def changed(before: Sequence[Member], now: Sequence[Member]) -> str:
    """The difference between two rounds, in words; "" if there is none."""
    gone, came = ([member for member in some if member not in other] for some, other in ((before, now), (now, before)))
    if not gone and not came:
        return ""
    told = [f"{verb} {listed(nodes, 4)}" for verb, nodes in (("without", gone), ("with", came)) if nodes]
    return f"{len(before)} → {len(now)} nodes: {', '.join(told)}"
