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
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
from fivefold.torch_internals import can_carry, carried_by, carry, cpu_timeout

_AVG = 1  # as c10d numbers them
_REDUCTIONS: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    0: torch.add, _AVG: torch.add, 3: torch.minimum, 4: torch.maximum
}  # fmt: skip
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TAGS, _FIRST_TAG = 2**20, 2**24  # numbers of exchanges, and the first: those of other sends are smaller


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
        self._name = group.group_name, group.group_desc
        self._rank, self._size = group.rank(), group.size()
        self._last: Exchange | None = None

    def all_gather(self, output: Tensor, given: Tensor) -> "Exchange | None":
        if self._size > 2 or output.dtype != given.dtype or output.numel() != given.numel() * self._size:
            return None
        own = output.data_ptr() + self._rank * given.nbytes
        into = _memory(output, apart=given.data_ptr() == own or not _share(output, given))
        parts = into.view(self._size, -1)
        return self._begin("all_gather", parts, [_flat(given)] * self._size, lambda: _put(into, output))

    def reduce_scatter(self, output: Tensor, given: Tensor, how: int) -> "Exchange | None":
        if not _reduces(given, how) or output.dtype != given.dtype or given.numel() != output.numel() * self._size:
            return None
        sent = _flat(given).view(self._size, -1)
        parts = torch.empty_like(sent)
        return self._begin("reduce_scatter", parts, sent, lambda: self._reduce(parts, output, how))

    def all_reduce(self, tensor: Tensor, how: int) -> "Exchange | None":
        if self._size > 2 or not _reduces(tensor, how):
            return None
        parts = tensor.new_empty(self._size, tensor.numel())
        return self._begin("all_reduce", parts, [_flat(tensor)] * self._size, lambda: self._reduce(parts, tensor, how))

    def all_to_all(
        self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> "Exchange | None":
        """`received` and `sent`: rows from and for each rank; empty if they are equal."""
        incoming, outgoing = _numbers(output, received, self._size), _numbers(given, sent, self._size)
        if output.dtype != given.dtype or incoming is None or outgoing is None:
            return None  # gloo says what is wrong with it
        into = _memory(output, apart=not _share(output, given))
        parts = torch.split(into, incoming), torch.split(_flat(given), outgoing)
        return self._begin("all_to_all", *parts, lambda: _put(into, output))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        return None

    def barrier(self) -> None:
        return None

    @torch.no_grad()
    def _begin(
        self, kind: str, received: Sequence[Tensor] | Tensor, sent: Sequence[Tensor] | Tensor, end: Callable[[], None]
    ) -> "Exchange":
        """Begin to exchange the parts from and for each rank. One without elements is not sent."""
        number = self._last.number + 1 if self._last else 1
        received[self._rank].copy_(sent[self._rank])
        others, tag = [(self._rank + step) % self._size for step in range(1, self._size)], _FIRST_TAG + number % _TAGS
        works = [self._backend.recv([received[rank]], rank, tag) for rank in others[::-1] if received[rank].numel()]
        works += [self._backend.send([sent[rank]], rank, tag) for rank in others if sent[rank].numel()]
        elements = sum(part.numel() for part in sent)
        self._last = _exchanges[self._name[0]] = Exchange(self._name, number, kind, elements, works, end)
        if not works:
            self._last.wait()
        return self._last

    def _reduce(self, parts: Tensor, into: Tensor, how: int) -> None:
        wide = parts.float() if parts.dtype in (torch.bfloat16, torch.float16) else parts
        total = reduce(_REDUCTIONS[how], wide.unbind())
        _put(total / self._size if how == _AVG else total, into)


@dataclass(eq=False)
class Exchange:
    """An exchange, `number` of its group, of `elements` sent. `end`: makes the result of what has been received; None
    once it has."""

    group: tuple[str, str]
    number: int
    kind: str
    elements: int
    works: list[dist.Work]
    end: Callable[[], None] | None
    began: int = field(default_factory=time.time_ns)

    @property
    def is_done(self) -> bool:
        return self.end is None

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until it is done. Raises `RuntimeError` if a rank has left, or does not come for `timeout` (None: the
        group's)."""
        for work in self.works:
            work.wait(*([timeout] if timeout else []))
        if self.end is not None:
            self.end()
        self.works, self.end = [], None


_exchanges: "WeakValueDictionary[str, Exchange]" = WeakValueDictionary()  # the last of each group, for the watchdog


def entries(*, only_active: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the last exchange of each group as PyTorch's flight recorder writes it."""
    for last in filter(None, [known() for known in _exchanges.valuerefs()]):
        if not (only_active and last.is_done):
            name = f"direct:{last.kind}"
            yield shared_memory.entry(last.group, last.number, name, [last.elements], last.began, last.is_done)


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
    return how in _REDUCTIONS and (how != _AVG or tensor.is_floating_point())


def _numbers(tensor: Tensor, rows: Sequence[int], ranks: int) -> list[int] | None:
    """Numbers of the rows for each rank; None if these rows are not the tensor's."""
    length = len(tensor) if tensor.dim() else 0
    if not rows and length % ranks == 0:
        return [tensor.numel() // ranks] * ranks
    if len(rows) != ranks or sum(rows) != length:
        return None
    return [count * math.prod(tensor.shape[1:]) for count in rows]
