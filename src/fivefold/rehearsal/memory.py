"""Contents of memory at the peak of a phase, from the history of the caching allocator.

An allocation is named after its origin: a line of Python outside torch, or its role in FSDP or the optimizer; and after
the module that was running, with the numbers of layers as *.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from linecache import getline
from pathlib import Path
from typing import Any

from fivefold.core.text import any_layer
from fivefold.rehearsal.request import Item

SHOWN = 12  # items of a peak
# Part of a file's name, part of a function's name in it, and what that allocates.
_KNOWN = (
    ("_fsdp_collectives.py", "foreach_reduce", "gradients (FSDP)"),
    ("_fsdp_collectives.py", "foreach_all_gather", "gathered parameters (FSDP)"),
    ("_fsdp_param.py", "all_gather_outputs", "gathered parameters (FSDP)"),
    ("_fsdp_param.py", "accumulated_grad", "gradients of several micro batches (FSDP)"),
    ("torch/optim/", "_init_group", "optimizer state"),
    ("torch/optim/", "", "the optimizer's update"),
    ("fivefold/training/optimizers/", "", "the optimizer's update"),
)
_IN_TORCH = ("/torch/", "torch/_", "<frozen", "<string>")
_COMPILED = "inductor/"  # part of the path of compiled code
_SHAPE = re.compile(r"empty_strided_\w+\(\(([\d, ]+?),?\)")  # as compiled code allocates


@dataclass(frozen=True)
class Allocation:
    """An event of the allocator's history: its time (microseconds), its size, and its stack frames, innermost first, as
    (file, line, function)."""

    time: int
    size: int
    frames: tuple[tuple[str, int, str], ...]
    address: int


@dataclass(frozen=True)
class Peak:
    """The most bytes allocated within a phase, and the allocations alive then."""

    bytes: int
    live: tuple[Allocation, ...]


def peak_of(history: Sequence[Mapping[str, Any]], begin: int, end: int) -> Peak:
    """The peak between two times (microseconds) of a history that begins with the process; if an allocation failed
    between them, the state at the failure."""
    held = most = at_most = 0
    for at, event in enumerate(history):
        if event["time_us"] > end:
            break
        action = event["action"]
        held += event["size"] if action == "alloc" else -event["size"] if action == "free_requested" else 0
        if event["time_us"] >= begin and (held > most or action == "oom"):
            most, at_most = held, at
            if action == "oom":
                break
    live: dict[int, Allocation] = {}
    for event in history[: at_most + 1]:
        if event["action"] == "alloc":
            frames = tuple((f["filename"], f["line"], f["name"]) for f in event.get("frames", ()))
            live[event["addr"]] = Allocation(event["time_us"], event["size"], frames, event["addr"])
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    return Peak(most, tuple(live.values()))


@dataclass
class Running:
    """The running module at each time: names with the times (microseconds) since which they ran; "" between modules."""

    times: list[int]
    names: list[str]

    def at(self, time: int) -> str:
        """The module that was running at a time."""
        place = bisect_right(self.times, time) - 1
        return self.names[place] if place >= 0 else ""


def items(live: Iterable[Allocation], running: Running, named: Mapping[int, str]) -> tuple[Item, ...]:
    """The largest items in memory, equal ones together. `named`: addresses of parameters."""
    found: dict[tuple[str, str], list[int]] = {}
    for block in live:
        name = named.get(block.address)
        what, where = ("parameters", name) if name else (made_by(block.frames), running.at(block.time))
        found.setdefault((what, any_layer(where)), []).append(block.size)
    rows = [Item(what, where, len(sizes), sum(sizes)) for (what, where), sizes in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:SHOWN])


def made_by(frames: Sequence[tuple[str, int, str]]) -> str:
    """Origin of an allocation, in words."""
    for file, line, function in frames:
        for part, name, says in _KNOWN:
            if part in file and name in function:
                return says
        if _COMPILED in file:
            shape = _SHAPE.search(getline(file, line))
            return f"a compiled block [{shape[1]}]" if shape else "a compiled block"
        if not any(part in file for part in _IN_TORCH):
            return f"{short(file)}:{line} {function}"
    return "backward, in torch"


def short(file: str) -> str:
    """Shorten a path: fivefold's files start at the package, as `fivefold/models/packed.py`; of others only the file
    name stays."""
    parts = Path(file).parts
    if "fivefold" in parts:
        return "/".join(parts[len(parts) - 1 - parts[::-1].index("fivefold") :])
    return parts[-1] if parts else file
