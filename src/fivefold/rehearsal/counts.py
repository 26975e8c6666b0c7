"""Counts of the stand-in for the driver, read from the process in which it is loaded."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# As `driver.c` numbers them.
LAUNCH, RECORD, WAIT, COLLECTIVE = range(4)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "send", "recv", "all_to_all")


@dataclass(frozen=True)
class Entry:
    """A request of the host to a stream, in order: a kernel, an event to record or to wait for, or a collective.

    `object`: the event, or the communicator. `kind`, `bytes`: of the collective, as passed to NCCL. `group`: the same
    for calls that NCCL got as one group; 0: alone.
    """

    what: int
    kind: int
    stream: int
    object: int
    bytes: int
    group: int


class _Entry(ctypes.Structure):
    _fields_ = (
        ("what", ctypes.c_int32), ("kind", ctypes.c_int32), ("stream", ctypes.c_uint64), ("object", ctypes.c_uint64),
        ("bytes", ctypes.c_int64), ("group", ctypes.c_int64),
    )  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Counts since the process began: kernels, and waits of the host for the device."""

    launches: int
    syncs: int


class Driver:
    """The stand-in with which this process was started."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.rehearsal_count.restype = ctypes.c_long
        self._library.rehearsal_entries.restype = ctypes.POINTER(_Entry)

    def counts(self) -> Counts:
        """Counts so far."""
        return Counts(*(int(self._library.rehearsal_count(which)) for which in range(2)))

    def tell(self, communicator: int, size: int, rank: int) -> None:
        """Tell the stand-in the size of a communicator, and this process's rank in it."""
        self._library.rehearsal_communicator(ctypes.c_uint64(communicator), size, rank)

    @contextmanager
    def calling(self, heard: Callable[[], None]) -> Iterator[None]:
        """Inside, call `heard` whenever the host waits for the device, in the thread that waits."""
        call = ctypes.CFUNCTYPE(None)(heard)
        self._library.rehearsal_on_sync(call)
        try:
            yield
        finally:
            self._library.rehearsal_on_sync(None)

    @contextmanager
    def noting(self, noted: list[Entry]) -> Iterator[None]:
        """Inside, note the requests; afterwards they are in `noted`."""
        self._library.rehearsal_note(1)
        try:
            yield
        finally:
            self._library.rehearsal_note(0)
            count = ctypes.c_long()
            entries = self._library.rehearsal_entries(ctypes.byref(count))
            fields = [name for name, _ in _Entry._fields_]
            noted += [Entry(*(getattr(entries[at], name) for name in fields)) for at in range(count.value)]
