"""One worker process: `python -m fivefold.worker VERB REQUEST.json`.

Reads its place in the world, joins it and calls the verb's body, `body(request, world)`; a verb that is not in the
table names its body itself, as `package.module:function`. The first failure of a worker is left as a file
beside the logs (never a pickle), where the process that started the workers finds it and says it once.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fivefold.config import parse_config
from fivefold.errors import RunFailed, UserError
from fivefold.launch.events import events_of
from fivefold.launch.failure import failure_file, leave_failure
from fivefold.launch.world import World, alone, find_world, join

INTERRUPTED, TERMINATED = 130, 143  # what a shell reports for a process ended by Ctrl-C and by SIGTERM


def execute(verb: str, request: Mapping[str, Any], world: World) -> None:
    """Join `world` and do `verb` in this process. `request` is plain data, as it came through JSON."""
    with join(world):
        _body(verb)(request, world)


def main(verb: str, request_file: str) -> int:
    """The exit code of this worker: 0, that of its error, 130 when interrupted."""
    _die_with_parent()
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    logs = Path(request_file).parent
    world = find_world(request["device"]) or alone(request["device"])
    _log_to(logs / f"rank-{world.rank}.log", whole=not world.is_first)
    try:
        with _telling(logs, world.rank), join(world), _telling(logs, world.rank):
            execute(verb, request, world)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as stopped:  # by a signal, politely
        return int(stopped.code or 0)
    except UserError as error:
        return error.exit_code
    except Exception:
        return RunFailed.exit_code
    return 0


@contextmanager
def _telling(logs: Path, rank: int) -> Iterator[None]:
    """Leave a failure beside the logs before it goes on: before the group closes and the other ranks fail of that."""
    try:
        yield
    except Exception as error:
        if not failure_file(logs, rank).exists():
            logging.getLogger(__name__).exception("rank %s failed", rank)
            leave_failure(logs, rank, error)
        raise


def _train(request: Mapping[str, Any], world: World) -> None:
    from fivefold.training.run import train

    train(parse_config(request["config"]), world, events=events_of(request, is_first=world.is_first))


Body = Callable[[Mapping[str, Any], World], object]
_BODIES: dict[str, Body] = {"train": _train}


def _body(verb: str) -> Body:
    if verb in _BODIES:
        return _BODIES[verb]
    module, _, function = verb.partition(":")
    body: Body = getattr(import_module(module), function)
    return body


def _log_to(path: Path, *, whole: bool) -> None:
    """Send logging to `path`; `whole` sends everything that this process prints there too."""
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


def _die_with_parent() -> None:
    """On Linux, end when the process that started this one ends, however it ends."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _end(code: int) -> None:
    """End the process at once after a failure: threads of a broken process group must not keep it alive."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


if __name__ == "__main__":
    try:
        exit_code = main(*sys.argv[1:])
    except KeyboardInterrupt:  # while another one was being handled
        exit_code = INTERRUPTED
    _end(exit_code)
