"""What PyTorch's flight recorder knows of the collectives of this process, gloo's and NCCL's.

An entry is a dict as the recorder writes it. Three things are not as they look. NCCL has a recorder of its own: gloo's
is empty under it. A send or receive within a batch stays "scheduled" and never retires: the entry "nccl:coalesced"
behind it stands for the batch. And the CPU runs ahead of a GPU: what waits is the first entry that is not done, not the
last.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

Entry = dict[str, Any]
Recorder = Callable[..., str | bytes]
PATIENT = ("checkpoint",)  # groups, by description, whose members may be waited for: a rank still writes
_DUMPS = {"nccl": "_dump_nccl_trace_json"}
_NS = 1e-9


def recorder(backend: str) -> Recorder | None:
    """The recorder of a backend; None where PyTorch has none."""
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, _DUMPS.get(backend, "_dump_fr_trace_json"), None)


def entries(source: Recorder, *, only_active: bool = False) -> list[Entry]:
    """The latest collectives of this process, oldest first."""
    return list(json.loads(source(True, only_active)).get("entries", []))


def is_stuck(source: Recorder, timeout: float) -> bool:
    """Whether a collective has been waited for longer than `timeout` seconds. Reads all entries only where some are as
    old as that: there may be thousands."""
    oldest = min((entry["time_created_ns"] for entry in entries(source, only_active=True)), default=None)
    if oldest is None or time.time() - oldest * _NS <= timeout:
        return False
    return waited(entries(source)) > timeout


def under_way(found: Sequence[Entry]) -> Entry | None:
    """The first collective that is not done, and is waited for."""
    batched: set[int] = set()  # groups in which a batch ends later
    first = None
    for entry in reversed(found):
        group, name = entry["pg_id"], entry["profiling_name"]
        if name.endswith(":coalesced"):
            batched.add(group)
        stands_for_nothing = entry["is_p2p"] and group in batched
        if not (entry["retired"] or stands_for_nothing or entry["process_group"][1] in PATIENT):
            first = entry
    return first


def waited(found: Sequence[Entry], now: float | None = None) -> float:
    """Seconds since which the first collective under way is waited for, 0 without one: since it was enqueued, or since
    the last that is known to be done was. `now`: as `time.time` has it."""
    first = under_way(found)
    if first is None:
        return 0.0
    done = max((entry.get("time_discovered_completed_ns") or 0 for entry in found), default=0)
    return (time.time() if now is None else now) - float(max(first["time_created_ns"], done)) * _NS


def told(found: Sequence[Entry]) -> str:
    """For the user: the collective under way, or else the last one."""
    if not found:
        return "none was begun"
    first = under_way(found)
    entry, word, state = (found[-1], "last", "done") if first is None else (first, "waits in", "under way")
    name = entry["profiling_name"].partition(":")[2]
    return (
        f"{word}: {name} {entry['input_sizes']} of group {entry['process_group'][1]}, number {entry['op_id']}, {state}"
    )
