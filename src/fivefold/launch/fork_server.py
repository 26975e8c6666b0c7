"""The process that workers are forked from: `python -P -m fivefold.launch.fork_server MODULE:FUNCTION REPORTS`.

It imports once what every worker runs, while the launcher still prepares the data, and forks the workers from there:
importing torch and transformers takes each process seconds, and many files of a disk that machines may share. It runs
nothing of theirs before. A process that Python code started cannot be forked as safely: it may have threads and a GPU.

Standard input has a line of JSON for each start: `{"request": FILE, "places": [the environment of each rank], "unseen":
whether nobody reads standard output any more}`. The descriptor REPORTS is told the ids of the processes, then
`[rank, exit code]` of each that ends.
"""

import signal

from fivefold.core import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # who started it has the word
    # A scheduler may signal all processes of a job: workers save, and this one is there until they have ended.
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
    """Fork as the launcher says, until it closes standard input; in a worker, return when its work is done."""
    worker.die_with_parent(by=signal.SIGKILL)
    make_usable()  # the launcher's standard output may be closed
    with warnings.catch_warnings(record=True) as warned, suppress(Exception):
        worker.imported(body.partition(":")[0])  # what fails here fails in the worker too, which tells of it
    os.environ[LAUNCHER] = str(os.getpid())
    for line in sys.stdin:
        start, ranks = json.loads(line), dict[int, int]()
        if start["unseen"]:  # the launcher has said so: this process had the same standard output before
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
    """With an empty standard input and an environment of its own, and open to signals."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts.ENDING)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.update(place)


def _has_lost_cuda() -> bool:
    """Whether something that was imported has started CUDA, which no fork of its process can use."""
    if "torch" not in sys.modules:
        return False
    from fivefold.torch_internals import has_lost_cuda

    return has_lost_cuda()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
