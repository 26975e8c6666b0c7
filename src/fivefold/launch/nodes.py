"""The meeting of the launchers of several nodes, `train.nodes`: torch's elastic rendezvous in the run folder.

Nodes that train together see one run folder, so no node is special, and none needs the address of another before they
meet. torch decides which nodes take part, and in what order. Its state is a file of JSON: a pickle would run what
another user writes there. Each launcher holds a lock as long as it lives: the others see at once that it has ended. A
node counts as dead when its heartbeat has not changed for 10 s, by the reader's clock. Clocks of different machines are
never compared.
"""

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, untyped
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from fivefold.core.alike import FIX, difference
from fivefold.core.errors import RunFailed, UserError, first_line
from fivefold.core.text import listed
from fivefold.launch.meeting import LOOPBACK
from fivefold.launch.rounds import last_round
from fivefold.launch.workers import CAME, GONE, NodesChanged
from fivefold.launch.world import NodeRanks
from fivefold.torch_internals import (
    close_rendezvous,
    forget_state,
    look_often,
    new_rendezvous,
    participants,
    rendezvous_of_json,
    rendezvous_to_json,
    round_of,
    spare_nodes,
)

FOLDER = ".nodes"
LAST_CALL = timedelta(seconds=1)  # time for further nodes to come once the least number of them is there
HEARTBEAT, MISSED = 1, 10  # seconds between a node's heartbeats, and how many may be missing
LOOK = 0.2  # seconds between two looks at who is there
_WORD = HEARTBEAT * MISSED  # seconds that torch waits for a word of the first node, without a look at whether it lives
_PAUSE = 0.05  # seconds between two looks at what the others have said
_OWN = 0o600
_PAGE = "fivefold docs howto/elastic"
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

    `number`: greater than that of any round before. `meets`: `host:port` for the ranks. `store`: for the launchers of
    this round, also once it is over. `missed`: there was a round without this node since its last one.
    """

    number: int
    node: int
    members: Sequence[Member]
    meets: str
    store: Any
    wait: Callable[[list[str]], None]
    missed: bool = False

    def agreed(self, choose: Callable[[Sequence[Member]], str]) -> str:
        """The choice of the first node, on all of them. Raises `NodesChanged` if it is gone before."""
        if self.node == 0:
            self.store.set("choice", choice := choose(self.members))
            return choice
        self.wait(["choice"])
        return str(self.store.get("choice").decode())

    def told_by_all(self, key: str, mine: str) -> list[str]:
        """The values of all nodes under a name, in order. Raises `NodesChanged` if one is gone before."""
        keys = [f"{key}/{node}" for node in range(len(self.members))]
        self.store.set(keys[self.node], mine)
        self.wait(keys)
        return [self.store.get(each).decode() for each in keys]

    def ranks(self, used: int) -> NodeRanks | None:
        """The ranks of this node if the first `used` nodes train; None if it is not one of them."""
        sizes = [member.workers for member in self.members[:used]]
        if self.node >= used:
            return None
        first = sum(sizes[: self.node])
        return NodeRanks(first=first, size=sum(sizes), node=self.node, nodes=used, meets=self.meets, round=self.number)

    def node_of(self, rank: int) -> int:
        ends = accumulate(member.workers for member in self.members)
        return next(node for node, end in enumerate(ends) if rank < end)

    def blame(self, why: str) -> None:
        """Tell the other nodes that workers of this one died on their own account."""
        self.store.set(f"blame/{self.node}", why)

    def blamed(self) -> list[Member]:
        """The nodes whose workers died on their own account."""
        return [member for node, member in enumerate(self.members) if self.store.check([f"blame/{node}"])]

    def leave(self, why: str) -> None:
        self.store.set(f"left/{self.node}", why)

    def left(self) -> Mapping[Member, str]:
        """The nodes that have said why they leave."""
        keys = {member: f"left/{node}" for node, member in enumerate(self.members)}
        return {member: self.store.get(key).decode() for member, key in keys.items() if self.store.check([key])}


class Meeting:
    """The meeting of a node with the others in the folder `.nodes` of a run folder: a context manager.

    Between `least` and `most` nodes train; `timeout`: seconds to wait until they have come. `about`: plain data that
    has to be the same on all nodes. Raises `UserError` if it is not that of the first node that came.
    """

    def __init__(
        self, run_dir: Path, least: int, most: int, *, timeout: float, about: Mapping[str, Any] | None = None
    ) -> None:
        self._folder, self._least, self._timeout = run_dir / FOLDER, least, timeout
        self._there: Mapping[str, int] = {}
        self._last = 0  # number of the last round of this node
        here = address()
        self._presence = _LauncherLocks(self._folder, here)
        try:
            _agree(self._folder / "agreed", about or {})
        except UserError:
            self._presence.release()
            raise
        # Without this, rank 0 of a later round could be sent to the store of a node that is gone.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        store, self._clock = FileStore(str(self._folder / "store")), Clock(self._presence.lives)
        store.set_timeout(timedelta(seconds=_WORD))
        self._rendezvous = DynamicRendezvousHandler.from_backend(
            "nodes", store, FileBackend(self._folder / "state", self._clock), least, most, local_addr=here,
            timeout=RendezvousTimeout(join=timedelta(seconds=timeout), last_call=LAST_CALL),
            keep_alive_interval=HEARTBEAT, keep_alive_max_attempt=MISSED,
        )  # fmt: skip
        look_often(self._rendezvous, every=LOOK)

    def join(self, workers: int) -> Round:
        """Wait for the next round, with `workers` workers of this node.

        Raises `Ended` if the run ends meanwhile, `NodesChanged` if a node is gone before it has said who it is,
        `RunFailed` if too few nodes come, and `UserError` if the folder cannot be read or written.
        """
        try:
            info = self._rendezvous.next_rendezvous()
        except (RendezvousClosedError, RendezvousGracefulExitError):
            raise _refused(self._folder / "agreed") or Ended from None
        except (RendezvousConnectionError, RuntimeError) as error:
            if "Timeout" in str(error):  # the first node is gone, before it has said where the ranks meet
                raise NodesChanged(GONE) from None
            raise UserError(f"the nodes cannot meet: {first_line(error)}", more=_PAGE) from error
        except RendezvousTimeoutError as error:
            raise RunFailed(
                f"fewer than {self._least} nodes have come in {self._timeout:g} s (train.nodes, launch.timeout)",
                fix="start the same command on each of them, with a run.dir that all see",
                more=_PAGE,
            ) from error
        self._there, number = participants(self._rendezvous), round_of(self._rendezvous)
        is_whole = sorted(self._there.values()) == list(range(info.world_size))
        if not is_whole or info.world_size < self._least:  # one is gone since the round is complete
            raise NodesChanged(GONE)
        missed, self._last = 0 < self._last < number - 1, number
        self._clock.all_there = self._presence.has_all  # the first time nodes may be about to start
        mine = Member(socket.gethostname(), os.getpid(), workers)
        info.store.set(f"member/{info.rank}", json.dumps(mine))
        keys = [f"member/{node}" for node in range(info.world_size)]
        wait = partial(self._wait, info.store)
        wait(keys)
        members = [Member(*json.loads(info.store.get(key))) for key in keys]
        met = info.bootstrap_store_info
        return Round(number, info.rank, members, f"{met.master_addr}:{met.master_port}", info.store, wait, missed)

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
        deadline = time.monotonic() + seconds
        forget_state(self._rendezvous)
        while not (news := self.news()) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        return bool(news)

    def has_ended(self) -> bool:
        with suppress(RendezvousConnectionError):
            return bool(self._rendezvous.is_closed())
        return False

    def end(self, of: Round) -> bool:
        """End the run on all nodes that wait, or will. Returns False if the others have gone on, in another round."""
        try:
            return close_rendezvous(self._rendezvous, of.number)
        except (RendezvousConnectionError, RendezvousTimeoutError):
            return False

    @property
    def spare(self) -> int:
        """The number of nodes that are there and take no part in the round."""
        return spare_nodes(self._rendezvous)

    def close(self) -> None:
        del self._rendezvous  # its heartbeat ends with it
        self._presence.release()


class FileBackend(RendezvousBackend):
    """torch's state of a rendezvous, as JSON in a file, changed under a lock."""

    def __init__(self, file: Path, clock: "Clock") -> None:
        self._file, self._clock = file, clock

    @property
    def name(self) -> str:
        return "file"

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state, and its text as the fencing token; None if there is none."""
        with _Locked(self._file, exclusive=False) as locked:
            text = locked.read()
        return (rendezvous_of_json(text, self._clock), text) if text else None

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool]:
        """Replace the state if it is still the one of `token`. Returns the state, its token, and whether it did."""
        new = rendezvous_to_json(state, self._clock)
        with _Locked(self._file, exclusive=True) as locked:
            before = locked.read()
            if is_set := before == (token or ""):
                locked.write(new)
        text = new if is_set else before
        return rendezvous_of_json(text, self._clock), text, is_set


@dataclass
class _Heartbeat:
    """A text that another node has written, the seconds since this node first read it, and the time that torch was
    given for it."""

    text: str
    age: float
    last_seen: datetime


class Clock:
    """Times in a state of torch's rendezvous by this node's clock alone: a heartbeat is as old as this node has known
    its text. `lives(address, process id)`: whether the launcher of a node does.

    Only time in which this process looks is counted, so that a node that was suspended does not take the others for
    dead. `all_there(nodes)`: whether these, by address and process id, are all nodes whose launchers live; a round then
    waits for no more of them.
    """

    def __init__(self, lives: Callable[[str, int], bool], now: Callable[[], float] = time.monotonic) -> None:
        self._lives, self._now, self._looked = lives, now, now()
        self._heartbeats: dict[tuple[str, int, int] | None, _Heartbeat] = {}
        self.all_there: Callable[[set[tuple[str, int]]], bool] = lambda _: False

    def look(self) -> None:
        """Count the time since the last look."""
        now = self._now()
        for heartbeat in self._heartbeats.values():
            heartbeat.age += min(now - self._looked, 2 * HEARTBEAT)
        self._looked = now

    def last_seen(self, node: tuple[str, int, int], text: str) -> datetime:
        """Time of a node's last heartbeat; long ago, if its launcher has ended."""
        heartbeat = self._of(node, text)
        seen = datetime.now(UTC) - timedelta(seconds=heartbeat.age)
        heartbeat.last_seen = seen if self._lives(*node[:2]) else datetime.min.replace(tzinfo=UTC)
        return heartbeat.last_seen

    def deadline(self, text: str, nodes: Sequence[tuple[str, int, int]]) -> datetime:
        """Time until which a round with `nodes` waits for more."""
        heartbeat = self._of(None, text)
        left = -LAST_CALL if self.all_there({node[:2] for node in nodes}) else LAST_CALL
        heartbeat.last_seen = datetime.now(UTC) + left - timedelta(seconds=heartbeat.age)
        return heartbeat.last_seen

    def text(self, node: tuple[str, int, int] | None, time: datetime) -> str:
        """The text of a time: what another node has written, or a new one for a time that torch has set here."""
        heartbeat = self._heartbeats.get(node)
        return heartbeat.text if heartbeat and heartbeat.last_seen == time else f"{os.getpid()} {time.isoformat()}"

    def _of(self, node: tuple[str, int, int] | None, text: str) -> _Heartbeat:
        heartbeat = self._heartbeats.get(node)
        if heartbeat is None or heartbeat.text != text:
            heartbeat = self._heartbeats[node] = _Heartbeat(text, 0.0, datetime.now(UTC))
        return heartbeat


class _Locked:
    """A file of this user alone, open and locked: a context manager."""

    def __init__(self, file: Path, *, exclusive: bool) -> None:
        self._file, self._exclusive = file, exclusive

    def __enter__(self) -> "_Locked":
        try:
            self._descriptor = _open(self._file)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX if self._exclusive else fcntl.LOCK_SH)
        except OSError as error:
            run_dir = self._file.parents[1]
            what = f"{self._file}: {error.strerror}" if run_dir.is_dir() else f"the run folder {run_dir} is gone"
            raise RendezvousConnectionError(what) from error
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        os.close(self._descriptor)
        if isinstance(error, OSError):  # torch keeps up heartbeats only after errors of its own kind
            raise RendezvousConnectionError(f"{self._file}: {error.strerror}") from error

    def read(self) -> str:
        """The first line; "" if there is none."""
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).partition(b"\n")[0].decode()

    def write(self, line: str) -> None:
        # In one call, so that a process that is killed leaves the old line or the new one.
        os.pwrite(self._descriptor, line.encode() + b"\n", 0)


class _LauncherLocks:
    """The locks that this launcher holds until it ends: one that all share, and one of its own."""

    def __init__(self, folder: Path, here: str) -> None:
        """Take them. Whoever is alone begins anew. `here`: the address of this node."""
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            self._descriptor = _open(folder / "present")
            with suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _begin(folder)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            self._own = _open(self._file(here, os.getpid()))
            fcntl.flock(self._own, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"the nodes cannot meet in {folder}: {error.strerror or error}",
                fix="set run.dir to a filesystem with locks that all nodes see, or start the ranks with "
                "torchrun --nnodes MIN:MAX",
                more=_PAGE,
            ) from error

    def lives(self, there: str, process: int) -> bool:
        """True if a launcher holds its lock."""
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

    def has_all(self, nodes: set[tuple[str, int]]) -> bool:
        """True if no launcher but those of `nodes`, by address and process id, holds its lock."""
        there = (file.name.split("-", 1)[1].rpartition("-") for file in self._folder.glob("lives-*"))
        others = {(address, int(process)) for address, _, process in there} - nodes
        return not any(self.lives(*other) for other in others)

    def release(self) -> None:
        os.close(self._own)
        os.close(self._descriptor)

    def _file(self, there: str, process: int) -> Path:
        return self._folder / f"lives-{there}-{process}"


def _begin(folder: Path) -> None:
    """Remove what an earlier start has left, but for the numbers of its rounds, which go on."""
    state, last = folder / "state", max(map(last_round, (folder.parent, folder.parent / "checkpoints")))
    with suppress(OSError, ValueError, KeyError, TypeError):
        last = max(last, int(json.loads(state.read_text(encoding="utf-8").partition("\n")[0])["round"]) + 1)
    for left in (state, folder / "store", folder / "agreed", *folder.glob("lives-*")):
        left.unlink(missing_ok=True)
    with _Locked(state, exclusive=True) as locked:
        locked.write(new_rendezvous(last + 1))


def _agree(file: Path, about: Mapping[str, Any]) -> None:
    """Leave `about` for the nodes that come later, or compare it with that of the first one. Raises `UserError`; before
    the first round all nodes do, as they would wait for this one."""
    mine, state = json.loads(json.dumps(about)), file.with_name("state")
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    try:
        with _Locked(state, exclusive=True) as rounds, _Locked(file, exclusive=True) as locked:
            now = json.loads(rounds.read() or "{}")
            number = [now.get("round"), now.get("complete")]
            if not (text := locked.read()):
                return locked.write(json.dumps({**here, "about": mine, "round": number}))
            first = json.loads(text)
            if not (unlike := difference(mine, first["about"])):
                return
            name, own, other = unlike
            error = UserError(
                f"{name} is {other} on {first['host']} (process {first['pid']}), which came first, and {own} on "
                f"{here['host']} (process {here['pid']})",
                fix=f"{FIX}; to change them, end all nodes first",
                more=_PAGE,
            )
            if number == first.get("round"):
                locked.write(json.dumps({**first, "refused": error.to_json()}))
                rounds.write(json.dumps({**now, "closed": True}))
    except RendezvousConnectionError as failed:
        raise UserError(f"the nodes cannot meet: {failed}", more=_PAGE) from failed
    raise error


def _refused(file: Path) -> UserError | None:
    """The error of a node that came before the first round, and differed."""
    with _Locked(file, exclusive=False) as locked:
        error = json.loads(locked.read() or "{}").get("refused")
    return error and UserError.from_json(error)


def _open(file: Path) -> int:
    """Open a file for reading and writing. Raises `UserError` if another user could have written it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _OWN)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(descriptor)
        raise UserError(
            f"{file} belongs to another user, or others may write to it",
            fix="remove it, and train as one user on all nodes",
            more=_PAGE,
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


def changed(before: Sequence[Member], now: Sequence[Member], why: Mapping[Member, str] | None = None) -> str:
    """The difference between two rounds, in words; "" if there is none. `why`: what nodes said that have left."""
    said = why or {}
    gone = [f"{member}: {said[member]}" if member in said else str(member) for member in before if member not in now]
    came = [str(member) for member in now if member not in before]
    if not gone and not came:
        return ""
    told = [f"{verb} {listed(nodes, 4)}" for verb, nodes in (("without", gone), ("with", came)) if nodes]
    return f"{len(before)} → {len(now)} nodes: {', '.join(told)}"
