"""Collectives on the CPU between machines, over gloo's sends and receives: each rank asks for all that it receives
before it sends anything.

A gloo rank tells another that it may send on the connection over which it sends its own data to it. gloo's collectives
send first: the permission of the rank that comes later waits behind its own data, and two ranks take turns on a link
that carries both ways at once (0.6 to 0.75 of its rate for messages of 800 KB). And gloo's reduce-scatter is an
all-reduce, of twice the bytes.

`connect` gives a gloo group whose ranks are all on different machines what is faster this way: all-to-alls and
reduce-scatters, and between two ranks all-gathers and all-reduces. In a ring of more than two, each connection carries
data one way only; gloo does these, and all else.

Sums run over all ranks in order, 16-bit types in fp32, and are rounded once: as `shared_memory.py` does them.

gloo gives up a connection if the memory of a send or receive on it is gone. So an exchange is kept until it is done,
also if its caller forgets it: it ends when its process waits for this or a later one of the group.
"""

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel import plain, shared_memory
from fivefold.parallel.shared_memory import numbers_by_rank
from fivefold.torch_internals import can_carry, carried_by, carry, cpu_timeout

_AVG = 1  # as c10d numbers them
_REDUCTIONS: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    0: torch.add, _AVG: torch.add, 3: torch.minimum, 4: torch.maximum
}  # fmt: skip
_REDUCED = {
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8
}  # fmt: skip
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TAGS, _FIRST_TAG = 2**30, 2**24  # how many tags, and the first: those of other sends are smaller


def connect(group: dist.ProcessGroup) -> None:
    """Let the ranks of a gloo group exchange directly, if each is on a machine of its own. All of them call this."""
    is_gloo = can_carry() and cpu_timeout(group) is not None and carried_by(group) is None
    if not is_gloo or group.size() == 1:
        return
    machines = {*plain.everywhere("" if shared_memory.is_off() else _machine(), group)}
    if len(machines - {""}) == group.size():
        carry(group, Direct(group))


def _machine() -> str:
    """Names what shares this process's memory: the machine, and within it the container."""
    try:
        return f"{_BOOT.read_text().strip()} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return os.uname().nodename


class Direct:
    """Carrier of a group's collectives: a method takes one, or returns None for gloo, alike on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._backend: Any = group._get_backend(torch.device("cpu"))
        self._name, self._ranks = (group.group_name, group.group_desc), dist.get_process_group_ranks(group)
        self._rank, self._size = group.rank(), group.size()
        self._line = Line()
        self.last: Exchange | None = None
        _known[id(self)] = self

    def all_gather(self, output: Tensor, given: Tensor) -> "Exchange | None":
        if self._size > 2 or output.dtype != given.dtype or output.numel() != given.numel() * self._size:
            return None
        own = output.data_ptr() + self._rank * given.nbytes
        into = _memory(output, apart=given.data_ptr() == own or not _share(output, given))
        parts = into.view(self._size, -1)
        return self._begin("all_gather", given, parts.unbind(), [_flat(given)] * self._size, lambda: _put(into, output))

    def reduce_scatter(self, output: Tensor, given: Tensor, how: int) -> "Exchange | None":
        if not _reduces(given, how) or output.dtype != given.dtype or given.numel() != output.numel() * self._size:
            return None
        sent = _flat(given).view(self._size, -1).unbind()
        parts = [torch.empty_like(part) for part in sent]
        return self._begin("reduce_scatter", given, parts, sent, lambda: self._reduce(parts, output, how), how)

    def all_reduce(self, tensor: Tensor, how: int) -> "Exchange | None":
        if self._size > 2 or not _reduces(tensor, how):
            return None
        sent = [_flat(tensor)] * self._size
        parts = [torch.empty_like(part) for part in sent]
        return self._begin("all_reduce", tensor, parts, sent, lambda: self._reduce(parts, tensor, how), how)

    def all_to_all(
        self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> "Exchange | None":
        """`received` and `sent`: rows from and for each rank; empty if they are equal."""
        incoming, outgoing = (numbers_by_rank(*each, self._size) for each in ((output, received), (given, sent)))
        if output.dtype != given.dtype or incoming is None or outgoing is None:
            return None  # gloo says what is wrong with it
        into = _memory(output, apart=not _share(output, given))
        parts = torch.split(into, incoming), torch.split(_flat(given), outgoing)
        return self._begin("all_to_all", given, *parts, lambda: _put(into, output))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        return None

    def barrier(self) -> None:
        return None

    @torch.no_grad()
    def _begin(
        self, kind: str, given: Tensor, received: Sequence[Tensor], sent: Sequence[Tensor], end: Callable[[], None],
        how: int = 0,
    ) -> "Exchange":  # fmt: skip
        """Begin to exchange the parts from and for each rank. One without elements is not sent."""
        number = self.last.number + 1 if self.last else 1
        timeout: timedelta = self._backend.options._timeout
        made = self.last = Exchange(self._name, number, kind, given.shape, timeout, self._line, end)
        received[self._rank].copy_(sent[self._rank])
        others = [(self._rank + step) % self._size for step in range(1, self._size)]
        asked = [(rank, self._backend.recv, received[rank]) for rank in others[::-1]]
        for rank, call, part in asked + [(rank, self._backend.send, sent[rank]) for rank in others]:
            if part.numel():
                # Ranks that do not mean the same receive nothing from each other, rather than something else.
                tag = zlib.crc32(repr((number, kind, how, part.dtype, part.numel())).encode()) % _TAGS
                with made.told_with(self._ranks[rank]):
                    made.works.append((self._ranks[rank], call([part], rank, _FIRST_TAG + tag)))
        if made.works:
            self._line.under_way.append(made)
        else:
            made.finish()
        return made

    def entries(self, *, only_active: bool) -> Iterator[dict[str, Any]]:
        """See `entries` of the module."""
        for each in dict.fromkeys([*self._line.under_way, *filter(None, [self.last])]):
            if not (only_active and each.is_done):
                name = f"direct:{each.kind}"
                yield shared_memory.entry(each.group, each.number, name, each.shape, each.began, each.is_done)

    def _reduce(self, parts: Sequence[Tensor], into: Tensor, how: int) -> None:
        is_short = into.dtype in (torch.bfloat16, torch.float16)
        total = reduce(_REDUCTIONS[how], [part.float() if is_short else part for part in parts])
        _put(total / self._size if how == _AVG else total, into)


class Line:
    """The exchanges of a group that are not done, oldest first. gloo tells one waiter of an arrival: only one thread at
    a time waits for any of them."""

    def __init__(self) -> None:
        self.under_way: deque[Exchange] = deque()
        self.turn = threading.Lock()


@dataclass(eq=False)
class Exchange:
    """An exchange, `number` of its group, of a tensor of `shape`. `timeout`: the group's. `end`: makes the result of
    what has been received; None once it has. `works`: what is not known to have arrived, by rank of the world."""

    group: tuple[str, str]
    number: int
    kind: str
    shape: Sequence[int]
    timeout: timedelta
    line: Line
    end: Callable[[], None] | None
    works: list[tuple[int, dist.Work]] = field(default_factory=list)
    began: int = field(default_factory=time.time_ns)

    @property
    def is_done(self) -> bool:
        return self.end is None

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until it is done, and those before it. Raises `DistBackendError` if a rank has left, or does not come
        for `timeout` (None: the group's)."""
        with self.line.turn:
            while not self.is_done:
                first = self.line.under_way[0]
                first.arrive(timeout or self.timeout)
                self.line.under_way.popleft()
                first.finish()

    def arrive(self, timeout: timedelta) -> None:
        """Wait until all is received and sent. Without a timeout, gloo waits for that which the group was made with."""
        while self.works:
            rank, work = self.works[0]
            with self.told_with(rank):
                work.wait(timeout)
            self.works.pop(0)

    @contextmanager
    def told_with(self, rank: int) -> Iterator[None]:
        """Say of an error of gloo which exchange it is, and with which rank of the world."""
        try:
            yield
        except RuntimeError as error:
            what = f"{self.kind} {list(self.shape)} of group {self.group[1] or self.group[0]}, with rank {rank}"
            raise dist.DistBackendError(f"{what}: {error}") from error

    def finish(self) -> None:
        end, self.end = self.end, None
        if end:
            end()


_known: "WeakValueDictionary[int, Direct]" = WeakValueDictionary()  # for the watchdog


def entries(*, only_active: bool = False) -> Iterator[dict[str, Any]]:
    """Yield this process's exchanges as PyTorch's flight recorder writes them: those under way, and the last one."""
    for group in filter(None, [known() for known in _known.valuerefs()]):
        yield from group.entries(only_active=only_active)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1)


def _share(output: Tensor, given: Tensor) -> bool:
    return output.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


def _memory(output: Tensor, *, apart: bool) -> Tensor:
    """Memory to receive in, flat: the output's own if it lies in one piece, `apart` from what is sent."""
    return output.detach().view(-1) if apart and output.is_contiguous() else output.new_empty(output.numel())


@torch.no_grad()
def _put(found: Tensor, into: Tensor) -> None:
    into.copy_(found.view(into.shape))  # nothing if they are the same memory


def _reduces(tensor: Tensor, how: int) -> bool:
    return tensor.dtype in _REDUCED and how in _REDUCTIONS and (how != _AVG or tensor.is_floating_point())
