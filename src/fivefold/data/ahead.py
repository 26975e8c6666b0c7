"""`fivefold data --prepare`: tokenise ahead of a run, in several processes or as the jobs of an array.

Every process takes units of the sources (`data.units`). The run finds their tokens in the cache as if it had tokenised
the sources itself.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from fivefold.config import RunConfig, parse_config
from fivefold.core.cache import Progress, cache_root, say_aloud
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.system import cores
from fivefold.data.prepare import PreparedData, inputs, prepare
from fivefold.data.store import Say, check_settings, content_key, store_folder
from fivefold.data.stream import UnitOrder
from fivefold.data.units import TextUnits, shares

_MORE = "fivefold docs howto/data, 'Prepare ahead'"


@dataclass(frozen=True)
class SourceProgress:
    """One source after the command. `done`: its units that are tokenised, by whichever process."""

    source: str
    units: int
    done: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Ahead:
    """The result of the command: `tokenised`: units of this call, of `size` bytes of text, in `seconds`. `left`: units
    that no call has tokenised yet. `data`: the data of the run, once every unit is."""

    sources: tuple[SourceProgress, ...]
    tokenised: int
    size: int
    seconds: float
    left: int
    data: PreparedData | None


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `i/n`, share i of n from 0 on. Raises `UserError`."""
    match = re.fullmatch(r"(\d{1,18})/(\d{1,18})", text)
    share, number = map(int, match.groups()) if match else (0, 0)
    if not 0 <= share < number:
        counted = f"shards are counted from 0: 0/{number} to {number - 1}/{number}" if number else "such as 0/8"
        raise UserError(f"--shard {text}: no shard i/n", fix=counted, more=_MORE)
    return share, number


def prepare_ahead(
    config: RunConfig,
    *,
    workers: int | None = None,
    shard: tuple[int, int] | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
    say: Say = say_aloud,
    unit_bytes: int | None = None,
) -> Ahead:
    """Tokenise the data of `config` into the cache: all of it, or `shard` i of n; in `workers` processes of one thread
    each (None: one for each core).

    `unit_bytes`: about the bytes of text of a unit, if this call is the first of a source. Once all is tokenised, by
    this call or by others, the units are joined and the rows packed. Raises `UserError` for bad input, and for input
    that changed since another call. With `data.streaming` the units of `data.train` stay as they are, for the run.
    """
    began, root = time.monotonic(), cache_root(cache)
    train, validation, tokenizer = inputs(config, root, progress)
    sources: list[TextUnits] = []
    for files, is_streamed in [(one, config.data.streaming) for one in train] + [(one, False) for one in validation]:
        check_settings(files)
        if is_streamed:
            sources.append(TextUnits.begin(files, tokenizer, root, unit_bytes, streamed=True))
            continue
        # Only a call for all of it reads all of it: a shard must not take longer the more shards there are.
        if files.store or (not shard and store_folder(files, content_key(files, root), tokenizer, root).is_dir()):
            continue
        sources.append(TextUnits.begin(files, tokenizer, root, unit_bytes))
    every = [(units, number) for units in sources for number in range(len(units.units))]
    sizes = [units.units[number].size for units, number in every]
    mine: Sequence[int] = sorted(range(len(every)), key=lambda at: -sizes[at])
    if shard:
        mine = next(iter(shares(sizes, shard[1])[shard[0] :]), ())
    todo = [at for at in mine if not every[at][0].is_joined and every[at][0].counts(every[at][1]) is None]
    _tokenise([every[at] for at in todo], workers or cores(), progress)
    seconds = time.monotonic() - began
    lines = tuple(map(_progress_of, sources))
    left = sum(line.units - line.done for line in lines)
    data = None if left else prepare(config, progress=progress, cache=cache, say=say)
    return Ahead(lines, len(todo), sum(sizes[at] for at in todo), seconds, left, data)


def _progress_of(units: TextUnits) -> SourceProgress:
    number, name = len(units.units), units.files.name
    done = [counts for at in range(number) if (counts := units.counts(at))]
    if units.is_joined:  # looked at last: another process may be removing the units
        whole = units.joined_counts()
        return SourceProgress(name, number, number, whole["documents"], whole["tokens"])
    documents, tokens = (sum(counts[key] for counts in done) for key in ("documents", "tokens"))
    return SourceProgress(name, number, len(done), documents, tokens)


# ---- processes -------------------------------------------------------------------------------------------------------


def _tokenise(todo: Sequence[tuple[TextUnits, int]], workers: int, progress: Progress | None) -> None:
    """Tokenise units in processes of their own, in this order."""
    total, done = sum(units.units[number].size for units, number in todo), 0
    sources = list({units.folder: units for units, _ in todo}.values())
    at = {units.folder: place for place, units in enumerate(sources)}
    count = min(max(1, workers), len(todo))
    waiting = iter(todo)
    running: dict[Any, int] = {}
    with _processes(count, sources) as free:
        while True:
            for process, (units, number) in zip(free, waiting, strict=False):
                process.send((at[units.folder], number))
                running[process] = units.units[number].size
            if not running:
                return
            free = list[Any](wait(list(running)))
            for process in free:
                if error := process.recv():
                    raise error
                done += running.pop(process)
                if progress:
                    progress(f"tokenising in {count} process{'es' * (count > 1)}", done, total)


@contextmanager
def _processes(workers: int, sources: Sequence[TextUnits]) -> Iterator[list[Any]]:
    """Connections to processes that tokenise. They end with this one, or after their unit if it is killed.

    No pool of the standard library: its queues are named semaphores, which stay in /dev/shm when all of its processes
    are killed at once.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks
    processes, connections = list[Any](), list[Any]()
    try:
        for _ in range(workers):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, sources), daemon=True)
            process.start()
            theirs.close()  # so that its end is seen here
            processes.append(process)
            connections.append(ours)
        yield connections
    except (EOFError, ConnectionError) as error:
        raise RunFailed(
            "a process of --prepare was killed, or ran out of memory",
            fix="run the command again: what was tokenised is kept; with fewer --workers if memory is short",
            more=_MORE,
        ) from error
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _serve(asked: Any, sources: Sequence[TextUnits]) -> None:
    """Tokenise the units that the parent names, and answer with the error of each, if there is one."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core for each process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    with suppress(EOFError, ConnectionError):  # the parent has ended
        while True:
            source, number = asked.recv()
            failed: Exception | None = None
            try:
                sources[source].tokenise(number)
            except Exception as error:
                failed = error
            asked.send(failed)


# ---- the process that tokenises ahead of a trainer (`data.streaming`), one a machine ---------------------------------
#
# `python -m fivefold.data.ahead`: its first line of input is the run file and the folder of the cache; then comes the
# number of each window that the trainer opens. It ends with its input, and so with the trainer.

_AHEAD = 2  # windows tokenised beyond the one that was opened last


class OpenWindows:
    """The last window that the trainer opened, as its lines come in."""

    def __init__(self) -> None:
        self.number, self._changed = 0, Condition()
        Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        for line in sys.stdin:
            with self._changed:
                self.number = max(self.number, int(line))
                self._changed.notify_all()
        os._exit(0)

    def wait_for(self, number: int) -> None:
        """Wait until window `number` is near enough."""
        with self._changed:
            self._changed.wait_for(lambda: number <= self.number + _AHEAD)


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core beside the trainer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides
    request = json.loads(sys.stdin.readline())
    opened, config, root = OpenWindows(), parse_config(request["config"]), Path(request["cache"])
    with suppress(UserError):  # the trainer comes to the same unit, and reports it
        train, _, tokenizer = inputs(config, root)
        sources = tuple(TextUnits.begin(files, tokenizer, root, streamed=True) for files in train)
        fill(UnitOrder(sources, config.train.seed), opened)


def fill(order: UnitOrder, opened: OpenWindows) -> None:
    """Tokenise window after window, except those that the trainer has passed, until no unit is left."""
    number, left = 0, set(order.units)
    while left:
        opened.wait_for(number)
        number = max(number, opened.number)
        for source, unit in order.window(number):
            order.sources[source].tokenise(unit)
            left.discard((source, unit))
        number += 1


if __name__ == "__main__":
    main()
