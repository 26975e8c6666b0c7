"""One worker process: `python -m fivefold.launch.worker BODY REQUEST.json`.

Reads its place in the world, joins it and calls `body(request, world)`. BODY names that function, such as
`fivefold.training.run:on_worker`. The first failure of a worker is written to a file next to the logs (never a pickle),
where the launcher finds it and reports it once.
"""

from fivefold.core import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # the launcher reports to the user

import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from fivefold.core.errors import RunFailed, UserError
from fivefold.core.files import cannot_write, is_full, of_system
from fivefold.core.streams import CLOSED_PIPE, is_closed_pipe, let_go, make_usable, unseen_if_need_be
from fivefold.launch.failure import failure_file, leave_failure
from fivefold.launch.memory import out_of_gpu_memory
from fivefold.launch.watch import TELL, stack_file
from fivefold.launch.world import FILE, LAUNCHER, World, alone, find_world, join

INTERRUPTED = interrupts.INTERRUPTED
TERMINATED = 143  # what a shell reports for a process ended by SIGTERM
CLOSED = CLOSED_PIPE


def execute(name: str, request: Mapping[str, Any], world: World) -> None:
    """Join `world` and call the named body in this process, as a worker started for it would."""
    body = _body(name)  # imported before ranks wait for each other: it takes long, and not equally long on all
    with join(world), _in_words(world):
        body(request, world)


def run(name: str, request_file: str, warned: Sequence[warnings.WarningMessage] = ()) -> None:
    """The whole work of this process; after a failure the process ends. `warned`: import warnings, for the log."""
    try:
        interrupts.raise_again()
        code = main(name, request_file, warned)
    except KeyboardInterrupt:  # while another interrupt was being handled
        code = INTERRUPTED
    _end(code)


def main(name: str, request_file: str, warned: Sequence[warnings.WarningMessage] = ()) -> int:
    """Run this worker and return its exit code: 0, that of its error, or 130 when interrupted."""
    die_with_parent()
    make_usable()
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    logs = Path(request_file).parent
    world = find_world(request["device"]) or alone(request["device"])
    _show_rank(world.rank)
    _log_to(logs / f"rank-{world.rank}.log", whole=not world.is_first)
    for warning in warned:
        warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    _tell_stacks(world)
    shown = unseen_if_need_be() if request.get("may_be_unseen") else nullcontext()
    try:
        with shown, _telling(logs, world.rank):
            body = _body(name)
            with _in_words(world), join(world), _telling(logs, world.rank), _in_words(world):
                body(request, world)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as stopped:  # a polite stop by a signal
        return int(stopped.code or 0)
    except UserError as error:
        return error.exit_code
    except Exception:
        return RunFailed.exit_code
    return 0


@contextmanager
def _telling(logs: Path, rank: int) -> Iterator[None]:
    """Write a failure next to the logs before the group closes and the other ranks fail in turn."""
    try:
        yield
    except Exception as error:
        if is_closed_pipe(error):
            raise SystemExit(CLOSED) from None
        if not failure_file(logs, rank).exists():
            logging.getLogger(__name__).exception("rank %s failed", rank)
            leave_failure(logs, rank, error)
        raise


@contextmanager
def _in_words(world: World) -> Iterator[None]:
    """Inside, convert errors of GPU memory and of a full disk to messages for the user."""
    try:
        yield
    except Exception as error:
        if (found := of_system(error)) and is_full(found):
            meets = world.rendezvous.removeprefix(FILE) if world.rendezvous.startswith(FILE) else None
            is_ours = meets if type(error).__name__ == "DistStoreError" else None  # it lies in a temporary folder
            place = found.filename or is_ours or "a file of the run"
            raise cannot_write(place, found, instead="set TMPDIR" if is_ours else "") from error
        if said := out_of_gpu_memory(error, world.rank):
            raise said from error
        raise


Body = Callable[[Mapping[str, Any], World], object]


def _body(name: str) -> Body:
    module, _, function = name.partition(":")
    body: Body = getattr(imported(module), function)
    return body


def imported(module: str) -> ModuleType:
    """Import a module. A new one is imported without the garbage collector, which saves a quarter of the time of torch
    and `transformers`, as they leave no garbage; their objects are then frozen, so that no later collection scans
    them."""
    if module in sys.modules or not gc.isenabled():
        return import_module(module)
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _log_to(path: Path, *, whole: bool) -> None:
    """Send logging to `path`; with `whole`, everything else that this process prints as well."""
    logging.raiseExceptions = False  # a log that cannot be written (a full disk) is no reason for a traceback
    stream = path.open("w", encoding="utf-8", buffering=1)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    if whole:
        sys.stdout.flush()
        sys.stderr.flush()
        for printed in (1, 2):
            os.dup2(stream.fileno(), printed)


def _tell_stacks(world: World) -> None:
    """Write the stacks of all threads for the launcher: in a crash, and on its request, even if the threads cannot run
    Python."""
    if world.folder:
        file = stack_file(Path(world.folder), world.rank).open("w", encoding="utf-8")
        faulthandler.enable(file)
        faulthandler.register(TELL, file, all_threads=True)


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """On Linux, end when the parent process ends, however it ends, with the signal `by`."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)
        started_by = os.environ.get(LAUNCHER)
        if started_by and os.getppid() != int(started_by):  # the parent ended before prctl took effect
            raise SystemExit(TERMINATED)


def _show_rank(rank: int) -> None:
    """On Linux, name this process for `top` and `ps`: all workers are forks with the same command line."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, b"fivefold %d" % rank)


def _end(code: int) -> None:
    """End the process at once after a failure: threads of a broken process group must not keep it alive."""
    logging.shutdown()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    let_go()
    if code:
        os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
