"""Ends a run whose collective hangs, and says for each rank what its last collective was and where its threads stand.

A collective that one rank never joins keeps the others waiting, on GPUs for ever. PyTorch's flight recorder knows which
collectives of this process are under way; a thread looks at it. The first rank that waits too long raises a flag in the
logs of the run, so that those that never came tell where they are, too.
"""

import faulthandler
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fivefold.launch.failure import failure_file, hang_flag, leave_failure

PATIENT = ("checkpoint",)  # groups, by description, whose members may be waited for: a rank still writes


class Hung(Exception):
    """A collective was under way for too long."""


@contextmanager
def watching(logs: Path, rank: int, timeout: float) -> Iterator[None]:
    """Inside, this process ends with `leave_failure` when a collective has been under way for `timeout` seconds.

    Or when another rank says so. Does nothing where PyTorch has no flight recorder, or it is switched off.
    """
    recorder = _recorder()
    if recorder is None or timeout <= 0:
        yield
        return
    logs.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(recorder, logs, rank, timeout, ended), name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _watch(recorder: Any, logs: Path, rank: int, timeout: float, ended: threading.Event) -> None:
    pause = min(1.0, timeout / 10)
    while not ended.wait(pause):
        entries = _entries(recorder)
        if any(_waits(entry) > timeout for entry in entries):
            hang_flag(logs).touch()
        if hang_flag(logs).exists() and not ended.is_set():
            if not failure_file(logs, rank).exists():
                what = f"no answer in a collective for {timeout:g} s; {_last(entries)}"
                leave_failure(logs, rank, Hung(what), stack=_stacks())
            time.sleep(3 * pause)  # the others see the flag before the launcher ends them
            os._exit(1)


def _recorder() -> Any:
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, "_dump_fr_trace_json", None)


def _entries(recorder: Any) -> list[dict[str, Any]]:
    """The latest collectives of this process, oldest first."""
    return list(json.loads(recorder()).get("entries", []))


def _waits(entry: dict[str, Any]) -> float:
    """Seconds that a collective has been under way; 0 when it is done, or may take as long as it likes."""
    if entry["retired"] or entry["process_group"][1] in PATIENT:
        return 0.0
    return time.time() - float(entry["time_created_ns"]) * 1e-9


def _last(entries: list[dict[str, Any]]) -> str:
    if not entries:
        return "none was begun"
    last = entries[-1]
    state = "done" if last["retired"] else "under way"
    name = last["profiling_name"].partition(":")[2]
    return f"last: {name} {last['input_sizes']} of group {last['process_group'][1]}, number {last['op_id']}, {state}"


def _stacks() -> str:
    """Where every thread of this process stands."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
