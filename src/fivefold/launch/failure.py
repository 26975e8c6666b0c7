"""Failure files of workers: written next to the logs and read back as JSON, never as a pickle.

Also decides which rank reports an error that many ranks may have met, so that each is reported, as a rule once.
"""

import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from fivefold.core.errors import NodesDiffer, RunFailed, UserError
from fivefold.core.files import take_space, writing
from fivefold.core.text import say
from fivefold.launch.world import World

# Types of errors that several ranks leave for one cause; the cause comes first.
HANGS = ("StoodStill", "Frozen", "Hung")
_ROOM = 2**16  # bytes, more than a failure takes


class WorkerDied(RunFailed):
    """A worker ended without being the user's fault. `cause`: the reason, the same for any rank. `comes_again`: a
    restart is certain to fail too, as for lack of memory. `is_own`: it failed by itself, not because other ranks had
    ended. `traceback`: the text of its error, for `--debug`."""

    cause = ""
    is_own = True
    comes_again = False
    traceback = ""


class Suspected(RunFailed):
    """The standing checks have named `ranks` as wrong or slow."""

    def __init__(
        self, what: str, *, fix: str | None = None, more: str | None = None, ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(what, fix=fix, more=more)
        self.ranks = tuple(ranks)


def failure_file(logs: Path, rank: int) -> Path:
    return logs / f"failure-{rank}.json"


def hang_flag(logs: Path) -> Path:
    """The file by which a rank with a hanging collective notifies the others."""
    return logs / "hung"


def put_aside(logs: Path) -> None:
    """Clear an earlier start from `logs`: its flag, which would end this one, is removed; the rest is renamed."""
    for old in (*logs.glob("failure-*.json"), *logs.glob("rank-*.log")):
        old.replace(old.with_name(f"before-{old.name}"))
    hang_flag(logs).unlink(missing_ok=True)


def _unfinished(logs: Path, rank: int) -> Path:
    return logs / f".failure-{rank}.json"


@contextmanager
def room_for_failures(logs: Path, ranks: int, *, first: int = 0) -> Iterator[None]:
    """Inside, disk space is reserved for a failure of each of `ranks` ranks from `first` on, as the failure may be a
    full disk. Raises `UserError` if the disk is full already."""
    places = [_unfinished(logs, rank) for rank in range(first, first + ranks)]
    with writing(logs, instead=""):
        for place in places:
            with place.open("wb") as file:
                take_space(file.fileno(), 0, _ROOM)
    try:
        yield
    finally:
        for place in places:
            place.unlink(missing_ok=True)


def leave_failure(
    logs: Path, rank: int, error: Exception, stack: str | None = None, *, waits: bool = False, last: str = ""
) -> None:
    """Write `error`, with its traceback or, if given, `stack`. `waits`: this rank waits for others, in a collective;
    `last`: its last collective."""
    said = error if isinstance(error, UserError) else UserError(_one_line(error))
    failure = {
        "is_users": isinstance(error, UserError),
        "type": type(error).__name__,
        "rank": rank,
        "time": time.monotonic(),  # monotonic on this machine, even if its clock is set
        "exit_code": error.exit_code if isinstance(error, UserError) else RunFailed.exit_code,
        "what": said.what,
        "fix": said.fix,
        "more": said.more,
        "waits": waits,
        "last": last,
        "suspects": list(error.ranks) if isinstance(error, Suspected) else [],
        "traceback": stack or "".join(traceback.format_exception(error)),
    }
    unfinished = _unfinished(logs, rank)
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with unfinished.open("r+b" if unfinished.exists() else "wb") as file:
            file.write(json.dumps(failure, indent=1).encode())
            file.truncate()
        unfinished.replace(failure_file(logs, rank))
    except OSError as full:  # a full disk must still end in a message
        say(f"{said}\n{logs} cannot be written: {full.strerror or full}", stream=sys.stderr)


def failures(logs: Path) -> list[dict[str, Any]]:
    """All failures: the user's first, then by time; for a hang, the rank that the others wait for comes first."""
    left = [json.loads(file.read_text(encoding="utf-8")) for file in logs.glob("failure-*.json")]
    left.sort(key=lambda failure: (not failure["is_users"], failure["time"]))
    if left and left[0]["type"] in HANGS:
        left.sort(key=_is_consequence)
    return left


def _is_consequence(failure: dict[str, Any]) -> tuple[bool, int]:
    hangs = failure["type"] in HANGS
    return not hangs or failure["waits"], HANGS.index(failure["type"]) if hangs else 0


def is_of_others(failure: dict[str, Any]) -> bool:
    """True if a rank failed because others no longer answered it."""
    is_of_torch = _is_cut_off(failure["type"], failure["what"])
    return is_of_torch or failure["type"] == "RoundOver" or (failure["type"] in HANGS and failure["waits"])


def is_cut_off(error: Exception) -> bool:
    """True for the error of a collective whose other ranks are gone."""
    return _is_cut_off(type(error).__name__, str(error))


def _is_cut_off(kind: str, what: str) -> bool:
    return kind in _OF_TORCH or bool(_CUT_OFF.search(what))


_OF_TORCH = ("DistBackendError", "DistNetworkError", "DistStoreError")
_CUT_OFF = re.compile(
    r"gloo/transport|NCCL|Connection (closed|reset|refused)|Broken pipe|could not connect to the other"
)


def is_out_of_memory(failure: dict[str, Any]) -> bool:
    """True if memory ran out: CUDA's or this machine's, reported by torch or by Python."""
    return _says_so(failure["what"]) or failure["type"] in _LACKS


def is_want_of_memory(error: Exception) -> bool:
    """`is_out_of_memory` for an error that has not been written yet."""
    return type(error).__name__ in _LACKS or (isinstance(error, RuntimeError | OSError) and _says_so(str(error)))


_LACKS = ("OutOfMemoryError", "MemoryError")


def _says_so(said: str) -> bool:
    """True for the messages of torch, of C++, and of the system if a file of offloading cannot be mapped (ENOMEM)."""
    return any(words in said for words in ("can't allocate memory", "std::bad_alloc", "[Errno 12]"))


def place(stack: str) -> str:
    """The position of the main thread in a dump of `faulthandler`: `step (training/step.py:40)`."""
    main = re.split(r"\n\s*\n", stack.strip())[-1]
    frames = re.findall(r'File "([^"]*)", line (\d+) in (.*)', main)
    if not frames:
        return "an unknown place"
    own = (frame for frame in frames if "/fivefold/" in frame[0] or not any(part in frame[0] for part in _OTHERS))
    file, line, function = next(own, frames[0])
    return f"{function} ({'/'.join(Path(file).parts[-2:])}:{line})"


_OTHERS = (os.path.dirname(os.__file__), "site-packages", "<frozen")


def _one_line(error: Exception) -> str:
    """`RuntimeError: the first line of the message`, not the pages that C++ adds to it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


# ---- each error once ------------------------------------------------------------------------------------------------

PATIENCE = timedelta(seconds=3)  # other ranks wait this long for rank 0 to meet the same error


@contextmanager
def one_voice(world: World | None) -> Iterator[None]:
    """Before the ranks are joined: rank 0 reports, and one rank of every other machine, which may fail alone."""
    try:
        yield
    except UserError as error:
        if world is None or world.is_first:
            raise
        if world.local_rank == 0:
            raise _from_elsewhere(error, world) from error
        raise SystemExit(error.exit_code) from None


@contextmanager
def said_once(world: World) -> Iterator[None]:
    """Among joined ranks: rank 0 reports if it met an error, else the first rank that did; of `NodesDiffer` also one
    rank of every other node."""
    try:
        yield
    except UserError as error:
        from fivefold.torch_internals import default_store

        if not speaks(world, default_store()):
            if world.local_rank == 0 and isinstance(error, NodesDiffer):
                raise
            raise SystemExit(error.exit_code) from None
        if world.is_first:
            raise
        raise _from_elsewhere(error, world) from error


def speaks(world: World, store: Any, *, patience: timedelta = PATIENCE) -> bool:
    """True if this rank, which met an error, has to report it. `store` is shared by all ranks."""
    if world.is_first:
        store.set("fivefold/rank-0-speaks", "1")
        return True
    try:
        store.wait(["fivefold/rank-0-speaks"], patience)
    except RuntimeError:  # rank 0 met no error, or ended together with the store
        try:
            return bool(store.add("fivefold/others-speak", 1) == 1)
        except RuntimeError:
            return False
    return False


def _from_elsewhere(error: UserError, world: World) -> UserError:
    where = f"{socket.gethostname()}, rank {world.rank}"
    return type(error)(f"{where}: {error.what}", fix=error.fix, more=error.more)
