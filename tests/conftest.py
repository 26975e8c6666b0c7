"""What holds for every test."""

import gc
import os
import signal
import time
from collections import Counter
from typing import Any

gc.disable()  # a sixth of the time of imports and collection, which leave nothing to collect

# Of commands too, which inherit it: three processes of tests with two threads each would wait for each other at every
# barrier of OpenMP, spinning, which doubles the time of a run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from fivefold.core import bytecode  # noqa: E402

bytecode.keep()  # of commands too, those with an empty cache of their own among them

import torch  # noqa: E402

AIM_MINUTES = 12  # of `make test` with lint and types, on two idle cores
DEAREST = 10  # files that are told
STARTED = time.monotonic()
# Files that take long, the longest first. Three processes share the files out as they come: these come before the
# others, so that no process is left alone with one of them at the end.
LONG = (
    "parallel/test_matrix.py", "test_readme.py", "verification/test_faults.py", "training/test_checks.py",
    "launch/test_restart.py", "training/test_compile.py", "training/test_offload.py", "checkpoint/test_killed_save.py",
    "verification/test_command.py", "parallel/test_families.py", "parallel/test_rehearsal.py",
    "models/test_families.py", "training/test_run.py", "training/test_preference_runs.py", "parallel/test_fp8.py",
    "generation/test_decode.py", "parallel/test_composition.py", "planner/test_search.py", "checkpoint/test_reshard.py",
)  # fmt: skip

torch.set_num_threads(1)  # models are 32 wide: threads that wait for each other cost more than they save

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; commands inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Long files first."""
    place = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0].removeprefix("tests/"), len(LONG)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no later collection of garbage need look through it."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The seconds of the dearest files, and whether the run kept to its aim. It does not fail: machines are noisy."""
    seconds: Counter[str] = Counter()
    for kind in ("", "passed", "failed", "error"):  # "": of what a test stands on
        for each in terminalreporter.stats.get(kind, []):
            seconds[each.nodeid.partition("::")[0]] += getattr(each, "duration", 0.0)  # not of a collection
    told = [f"{spent:7.1f}s {file}" for file, spent in seconds.most_common(DEAREST) if spent >= 1]
    if told:
        terminalreporter.section(f"dearest {len(told)} files")
        terminalreporter.write_line("\n".join(told))
    minutes = (time.monotonic() - STARTED) / 60
    terminalreporter.write_line(f"{minutes:.1f} minutes, of {sum(seconds.values()) / 60:.1f} minutes of tests")
    if minutes > AIM_MINUTES:
        terminalreporter.write_line(f"the aim on two idle cores is {AIM_MINUTES} minutes")
