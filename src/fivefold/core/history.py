"""`history.jsonl` of a run folder: when and where each start trained, with what, and what happened on the way.

One JSON object a line, in the order of time: `{"event", "step", "time", ...}`. Events are `start` (with versions,
machine, layout, data, schedule), `end` (`how` it ended; missing when the process was killed), `died` (a worker, as
the launcher reports), `nodes` (others train from here on, as a launcher reports), `left out` (a node, as its launcher
reports), `straggler`, `skipped`, and `note`. It is for people and for `fivefold report`. The run itself reads only the
day of its first start, for chat templates. No torch.
"""

import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

from fivefold.core.json_lines import JsonLines, read
from fivefold.core.system import versions

NAME = "history.jsonl"
_ENDS = {"died": "a worker died", "nodes": "the nodes changed"}  # events of a launcher that end a start
SECTIONS = ("versions", "machine", "schedule", "data")  # tables in the record of a start


@dataclass(frozen=True)
class Start:
    """One start of a run: after `step` steps, until `last` (None: not known). `about`: the fields of its record."""

    step: int
    time: str
    about: Mapping[str, Any]
    last: int | None = None
    ended: str = ""  # time
    how: str = ""

    @property
    def seconds(self) -> float | None:
        """Wall clock of this start; None when its end was not recorded."""
        begin, end = _moment(self.time), _moment(self.ended)
        return (end - begin).total_seconds() if begin and end else None


@dataclass(frozen=True)
class RunEvent:
    """Something that happened after `step` steps, in the `number`-th start (from 0)."""

    step: int
    kind: str
    what: str
    number: int


@dataclass(frozen=True)
class History:
    """All starts of a run, and what happened in them, in the order of time."""

    starts: Sequence[Start] = ()
    events: Sequence[RunEvent] = ()
    damaged: Sequence[str] = field(default=())

    def spans(self) -> Iterator[tuple[Start, int, int | None]]:
        """Yield each start with its remaining steps: after `first`, up to `last` (None: the newest).

        If a later start resumed from an earlier step, the steps after it were done again.
        """
        for number, start in enumerate(self.starts):
            later = [start.step for start in self.starts[number + 1 :]]
            last = min(later) if later else None
            if last is None or last > start.step:
                yield start, start.step, last

    def is_left(self, event: RunEvent) -> bool:
        """True if the step of `event` was not done again by a later start."""
        return all(event.step <= start.step for start in self.starts[event.number + 1 :])


def load(run: Path) -> History:
    """The history of the run folder `run`; empty for a run of an earlier version."""
    try:
        lines = read(run / NAME)
    except OSError as error:
        return History(damaged=[f"{run / NAME} cannot be read: {error.strerror or error}"])
    starts: list[Start] = []
    events: list[RunEvent] = []
    for row in lines.rows:
        kind, step, number = str(row.get("event")), row["step"], max(0, len(starts) - 1)
        if kind == "start":
            about = {key: value for key, value in row.items() if key not in SECTIONS or isinstance(value, dict)}
            starts.append(Start(step, str(row.get("time", "")), about))
        elif kind == "end" and starts:
            when, how = str(row.get("time", "")), str(row.get("what", ""))
            starts[-1] = replace(starts[-1], last=step, ended=when, how=how)
        elif kind != "end":
            if kind in _ENDS and starts and not starts[-1].ended:
                starts[-1] = replace(starts[-1], last=step, ended=str(row.get("time", "")), how=_ENDS[kind])
            events.append(RunEvent(step, kind, str(row.get("what", "")), number))
    return History(starts, events, [str(line) for line in lines.damaged])


def first_day(run: Path) -> date | None:
    """Day on which the run in this folder first started; None if it has not, or the day is missing."""
    starts = load(run).starts
    began = _moment(starts[0].time) if starts else None
    return began.date() if began else None


class Log:
    """Writer of a run's history. Calls `say` when it cannot be written; raises nothing."""

    def __init__(self, run: Path, say: Callable[[str], None], *, room: Path | None = None) -> None:
        """`room`: see `JsonLines`."""
        self._lines = JsonLines(run / NAME, last_step=None, say=say, room=room)

    def write(self, event: str, step: int, **about: Any) -> None:
        """Append an event after `step` steps; `about`: plain data."""
        self._lines.write({"event": event, "step": step, "time": now(), **about})

    def close(self) -> None:
        self._lines.close()


def surroundings() -> dict[str, Any]:
    """Versions and machine of this process, for the record of a start."""
    return {
        "versions": versions(),
        "machine": {"host": socket.gethostname(), "system": platform.platform(terse=True)},
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of another start of the same run, in words: layout, ranks, versions, schedule, named code."""
    found = []
    if before.get("layout") != now.get("layout"):
        found.append(f"layout {before.get('layout')} → {now.get('layout')}")
    elif before.get("world") != now.get("world"):
        found.append(f"{before.get('world')} → {now.get('world')} ranks")
    if before.get("nodes", 1) != now.get("nodes", 1):
        found.append(f"{before.get('nodes', 1)} → {now.get('nodes', 1)} nodes")
    was, schedule = before.get("schedule") or {}, now.get("schedule") or {}
    words = {"name": "schedule", "peak": "learning rate", "warmup_steps": "warm-up steps", "total_steps": "steps"}
    found += [f"{words.get(key, key)} {was[key]} → {value}" for key, value in schedule.items()
              if key in was and was[key] != value]  # fmt: skip
    was, code = before.get("code") or {}, now.get("code") or {}
    found += [
        f"the code of {key} {was[key]} → {digest}" for key, digest in code.items() if was.get(key, digest) != digest
    ]
    was, installed = before.get("versions") or {}, now.get("versions") or {}
    return found + [f"{key} {was[key]} → {value}" for key, value in installed.items() if was.get(key, value) != value]


def now() -> str:
    """Current time with its offset from UTC: `2026-01-31T12:34:56+01:00`."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
