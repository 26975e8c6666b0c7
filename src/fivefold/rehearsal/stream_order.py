"""Collectives of a step, from the requests that the stand-in for the driver notes, and which of them no kernel could
hide.

A collective is exposed if the compute stream waits for it and has had no kernel to run since it could begin. Durations
are unknown: one kernel of any length hides a collective here.
"""

import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

# As `driver.c` numbers them.
LAUNCH, RECORD, WAIT, COLLECTIVE = range(4)
COMPUTE = 0  # the default stream
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "send", "recv", "all_to_all")
_BY_RANK = ("all_gather", "reduce_scatter", "all_to_all")  # NCCL gets the size of one rank's part


class StreamRequest(ctypes.Structure):
    """A request of the host to a stream, as `driver.c` notes it, in order: a kernel, an event to record or to wait for,
    or a collective.

    `object`: the event, or the communicator. `kind`, `bytes`: of the collective, as passed to NCCL. `group`: the same
    for calls that NCCL got as one group; 0: alone.
    """

    what: int
    kind: int
    stream: int
    object: int
    bytes: int
    group: int
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
        self._library.rehearsal_entries.restype = ctypes.POINTER(StreamRequest)

    def counts(self) -> Counts:
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
    def noting(self, noted: list[StreamRequest]) -> Iterator[None]:
        """Inside, note the requests; afterwards they are in `noted`."""
        self._library.rehearsal_note(1)
        try:
            yield
        finally:
            self._library.rehearsal_note(0)
            count = ctypes.c_long()
            entries = self._library.rehearsal_entries(ctypes.byref(count))
            noted += [StreamRequest.from_buffer_copy(entries[at]) for at in range(count.value)]


@dataclass(frozen=True)
class Communicator:
    """The group of a communicator: its mesh axis, its size, and this process's rank in it."""

    axis: str
    size: int
    rank: int = 0


@dataclass(frozen=True)
class Issued:
    """A collective. `bytes`: of its larger buffer, as plans count them. `exposed`: no kernel hides it."""

    axis: str
    kind: str
    bytes: int
    exposed: bool


def issued(entries: Sequence[StreamRequest], groups: Mapping[int, Communicator]) -> list[Issued]:
    """The collectives of `entries` in order; `groups`: by communicator. Groups of one rank send nothing."""
    exposed = _exposed(entries)
    found = []
    for whole in _calls(entries):
        first = entries[whole[0]]
        group = groups.get(first.object)
        if group is None or group.size == 1:
            continue
        if _is_exchange([entries[at] for at in whole], group.size):
            sent = sum(entries[at].bytes for at in whole if KINDS[entries[at].kind] == "send")
            found.append(Issued(group.axis, "all_to_all", sent, whole[0] in exposed))
            continue
        for at in whole:
            kind, size = KINDS[entries[at].kind], entries[at].bytes
            found.append(Issued(group.axis, kind, size * group.size if kind in _BY_RANK else size, at in exposed))
    return found


def _calls(entries: Sequence[StreamRequest]) -> Iterator[list[int]]:
    """Indices of collectives; those that NCCL got as one group, together."""
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at, entry in enumerate(entries):
        if entry.what == COLLECTIVE:
            together[(entry.group, entry.object) if entry.group else (-at - 1, 0)].append(at)
    yield from together.values()


def _is_exchange(entries: Iterable[StreamRequest], size: int) -> bool:
    """True if a group of calls sends to and receives from every rank: torch's all-to-all of uneven parts."""
    kinds = Counter(KINDS[entry.kind] for entry in entries)
    return kinds["send"] == kinds["recv"] == size


def _exposed(entries: Sequence[StreamRequest]) -> set[int]:
    """Indices of collectives that the compute stream waits for without a kernel since they could begin.

    `ran[s]`: how many kernels of the compute stream are certain to be done at the current point of stream s.
    `still[s]`: collectives that are done at that point, and that the compute stream has not waited for.
    """
    ran: Counter[int] = Counter()
    still: defaultdict[int, set[int]] = defaultdict(set)
    events: dict[int, tuple[int, frozenset[int]]] = {}
    began: dict[int, int] = {}
    met: set[int] = set()
    exposed: set[int] = set()

    def meet(places: Iterable[int]) -> None:
        for place in set(places) - met:
            met.add(place)
            if began[place] >= ran[COMPUTE]:
                exposed.add(place)

    for at, entry in enumerate(entries):
        stream = entry.stream
        if entry.what == LAUNCH and stream == COMPUTE:
            ran[COMPUTE] += 1
        elif entry.what == COLLECTIVE:
            began[at] = ran[stream]
            if stream == COMPUTE:
                meet([at])
            else:
                still[stream].add(at)
        elif entry.what == RECORD:
            still[stream] -= met
            events[entry.object] = ran[stream], frozenset(still[stream])
        elif entry.what == WAIT and entry.object in events:
            at_event, over = events[entry.object]
            if stream == COMPUTE:
                meet(over)
            else:
                ran[stream] = max(ran[stream], at_event)
                still[stream] |= over - met
    return exposed
