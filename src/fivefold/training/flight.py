"""What PyTorch's flight recorder knows of the collectives of this process, gloo's and NCCL's. It does not see what
shared memory carries (`parallel/shared_memory.py`), which is put beside them.

An entry is a dict as the recorder writes it. Three things are not as they look. NCCL has a recorder of its own: gloo's
is empty under it. A send or receive within a batch stays "scheduled" and never retires: the entry "nccl:coalesced"
behind it stands for the batch. And the CPU runs ahead of a GPU: what waits is the first entry that is not done, not the
last.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from fivefold.parallel import shared_memory

Entry = dict[str, Any]
Recorder = Callable[..., str | bytes]
PATIENT = ("checkpoint",)  # groups, by description, whose members may be waited for: a rank still writes
_SOME = 0.1  # of the timeout: how old one is before all are read


def entries(source: Recorder, *, only_active: bool = False) -> list[Entry]:
    """The latest collectives of this process, oldest first."""
    found: list[Entry] = list(json.loads(source(True, only_active)).get("entries", []))
    beside = list(shared_memory.entries(only_active=only_active))
    return sorted([*found, *beside], key=lambda entry: entry.get("time_created_ns", 0)) if beside else found


class Waits:
    """How long this process has waited for collectives, in seconds that whoever looks has lived through: a process
    that was stopped, or a clock that was set, has not waited for them."""

    def __init__(self, source: Recorder | None, timeout: float) -> None:
        """Of a recorder, if there is one; stuck after `timeout` seconds."""
        self._source: Recorder = source or (lambda *_: "{}")
        self._timeout = timeout
        self._ages: dict[int, float] = {}  # seconds that collectives have been active, by the recorder's number
        self._done, self._idle = 0, 0.0  # when the last was known to be done, and seconds seen since
        self.are_under_way = self.are_stuck = False

    def look(self, seconds: float) -> None:
        """Look again, after so many seconds. Reads all entries only where some are old: there may be thousands."""
        active = entries(self._source, only_active=True)
        self._ages = {each["record_id"]: self._ages.get(each["record_id"], -seconds) + seconds for each in active}
        is_old = any(age > _SOME * self._timeout for age in self._ages.values())
        found = entries(self._source) if is_old else []
        # When the last that is known to be done was, in ns; 0 where the recorder does not tell, as gloo's.
        done = max((entry.get("time_discovered_completed_ns") or 0 for entry in found), default=0)
        self._done, self._idle = done, self._idle + seconds if done == self._done else 0.0
        first = next((entry for entry in under_way(found) if entry["process_group"][1] not in PATIENT), None)
        # One that waits behind others waits only since the one before it was done.
        self.are_stuck = first is not None and self._ages.get(first["record_id"], 0.0) > self._timeout
        self.are_stuck &= not done or self._idle > self._timeout
        self.are_under_way = bool(under_way(found or active))

    def told(self) -> str:
        """For the user; see `told`."""
        return told(entries(self._source))


def under_way(found: Sequence[Entry]) -> list[Entry]:
    """The collectives that are not done, oldest first: the first one is waited for, and the others behind it."""
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
    """For the user: the first collective under way, or else the last one."""
    if not found:
        return "none was begun"
    waiting = under_way(found)
    entry, word, state = (waiting[0], "waits in", "under way") if waiting else (found[-1], "last", "done")
    name = entry["profiling_name"].partition(":")[2]
    return (
        f"{word}: {name} {entry['input_sizes']} of group {entry['process_group'][1]}, number {entry['op_id']}, {state}"
    )
