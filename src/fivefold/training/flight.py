"""The collectives of this process, gloo's and NCCL's, from PyTorch's flight recorder. It does not see collectives over
shared memory (`parallel/shared_memory.py`); their entries are merged in here.

An entry is a dict as the recorder writes it, with three pitfalls. NCCL has a recorder of its own: gloo's is empty under
it. A send or receive within a batch stays "scheduled" and never retires: the later entry "nccl:coalesced" stands for
the batch. The CPU runs ahead of a GPU: the blocked collective is the first entry that is not done, not the last.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from fivefold.parallel import shared_memory

Entry = dict[str, Any]
Recorder = Callable[..., str | bytes]
PATIENT = ("checkpoint",)  # groups, by description, in which a long wait is normal: a rank may still be writing
_SOME = 0.1  # of the timeout: the age of an active collective from which on all entries are read


def entries(source: Recorder, *, only_active: bool = False) -> list[Entry]:
    """The latest collectives of this process, oldest first."""
    found: list[Entry] = list(json.loads(source(True, only_active)).get("entries", []))
    beside = list(shared_memory.entries(only_active=only_active))
    return sorted([*found, *beside], key=lambda entry: entry.get("time_created_ns", 0)) if beside else found


class Waits:
    """Time this process has waited for collectives, in the seconds passed to `look`. So the time in which a process
    was stopped, or a change of the clock, does not count."""

    def __init__(self, source: Recorder | None, timeout: float) -> None:
        """`source`: a recorder, if there is one. A wait of more than `timeout` seconds counts as stuck."""
        self._source: Recorder = source or (lambda *_: "{}")
        self._timeout = timeout
        self._ages: dict[int, float] = {}  # seconds that collectives have been active, by the recorder's number
        self._done, self._idle = 0, 0.0  # time of the last completion, and seconds counted since
        self.are_under_way = self.are_stuck = False

    def look(self, seconds: float) -> None:
        """Look again after `seconds`. Reads all entries only if some are old: there may be thousands."""
        active = entries(self._source, only_active=True)
        self._ages = {call["record_id"]: self._ages.get(call["record_id"], -seconds) + seconds for call in active}
        is_old = any(age > _SOME * self._timeout for age in self._ages.values())
        found = entries(self._source) if is_old else []
        # Time in ns of the last completion; 0 if the recorder does not report it (gloo's does not).
        done = max((entry.get("time_discovered_completed_ns") or 0 for entry in found), default=0)
        self._done, self._idle = done, self._idle + seconds if done == self._done else 0.0
        first = next((entry for entry in under_way(found) if entry["process_group"][1] not in PATIENT), None)
        # A queued collective has waited only since the one before it was done.
        self.are_stuck = first is not None and self._ages.get(first["record_id"], 0.0) > self._timeout
        self.are_stuck &= not done or self._idle > self._timeout
        self.are_under_way = bool(under_way(found or active))

    def told(self) -> str:
        """A message for the user; see `told`."""
        return told(entries(self._source))


def under_way(found: Sequence[Entry]) -> list[Entry]:
    """The collectives that are not done, oldest first. The first blocks; the others queue behind it."""
    batched: set[int] = set()  # groups in which a batch ends later
    waiting = []
    for entry in reversed(found):
        if entry["profiling_name"].endswith(":coalesced"):
            batched.add(entry["pg_id"])
        stands_for_nothing = entry["is_p2p"] and entry["pg_id"] in batched
        if not (entry["retired"] or stands_for_nothing):
            waiting.append(entry)
    return waiting[::-1]


def told(found: Sequence[Entry]) -> str:
    """A message for the user: the first collective in flight, or else the last one."""
    if not found:
        return "none was begun"
    waiting = under_way(found)
    entry, word, state = (waiting[0], "waits in", "under way") if waiting else (found[-1], "last", "done")
    name = entry["profiling_name"].partition(":")[2]
    return (
        f"{word}: {name} {entry['input_sizes']} of group {entry['process_group'][1]}, number {entry['op_id']}, {state}"
    )
