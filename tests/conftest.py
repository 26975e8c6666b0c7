"""What holds for every test: its tier, the process that it runs in, what is said of the run and what must not be left.

The tiers are markers (docs/explain/tests.md). A test without one is a unit test: it starts no process and no
ranks, and fails if it does. `core`: the few proofs and commands that run in every `make test` all the same.
`full`: what guards a merge beside them (`make test-all`).
"""

import gc
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

gc.disable()  # a sixth of the time of imports and collection, which leave nothing to collect

# Of commands and workers too, which inherit it: models are 32 wide, and threads that wait for each other at every
# barrier of OpenMP, spinning, double the time of a run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)  # of another job: commands would take themselves for its ranks

import torch  # noqa: E402

from tests import starts  # noqa: E402
from tests.leftovers import Leftovers  # noqa: E402
from tests.pool import close_all, unsynchronised  # noqa: E402
from tests.progress import Progress  # noqa: E402

SLOWEST = 10  # files that are shown
STARTED = time.monotonic()
# Files that take long, the longest first. They come before the others, so that no process is left alone with one.
LONG = (
    "verification/test_core.py", "verification/test_faults.py", "parallel/test_matrix.py", "test_readme.py",
    "test_pages.py", "parallel/test_rehearsal.py", "training/test_checks.py", "parallel/test_adapter.py",
    "parallel/test_copies.py", "api/test_edges.py", "generation/test_decode.py", "parallel/test_families.py",
    "training/test_offload.py", "verification/test_command.py", "launch/test_restart.py",
    "training/test_preference_runs.py", "test_commands.py", "planner/test_search.py", "parallel/test_fp8.py",
    "api/test_callbacks.py", "checkpoint/test_reshard.py", "training/test_run.py", "training/test_compile.py",
    "api/test_optimizer.py",
)  # fmt: skip

torch.set_num_threads(1)
os.fsync = unsynchronised

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; commands inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: Any) -> None:
    """`--nothing-left`."""
    parser.addoption("--nothing-left", action="store_true", help="fail where a process or a file is left behind")


# ---- which tests -----------------------------------------------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path, config: Any) -> bool | None:
    """A file in which no test is asked for is not imported: half of the files, and most of the time of a collection."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text, asked = collection_path.read_text(encoding="utf-8"), config.option.markexpr
    if "not full" in asked and re.search(r"^pytestmark = pytest\.mark\.full$", text, re.MULTILINE):
        return True
    if asked.startswith("full") and "mark.full" not in text:
        return True
    return None


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Long files first."""
    place = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.location[0].removeprefix("tests/"), len(LONG)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no later collection of garbage need look through it."""
    gc.freeze()
    gc.enable()


# ---- a unit test starts nothing --------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Any:
    """Look at what a unit test and its fixtures start."""
    if any(item.get_closest_marker(tier) for tier in ("core", "full", "campaign", "rehearsal")):
        return (yield)
    with starts.watched() as item.stash[_STARTED]:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    """Fail a unit test that started something."""
    result = yield
    if started := item.stash.get(_STARTED, []):
        pytest.fail(f"a unit test started {started[0]}: mark it `full`, or `core` if every run needs it", pytrace=False)
    return result


_STARTED = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session", autouse=True)
def _tokenizers_are_read_here() -> Iterator[None]:
    """The folders of tests are not made to harm: no process of their own (two seconds each) reads them."""
    from fivefold.data import tokenizer, tokenizer_probe

    def here(folder: Path, out: Path, hub_id: str) -> None:
        try:
            wrong = tokenizer_probe.read(str(folder), str(out), hub_id)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"[:300]
        if wrong:
            raise tokenizer._not_a_tokenizer(folder, wrong)

    with patch.object(tokenizer, "_read_apart", here):
        yield


# ---- what is said, and what must not be left -------------------------------------------------------------------------


def pytest_configure(config: Any) -> None:
    """In the process that reports, not in those that xdist starts."""
    if not hasattr(config, "workerinput"):
        if config.option.nothing_left:
            config.stash[_LEFT] = Leftovers.begin()
        if config.option.verbose == 0 and getattr(config.option, "numprocesses", None):
            config.pluginmanager.register(Progress())


_LEFT = pytest.StashKey[Leftovers]()
_FOUND = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """A run that leaves a process, a file or a change of the working tree behind has failed."""
    if (left := session.config.stash.get(_LEFT, None)) is None:
        return
    close_all()
    found = session.config.stash[_FOUND] = left.found()
    if found and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    left.end(keep=exitstatus != 0 or bool(found))


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """What was left, the seconds of the slowest files, and those of all."""
    if found := config.stash.get(_FOUND, []):
        terminalreporter.section("left behind by the tests", red=True)
        terminalreporter.write_line("\n".join(found))
    seconds: Counter[str] = Counter()
    for kind in ("", "passed", "failed", "error"):  # "": of what a test stands on
        for each in terminalreporter.stats.get(kind, []):
            if isinstance(each, pytest.SubtestReport):
                continue  # its seconds are in those of its test
            seconds[each.nodeid.partition("::")[0]] += getattr(each, "duration", 0.0)  # not of a collection
    told = [f"{spent:7.1f}s {file}" for file, spent in seconds.most_common(SLOWEST) if spent >= 1]
    if told:
        terminalreporter.section(f"slowest {len(told)} files")
        terminalreporter.write_line("\n".join(told))
    minutes = (time.monotonic() - STARTED) / 60
    terminalreporter.write_line(f"{minutes:.1f} minutes, of {sum(seconds.values()) / 60:.1f} minutes of tests")
