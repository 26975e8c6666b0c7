"""Ends a run whose collective hangs, and says for each rank what its last collective was and where its threads stand.

A collective that one rank never joins keeps the others waiting, on GPUs for ever. PyTorch's flight recorder knows which
collectives of this process are under way; a thread looks at it. The first rank that waits too long raises a flag in the
logs of the run, so that those that never came tell where they are, too.
"""

import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from fivefold.launch.failure import failure_file, hang_flag, leave_failure
from fivefold.training import flight


class Hung(Exception):
    """A collective was under way for too long."""


@contextmanager
def watching(logs: Path, rank: int, timeout: float) -> Iterator[None]:
    """Inside, this process ends with `leave_failure` when a collective has been under way for `timeout` seconds.

    Or when another rank says so. Does nothing where PyTorch has no flight recorder, or it is switched off.
    """
    recorder = flight.recorder(dist.get_backend()) if dist.is_initialized() else None
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


def _watch(recorder: flight.Recorder, logs: Path, rank: int, timeout: float, ended: threading.Event) -> None:
    pause = min(1.0, timeout / 10)
    while not ended.wait(pause):
        if flight.is_stuck(recorder, timeout):
            hang_flag(logs).touch()
        if hang_flag(logs).exists() and not ended.is_set():
            if not failure_file(logs, rank).exists():
                what = f"no answer in a collective for {timeout:g} s; {flight.told(flight.entries(recorder))}"
                leave_failure(logs, rank, Hung(what), stack=_stacks())
            time.sleep(3 * pause)  # the others see the flag before the launcher ends them
            os._exit(1)


def _stacks() -> str:
    """Where every thread of this process stands."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
