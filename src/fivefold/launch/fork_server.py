"""The process that forks the workers: `python -P -m fivefold.launch.fork_server MODULE:FUNCTION REPORTS`.

It imports the workers' modules once, while the launcher still prepares the data, and forks the workers from there:
importing torch and transformers takes each process seconds, and reads many files from a disk that machines may share.
It runs none of that code before the fork. Forking a process started by Python code is less safe: it may have threads
and a GPU.

Standard input carries one line of JSON per start: `{"request": FILE, "places": [the environment of each rank],
"unseen": true if nobody reads standard output}`. The descriptor REPORTS receives `[]` once the modules are imported,
and for each start the process ids, then `[rank, exit code]` per exit.
"""

import signal

from fivefold.core import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # the launcher reports to the user
    # A scheduler may signal all processes of a job: workers save, and this one must outlive them.
    signal.pthread_sigmask(signal.SIG_BLOCK, interrupts.ENDING)

import json
import os
import sys
import warnings
from contextlib import suppress
from typing import Any

from fivefold.core.streams import let_go, make_usable
from fivefold.launch import worker
from fivefold.launch.world import LAUNCHER


def serve(body: str, reports: int) -> None:
    """Fork as the launcher requests, until it closes standard input. In a worker, return when its work is done."""
    worker.die_with_parent(by=signal.SIGKILL)
    make_usable()  # the launcher's standard output may be closed
    with warnings.catch_warnings(record=True) as warned, suppress(Exception):
        worker.imported(body.partition(":")[0])  # a failure here repeats in the worker, which reports it
    os.environ[LAUNCHER] = str(os.getpid())
    _report(reports, [])
    for line in sys.stdin:
        start, ranks = json.loads(line), dict[int, int]()
        if start["unseen"]:  # nobody reads the standard output that it shares with the launcher
            let_go()
        sys.stdout.flush()
        for rank, place in enumerate(start["places"]):
            pid = os.fork()
            if pid == 0:
                os.close(reports)
                _stand_alone(place)
                if _has_lost_cuda():
                    os.execv(sys.executable, [sys.executable, "-P", "-m", worker.__name__, body, start["request"]])
                worker.run(body, start["request"], warned)
                return
            ranks[pid] = rank
        _report(reports, list(ranks))
        while ranks:
            pid, status = os.wait()
            if pid in ranks:
                _report(reports, [ranks.pop(pid), os.waitstatus_to_exitcode(status)])


def _report(reports: int, numbers: list[int]) -> None:
    with suppress(BrokenPipeError):
        os.write(reports, f"{json.dumps(numbers)}\n".encode())


def _stand_alone(place: dict[str, Any]) -> None:
    """Give this process an empty standard input and its own environment, and unblock its signals."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts.ENDING)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.update(place)


def _has_lost_cuda() -> bool:
    """True if an import has initialised CUDA, which a forked process cannot use."""
    if "torch" not in sys.modules:
        return False
    from fivefold.torch_internals import has_lost_cuda

    return has_lost_cuda()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
