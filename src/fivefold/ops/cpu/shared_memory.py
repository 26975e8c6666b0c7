"""Collectives on the CPU between processes of one machine, over memory that they share: `shared_memory.c`.

gloo sends between two processes of a machine through TCP: 2 MB take 2.5 ms, and over shared memory 0.3. `connect` gives
a gloo group a segment if it can: all ranks see one `/dev/shm`, have a C compiler, and room for the segment. From then
on, `torch_internals.carry` lets the segment carry the group's all-gathers, reduce-scatters, all-reduces, broadcasts,
all-to-alls and barriers of CPU tensors, whoever calls them: FSDP2, DTensor, `torch.distributed`, compiled blocks. gloo
does the rest: sends and receives, other types, other reductions, other groups.

Ranks decide alike, because a decision depends only on what they have in common: the kind, the type and the reduction.

Sums run over all ranks in order; bf16 is summed in fp32 and rounded once. So every rank gets the same bits.

An asynchronous collective is posted when it is called, up to `_SLOTS` chunks of it. The rest follows when its process
waits for any collective. Until then its `is_completed()` is false.
"""

import ctypes
import fcntl
import math
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.c_library import compile_library
from fivefold.core.errors import UserError
from fivefold.ops.cpu import library_or_lack
from fivefold.torch_internals import carried_by, carry, cpu_timeout

SOURCE = Path(__file__).with_name("shared_memory.c")
LIBRARY = "shared_memory.so"
SWITCH = "FIVEFOLD_TRANSPORT"  # in the environment: `gloo` leaves all to gloo
_FOLDER = Path("/dev/shm")
_OPTIONS = ("-std=gnu11", "-O3", "-fwrapv", "-fno-strict-aliasing", "-pthread")

_SLOTS, _CHUNK = 8, 2**18  # slots of a rank, and bytes of each: 2 MiB
_MOST_RANKS = 32
_SPIN_NS = 100_000  # waking a sleeper takes 50,000; none spins if there are more processes than cores
_SLICE_NS = 20_000_000  # in C at a time, so that Python handles signals
_LOOK_SECONDS = 0.1  # between checks that the awaited rank is still there
_TOKEN = 16  # bytes

_TYPES = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3, torch.int32: 4, torch.int64: 5}
_SUM, _AVG, _MIN, _MAX = 0, 1, 3, 4  # as c10d numbers them
_GATHER, _SCATTER, _REDUCE, _BROADCAST, _EXCHANGE = range(5)
_NAMES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
_UNLIKE = 2  # `wait_for` returns this plus the rank


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input", "output")),
        ("bytes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("sent", "received")),
        *((name, ctypes.c_int32) for name in ("kind", "type", "how", "root", "is_done", "unlike")),
        *((name, ctypes.c_int64) for name in ("posted", "taken", "chunks")),
        ("next", ctypes.c_void_p),
    ]


def lacks() -> str:
    """Return why processes of this machine do not share memory; "" if they do. The first call may compile it (1 s)."""
    if _switch() == "gloo":
        return f"{SWITCH} is gloo"
    if not os.access(_FOLDER, os.W_OK | os.X_OK):
        return f"{_FOLDER} is not there, or not to be written"
    found = _library()
    return found if isinstance(found, str) else ""


def _switch() -> str:
    return os.environ.get(SWITCH, "").strip().lower()


@cache
def _library() -> ctypes.CDLL | str:
    """The compiled transport, or why there is none."""
    if sys.platform != "linux":
        return "there is no futex on this system"
    key = (SOURCE.read_text(encoding="utf-8"), _OPTIONS, platform.machine())
    return library_or_lack(LIBRARY, key, build=_build, load=_load)


def _build(library: Path) -> None:
    compile_library([str(SOURCE)], library, _OPTIONS)
    _load(library)


def _load(path: Path) -> ctypes.CDLL:
    library, pointer = ctypes.CDLL(str(path)), ctypes.c_void_p
    i32, i64 = ctypes.c_int32, ctypes.c_int64
    for name, result, arguments in (
        ("segment_size", i64, (i32, i32, i64)),
        ("open_channel", pointer, (i32, i32, i32, i32, i64, i64)),
        ("close_channel", None, (pointer,)),
        ("issue", None, (pointer, pointer)),
        ("wait_for", i32, (pointer, pointer, i64)),
        ("blocker", i32, (pointer,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


# ---- a group --------------------------------------------------------------------------------------------------------


def connect(group: dist.ProcessGroup) -> None:
    """Let the ranks of a gloo group share memory, if they can. All of them call this, and all agree.

    A group that has a segment, has one rank or is of another backend stays as it is. Raises `UserError` if the
    environment asks for another transport.
    """
    if _switch() not in ("", "gloo"):
        raise UserError(f"{SWITCH}={os.environ[SWITCH]} is no transport", fix=f"{SWITCH}=gloo, or leave it out")
    timeout = cpu_timeout(group)
    if timeout is None or not 1 < group.size() <= _MOST_RANKS or carried_by(group):
        return
    channel = _agreed(group, timeout)
    if channel is not None:
        carry(group, channel)


def _agreed(group: dist.ProcessGroup, timeout: timedelta) -> "Channel | None":
    """Meet the ranks of a group in a file that is gone before anything is sent. They use gloo until then."""
    made = _Segment.make(group.size()) if group.rank() == 0 and not lacks() else None
    try:
        name = torch.tensor([*(made.name if made else "").encode().ljust(64, b"\0")], dtype=torch.uint8)
        dist.broadcast(name, group=group, group_src=0)
        said = bytes(name.tolist()).rstrip(b"\0").decode()
        segment = made or (None if lacks() or not said else _Segment.open(said))
        if not _all(group, segment is not None and segment.hold(group.rank())):
            return None
    finally:
        if made:
            made.unlink()
    assert segment is not None
    # Without file locks, each rank would look like one that has ended.
    if not _all(group, all(segment.is_held(rank) for rank in range(group.size()) if rank != group.rank())):
        return None
    channel = Channel.open(segment, group, timeout)
    return channel if _all(group, channel is not None) else None


def _all(group: dist.ProcessGroup, is_so: bool) -> bool:
    """True if `is_so` is true on every rank."""
    told = torch.tensor([int(is_so)])
    dist.all_reduce(told, dist.ReduceOp.MIN, group=group)
    return bool(told.item())


class _Segment:
    """An open file of a group. Each rank locks a byte of it, which the kernel frees however the process ends."""

    def __init__(self, name: str, file: int) -> None:
        self.name, self.file = name, file
        self.close = finalize(self, os.close, file)
        self.close.atexit = False

    @classmethod
    def make(cls, ranks: int) -> "_Segment | None":
        """Make a file and reserve all its memory, so that none can be lacking later. None without room."""
        library = _library()
        assert isinstance(library, ctypes.CDLL)
        token = secrets.token_hex(_TOKEN)
        name = f"fivefold-{token}"
        try:
            file = os.open(_FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            return None
        made = cls(name, file)
        try:
            size = library.segment_size(ranks, _SLOTS, _CHUNK)
            os.posix_fallocate(file, 0, size + len(token))
            os.pwrite(file, token.encode(), size)
        except OSError:
            made.unlink()
            return None
        return made

    @classmethod
    def open(cls, name: str) -> "_Segment | None":
        """Open the file of this name. None if it is missing or another one: not all ranks are on this machine."""
        try:
            found = cls(name, os.open(_FOLDER / name, os.O_RDWR))
            token = name.partition("-")[2].encode()
            is_it = os.pread(found.file, len(token), os.fstat(found.file).st_size - len(token)) == token
        except OSError:
            return None
        return found if is_it else None

    def unlink(self) -> None:
        (_FOLDER / self.name).unlink(missing_ok=True)

    def hold(self, rank: int) -> bool:
        """Take the lock of a rank; True if nobody had it."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        return True

    def is_held(self, rank: int) -> bool:
        """True if another process has the lock of a rank."""
        if self.hold(rank):
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
            return False
        return True


# ---- its collectives ------------------------------------------------------------------------------------------------


class Channel:
    """Carrier of a group's collectives: a method takes one, or returns None for gloo, alike on all ranks."""

    def __init__(self, segment: _Segment, library: Any, address: int, group: dist.ProcessGroup, timeout: timedelta):
        self._segment, self._library, self._address = segment, library, address
        self.rank, self.size, self.timeout = group.rank(), group.size(), timeout
        self.ranks, self.name = dist.get_process_group_ranks(group), (group.group_name, group.group_desc)
        self.last: Sent | None = None
        self.under_way: dict[int, Pending] = {}  # by number: their memory is in use
        self._close = finalize(self, library.close_channel, address)
        self._close.atexit = False

    @classmethod
    def open(cls, segment: _Segment, group: dist.ProcessGroup, timeout: timedelta) -> "Channel | None":
        """Open a channel; None without memory."""
        library = _library()
        assert isinstance(library, ctypes.CDLL)
        spin = _SPIN_NS if dist.get_world_size() <= len(os.sched_getaffinity(0)) else 0
        address = library.open_channel(segment.file, group.size(), group.rank(), _SLOTS, _CHUNK, spin)
        return cls(segment, library, address, group, timeout) if address else None

    def all_gather(self, output: Tensor, given: Tensor) -> "Pending | None":
        if output.dtype != given.dtype or output.numel() != given.numel() * self.size:
            return None  # gloo says what is wrong with it
        own = output.data_ptr() + self.rank * given.nbytes
        return self._issue(_GATHER, output, given, given.nbytes, may_share=given.data_ptr() == own)

    def reduce_scatter(self, output: Tensor, given: Tensor, how: int) -> "Pending | None":
        if not _reduces(given, how) or output.dtype != given.dtype or given.numel() != output.numel() * self.size:
            return None
        return self._issue(_SCATTER, output, given, output.nbytes, how)

    def all_reduce(self, tensor: Tensor, how: int) -> "Pending | None":
        if not _reduces(tensor, how):
            return None
        return self._issue(_REDUCE, tensor, tensor, tensor.nbytes, how, may_share=True)

    def broadcast(self, tensor: Tensor, root: int) -> "Pending | None":
        return self._issue(_BROADCAST, tensor, tensor, tensor.nbytes, root=root, may_share=True)

    def all_to_all(
        self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> "Pending | None":
        """`received` and `sent`: rows from and for each rank; empty if they are equal."""
        if output.dtype != given.dtype:
            return None
        counts = _row_bytes(output, received, self.size), _row_bytes(given, sent, self.size)
        if counts[0] is None or counts[1] is None:
            raise ValueError(f"all_to_all of group {self.name[1]}: its splits are not those of its tensors")
        return self._issue(_EXCHANGE, output, given, 0, counts=(counts[0], counts[1]))

    def barrier(self) -> "Pending":
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._issue(_REDUCE, nothing, nothing, 0, may_share=True)

    def ended(self) -> int | None:
        """Rank of the world that is waited for, if it has left."""
        awaited = int(self._library.blocker(self._address))
        return None if awaited == self.rank or self._segment.is_held(awaited) else self.ranks[awaited]

    def wait_for(self, call: "_Call", nanoseconds: int) -> int:
        return int(self._library.wait_for(self._address, ctypes.addressof(call), nanoseconds))

    def entries(self, *, only_active: bool = False) -> Iterator[dict[str, Any]]:
        """Yield its collectives as PyTorch's flight recorder writes them: those in flight, and the last one."""
        found = [pending.sent for pending in list(self.under_way.values())]
        if self.last is not None and not (only_active or self.last in found):
            found.append(self.last)
        for sent in found:
            is_done = bool(sent.call.is_done)
            if not (is_done and only_active):
                yield {
                    "record_id": f"{self.name[0]}:{sent.number}",
                    "pg_id": self.name[0],
                    "process_group": list(self.name),
                    "profiling_name": f"shm:{_NAMES[sent.call.kind]}",
                    "is_p2p": False,
                    "retired": is_done,
                    "state": "completed" if is_done else "started",
                    "input_sizes": [list(sent.shape)],
                    "op_id": sent.number,
                    "time_created_ns": sent.began,
                }

    @torch.no_grad()
    def _issue(
        self, kind: int, output: Tensor, given: Tensor, size: int, how: int = _SUM, root: int = 0,
        counts: tuple[list[int], list[int]] | None = None, *, may_share: bool = False,
    ) -> "Pending":  # fmt: skip
        source, result = given, output
        if not output.is_contiguous():
            result = output.contiguous()
            source = result if given is output else given
        if not source.is_contiguous():
            source = source.contiguous()
        elif not may_share and source.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
            source = source.clone()
        arrays = [(ctypes.c_int64 * self.size)(*counts_) for counts_ in counts or ()]
        incoming, outgoing = map(ctypes.addressof, arrays) if arrays else (None, None)
        memory = source.data_ptr(), result.data_ptr()
        call = _Call(*memory, size, outgoing, incoming, kind, _TYPES.get(given.dtype, 0), how, root)
        sent = Sent(call, self.last.number + 1 if self.last else 1, given.shape)
        self.last = sent
        pending = Pending(self, sent, [source, result, output, arrays])
        for number in [number for number, transfer in self.under_way.items() if transfer.is_done]:
            self.under_way.pop(number).end()
        self._library.issue(self._address, ctypes.addressof(call))
        if call.is_done:
            pending.end()
        else:
            self.under_way[sent.number] = pending
        return pending


def _reduces(tensor: Tensor, how: int) -> bool:
    of_integers = how in (_SUM, _MIN, _MAX)
    return tensor.dtype in _TYPES and (of_integers or (how == _AVG and tensor.is_floating_point()))


def _row_bytes(tensor: Tensor, rows: Sequence[int], ranks: int) -> list[int] | None:
    """Bytes of the rows for each rank; None if these rows are not the tensor's."""
    length = len(tensor) if tensor.dim() else 0
    if not rows and length % ranks == 0:
        return [tensor.nbytes // ranks] * ranks
    if len(rows) != ranks or sum(rows) != length:
        return None
    each = math.prod(tensor.shape[1:]) * tensor.element_size()
    return [count * each for count in rows]


@dataclass(eq=False)
class Sent:
    """A collective: `number` of its group, over a tensor of `shape`."""

    call: _Call
    number: int
    shape: Sequence[int]
    began: int = field(default_factory=time.time_ns)

    def __str__(self) -> str:
        return f"{_NAMES[self.call.kind]} {list(self.shape)}"


@dataclass(eq=False)
class Pending:
    """A collective in flight. `held`: its memory until it is done: source, result, target of the result, counts."""

    channel: Channel
    sent: Sent
    held: list[Any]

    @property
    def is_done(self) -> bool:
        return bool(self.sent.call.is_done)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until it is done. Raises `DistBackendError` if a rank has left, calls another collective, or does not
        come for `timeout` (None: the group's)."""
        limit = (timeout or self.channel.timeout).total_seconds()
        waited = 0.0  # only while this process ran: a stopped one has not waited
        before = looked = time.monotonic()
        while (found := self.channel.wait_for(self.sent.call, _SLICE_NS)) != 0:
            if found >= _UNLIKE:
                other = self.channel.ranks[found - _UNLIKE]
                raise self._failed(f"rank {other} calls another collective, or one of other sizes")
            now = time.monotonic()
            waited, before = waited + min(now - before, 0.1), now
            if now - looked >= _LOOK_SECONDS:
                looked = now
                left = self.channel.ended()
                if left is not None and self.channel.wait_for(self.sent.call, 0) == 1 and self.channel.ended() == left:
                    raise self._failed(f"rank {left} has left")
            if waited > limit:
                raise self._failed(f"no answer from the other ranks for {limit:g} s")
        self.end()

    def end(self) -> None:
        """Copy the result to its place, once, and release the memory."""
        if self.held:
            _, result, output, _ = self.held
            self.held = []
            if result is not output:
                with torch.no_grad():
                    output.copy_(result)
            self.channel.under_way.pop(self.sent.number, None)

    def _failed(self, why: str) -> dist.DistBackendError:
        group = self.channel.name[1] or self.channel.name[0]
        return dist.DistBackendError(f"{self.sent} of group {group}: {why}")
