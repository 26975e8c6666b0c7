"""The meeting of the launchers of several nodes, `train.nodes`: a state in the run folder, changed under a lock.

Nodes that train together see one run folder, so no node is special, and none needs the address of another before they
meet. Each launcher holds a lock as long as it lives: the others see at once that it has ended. A node also counts as
dead when its heartbeat has not changed for 10 s, by the reader's clock. Clocks of different machines are never
compared.
"""

import fcntl
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]  # public, untyped

from fivefold.core.alike import FIX, difference
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.text import listed
from fivefold.launch.meeting import LOOPBACK
from fivefold.launch.rounds import last_round
from fivefold.launch.workers import CAME, GONE, NodesChanged
from fivefold.launch.world import NodeRanks

FOLDER = ".nodes"
LAST_CALL = 1.0  # seconds for further nodes to come once the least number of them is there
HEARTBEAT, MISSED = 1, 10  # seconds between a node's heartbeats, and how many may be missing
LOOK = 0.2  # seconds between two looks at who is there
_PAUSE = 0.05  # seconds between two looks at what the others have said
_OWN = 0o600
_PAGE = "fivefold docs howto/elastic"
_SIOCGIFADDR = 0x8915


class Ended(Exception):
    """The run has ended on the other nodes, while this one waited."""


class Unreachable(Exception):
    """The folder of the meeting cannot be read or written, or its state is damaged."""


class Member(NamedTuple):
    """A node of a round: its host, the id of its launcher, and the number of its workers."""

    host: str
    pid: int
    workers: int

    def __str__(self) -> str:
        return f"{self.host} (process {self.pid})"


@dataclass
class NodeRound:
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
        self._folder, self._least, self._most, self._timeout = run_dir / FOLDER, least, most, timeout
        self._there: list[str] = []  # nodes of the last round of this node, and its number
        self._last = 0
        self._came, self._since = list[str](), 0.0  # those that wait for a round, and since when
        self._here = address()
        self._name = f"{self._here}-{os.getpid()}"
        self._locks = _LauncherLocks(self._folder, self._name)
        try:
            _agree(self._folder / "agreed", about or {})
        except UserError:
            self._locks.release()
            raise
        self._store = FileStore(str(self._folder / "store"))
        self._state = MeetingState(self._folder / "state", self._name, self._locks.lives)
        self._is_closed = threading.Event()
        threading.Thread(target=self._keep_up, name="heartbeat", daemon=True).start()

    def _keep_up(self) -> None:
        while not self._is_closed.wait(HEARTBEAT):
            with suppress(Unreachable):  # a disk may fail for a moment
                self._state.beat()

    def join(self, workers: int) -> NodeRound:
        """Wait for the next round, with `workers` workers of this node.

        Raises `Ended` if the run ends meanwhile, `NodesChanged` if a node is gone before it has said who it is,
        `RunFailed` if too few nodes come, and `UserError` if the folder cannot be read or written.
        """
        try:
            number, self._there = self._gathered()
        except Unreachable as error:
            raise UserError(f"the nodes cannot meet: {error}", more=_PAGE) from error
        missed, self._last = 0 < self._last < number - 1, number
        node, store = self._there.index(self._name), PrefixStore(str(number), self._store)
        if node == 0:
            with socket.create_server(("", 0)) as free:
                store.set("meets", f"{self._here}:{free.getsockname()[1]}")
        store.set(f"member/{node}", json.dumps(Member(socket.gethostname(), os.getpid(), workers)))
        keys, wait = [f"member/{node}" for node in range(len(self._there))], partial(self._wait, store)
        wait(["meets", *keys])
        members = [Member(*json.loads(store.get(key))) for key in keys]
        return NodeRound(number, node, members, store.get("meets").decode(), store, wait, missed)

    def _gathered(self) -> tuple[int, list[str]]:
        """Wait for a round of this node: its number and its nodes, in order."""
        self._state.change(self._leave)
        waited = 0.0
        while self._name not in (state := self._state.change(self._gather))["members"]:
            if state["closed"]:
                raise _refused(self._folder / "agreed") or Ended
            if waited >= self._timeout:
                self._state.change(self._leave)
                raise RunFailed(
                    f"fewer than {self._least} nodes have come in {self._timeout:g} s (train.nodes, launch.timeout)",
                    fix="start the same command on each of them, with a run.dir that all see",
                    more=_PAGE,
                )
            waited += LOOK * (len(state["members"]) < self._most)  # there may be no place for long
            time.sleep(LOOK)
        return state["round"], state["nodes"]

    def _leave(self, state: dict[str, Any]) -> None:
        for of in ("members", "waiting"):
            state[of] = [name for name in state[of] if name != self._name]

    def _gather(self, state: dict[str, Any]) -> None:
        """Wait for the next round, and begin it if it is time to: once all have left the last one."""
        if self._name in state["members"]:
            return
        if self._name not in state["waiting"]:
            state["waiting"].append(self._name)
            state["beats"].setdefault(self._name, 0)
        came, now = state["waiting"][: self._most], time.monotonic()
        if came != self._came:
            self._came, self._since = came, now
        if state["members"] or state["closed"] or len(came) < self._least:
            return
        # The first time nodes may be about to start; later, those that live are known.
        are_all = len(came) == self._most or (self._last > 0 and self._locks.has_all(came))
        if are_all or now - self._since >= LAST_CALL:
            state["round"] += 1
            state["nodes"] = state["members"] = sorted(came, key=_in_order)
            state["waiting"] = state["waiting"][self._most :]

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
            state = self._state.look()
        except Unreachable:
            return ""
        if (state["round"], state["members"]) != (self._last, self._there):
            return GONE
        return CAME if state["waiting"] and len(self._there) < self._most else ""

    def has_news_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        self._state.forget()
        while not (news := self.news()) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        return bool(news)

    def has_ended(self) -> bool:
        with suppress(Unreachable):
            return bool(self._state.look()["closed"])
        return False

    def end(self, of: NodeRound) -> bool:
        """End the run on all nodes that wait, or will. Returns False if the others have gone on, in another round."""

        def close(state: dict[str, Any]) -> None:
            state["closed"] |= state["round"] == of.number and self._name in state["members"]

        try:
            return bool(self._state.change(close)["closed"])
        except Unreachable:
            return False

    @property
    def spare(self) -> int:
        """The number of nodes that are there and take no part in the round, by the state that was last read."""
        return len(self._state.seen["waiting"])

    def close(self) -> None:
        self._is_closed.set()
        self._locks.release()


def _in_order(name: str) -> tuple[str, int]:
    address, _, process = name.rpartition("-")
    return address, int(process)


_NOBODY: dict[str, Any] = {"nodes": [], "members": [], "waiting": [], "beats": {}, "closed": False}


class MeetingState:
    """The state of a meeting, as JSON in a file.

    `round`: the number of the last round. `nodes`: those it began with, in order. `members`: those that have not left
    it. `waiting`: nodes that wait for the next one, as they came. `beats`: the heartbeats of all. `closed`: the run has
    ended.

    Nodes that are gone are left out. A heartbeat is as old as this node has known it. Only time in which this process
    looks is counted, so that a node that was suspended does not take the others for dead.
    """

    def __init__(
        self, file: Path, name: str, lives: Callable[[str], bool], now: Callable[[], float] = time.monotonic
    ) -> None:
        """`name`: this node. `lives(name)` is true if the launcher of a node lives."""
        self._file, self._name, self._lives, self._now = file, name, lives, now
        self._lock = threading.RLock()  # the heartbeat has a thread of its own
        self._ages: dict[str, tuple[int, float]] = {}  # the last heartbeat of a node, and its age
        self.seen = _NOBODY  # the state that was last read
        self._looked = now()  # when that was
        self._is_read = False

    def change(self, act: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The state after `act` has changed it. Raises `Unreachable`."""
        with self._lock, _Locked(self._file, exclusive=True) as locked:
            before = locked.read()
            self.seen = self._of_living(before)
            act(self.seen)
            if (text := json.dumps(self.seen)) != before:
                locked.write(text)
            return self.seen

    def look(self) -> dict[str, Any]:
        """The state, at most `LOOK` seconds old. Raises `Unreachable`."""
        with self._lock:
            if not self._is_read or self._now() - self._looked >= LOOK:
                with _Locked(self._file, exclusive=False) as locked:
                    self.seen = self._of_living(locked.read())
            return self.seen

    def forget(self) -> None:
        """Let the next look read the state, whenever it was last read."""
        self._is_read = False

    def beat(self) -> None:
        def renew(state: dict[str, Any]) -> None:
            state["beats"][self._name] = state["beats"].get(self._name, 0) + 1

        self.change(renew)

    def _of_living(self, text: str) -> dict[str, Any]:
        try:
            state, now = {**_NOBODY, **json.loads(text)}, self._now()
        except ValueError:
            what = f"{self._file} is damaged: end the run on all nodes, then start it again"
            raise Unreachable(what) from None
        passed, self._looked = min(now - self._looked, 2 * HEARTBEAT), now
        for name, beat in state["beats"].items():
            known, age = self._ages.get(name, (None, 0.0))
            self._ages[name] = beat, age + passed if known == beat else 0.0
        all_nodes = {*state["beats"], *state["members"], *state["waiting"]}
        there = {name for name in all_nodes if name == self._name or self._is_there(name)}
        state["beats"] = {name: beat for name, beat in state["beats"].items() if name in there}
        state["members"], state["waiting"] = (
            [name for name in state[of] if name in there] for of in ("members", "waiting")
        )
        self._is_read = True
        return state

    def _is_there(self, name: str) -> bool:
        return self._ages.get(name, (0, 0.0))[1] < HEARTBEAT * MISSED and self._lives(name)


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
            raise Unreachable(what) from error
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        os.close(self._descriptor)
        if isinstance(error, OSError):
            raise Unreachable(f"{self._file}: {error.strerror}") from error

    def read(self) -> str:
        """The first line; "" if there is none."""
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).partition(b"\n")[0].decode()

    def write(self, line: str) -> None:
        # In one call, so that a process that is killed leaves the old line or the new one.
        os.pwrite(self._descriptor, line.encode() + b"\n", 0)


class _LauncherLocks:
    """The locks that this launcher holds until it ends: one that all share, and one of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        """Take them. Whoever is alone begins anew. `name`: of this node."""
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            self._descriptor = _open(folder / "present")
            with suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _begin(folder)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            self._own = _open(self._file(name))
            fcntl.flock(self._own, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"the nodes cannot meet in {folder}: {error.strerror or error}",
                fix="set run.dir to a filesystem with locks that all nodes see, or start the ranks with "
                "torchrun --nnodes MIN:MAX",
                more=_PAGE,
            ) from error

    def lives(self, name: str) -> bool:
        """True if a launcher holds its lock."""
        try:
            descriptor = os.open(self._file(name), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def has_all(self, nodes: Iterable[str]) -> bool:
        """True if no launcher but those of `nodes` holds its lock."""
        others = {file.name.removeprefix("lives-") for file in self._folder.glob("lives-*")} - {*nodes}
        return not any(map(self.lives, others))

    def release(self) -> None:
        os.close(self._own)
        os.close(self._descriptor)

    def _file(self, name: str) -> Path:
        return self._folder / f"lives-{name}"


def _begin(folder: Path) -> None:
    """Remove what an earlier start has left, but for the numbers of its rounds, which go on."""
    state, last = folder / "state", max(map(last_round, (folder.parent, folder.parent / "checkpoints")))
    with suppress(OSError, ValueError, KeyError, TypeError):
        last = max(last, int(json.loads(state.read_text(encoding="utf-8").partition("\n")[0])["round"]))
    for left in (state, folder / "store", folder / "agreed", *folder.glob("lives-*")):
        left.unlink(missing_ok=True)
    with _Locked(state, exclusive=True) as locked:
        locked.write(json.dumps({"round": last, **_NOBODY}))


def _agree(file: Path, about: Mapping[str, Any]) -> None:
    """Leave `about` for the nodes that come later, or compare it with that of the first one. Raises `UserError`; before
    the first round all nodes do, as they would wait for this one."""
    mine, state = json.loads(json.dumps(about)), file.with_name("state")
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    try:
        with _Locked(state, exclusive=True) as rounds, _Locked(file, exclusive=True) as locked:
            now = json.loads(rounds.read() or "{}")
            if not (text := locked.read()):
                return locked.write(json.dumps({**here, "about": mine, "round": now.get("round")}))
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
            if now.get("round") == first.get("round"):
                locked.write(json.dumps({**first, "refused": error.to_json()}))
                rounds.write(json.dumps({**now, "closed": True}))
    except Unreachable as failed:
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
