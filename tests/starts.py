"""What a unit test starts: the processes that Python starts, by an audit hook, and ranks, which `tests.pool` tells."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from typing import Any

# What a unit test may start: the compilers of kernels, which the first that needs one starts, and the process that
# tries what they made; nm, which reads a library; git; uname, which `platform` asks once; the tracker of
# `multiprocessing`; and the process that reads a tokenizer's folder, where no test has it read here
# (`tests/conftest.py`).
ALLOWED = re.compile(
    r"(^|/)(cc|gcc|g\+\+|c\+\+|clang|ld|ldconfig|nm|ptxas|git|uname)( |$)"
    r"|resource_tracker|tokenizer_probe\.py|attention_tried"
)
EVENTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"}

_started: list[str] | None = None  # inside `watched`


def note(what: str) -> None:
    """A process (its command) or ranks were started."""
    if _started is not None and not ALLOWED.search(what[:400]):
        _started.append(what)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _started is not None and event in EVENTS:
        command = arguments[1] if event == "subprocess.Popen" else event
        note(command if isinstance(command, str) else " ".join(map(str, command)))


def _spawn(path: str, arguments: list[str], descriptors: Any) -> int:
    """What `multiprocessing` starts, of which no audit event tells."""
    note(" ".join(map(os.fsdecode, arguments)))
    return _plain_spawn(path, arguments, descriptors)


sys.addaudithook(_audit)
_plain_spawn, util.spawnv_passfds = util.spawnv_passfds, _spawn  # type: ignore[attr-defined]


@contextmanager
def watched() -> Iterator[list[str]]:
    """Inside, every start is put into the list that this gives."""
    global _started
    _started = []
    try:
        yield _started
    finally:
        _started = None
