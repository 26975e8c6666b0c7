"""Does a run that is killed or told to stop, again and again, end as the run left alone?

    python benchmarks/reliability/kills.py            200 kills and 200 signals; writes benchmarks/results/kills.json
    python benchmarks/reliability/kills.py --quick    one chain of each layout, written nowhere

A chain is one run that is struck five times, at moments drawn from its number: a while after a start, or after a step
between two checkpoints. The launcher starts workers that died again; where it has ended, the same command is typed
again. At the end its weights, moments and the loss of every step are compared, bit for bit, with those of a run of the
same layout that nothing happened to. Exits with 1 when anything differs.

    a kill     SIGKILL to a worker, to the process that forks them, to the launcher, or to all of them at once
    a signal   SIGTERM or SIGINT to the launcher, to a worker or to all, one to three times, 0 to 5 seconds apart
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from common import RESULTS, machine
from fivefold.checkpoint import Checkpoint, step_folder
from fivefold.core.json_lines import read

LAYOUTS = ("shard2", "tp2", "pp2", "cp2", "shard2+zero1")
STEPS, EVERY = 150, 10  # steps of a run, steps between its checkpoints
BLOWS = 5  # of a chain
CHAINS = 4  # of each layout, kind and way to save
PATIENCE = 120.0  # seconds without a new step until a chain is given up
KILLED = ("worker", "forker", "launcher", "all")
TOLD = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one chain of each layout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chains = list(all_chains(Path(folder), quick=args.quick))
    seconds = [each for chain in chains for each in chain["seconds"]]
    result: dict[str, Any] = {
        "machine": machine(),
        "seconds_to_next_step": {"median": median(seconds), "most": max(seconds)},
        "chains": [{key: value for key, value in chain.items() if key != "seconds"} for chain in chains],
    }
    if not args.quick:
        (RESULTS / "kills.json").write_text(json.dumps(result, indent=1) + "\n")
    equal = sum(chain["equal"] for chain in chains)
    for kind in ("kill", "signal"):
        print(f"{sum(sum(chain['blows'].values()) for chain in chains if chain['kind'] == kind)} blows by a {kind}")
    print(f"{equal} of {len(chains)} chains ended as the run left alone, bit for bit")
    return 0 if equal == len(chains) else 1


def all_chains(folder: Path, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Each chain, and what became of it."""
    for layout in LAYOUTS:
        for saves in ("async", "sync")[: 1 if quick else 2]:
            alone = Run(folder / f"{layout}-{saves}", layout, saves)
            alone.end()
            for kind in ("kill", "signal"):
                for number in range(1 if quick else CHAINS):
                    yield chain(alone, Run(folder / f"{layout}-{saves}-{kind}-{number}", layout, saves), kind)


def chain(alone: "Run", run: "Run", kind: str) -> dict[str, Any]:
    """Strike `run` five times and let it end."""
    rng = random.Random(run.folder.name)
    blows = Counter[str]()
    for _ in range(BLOWS):
        run.go_on()
        run.wait_for_a_moment(rng)
        blows[run.kill(rng) if kind == "kill" else run.tell(rng)] += 1
    why = run.end()
    equal = not why and losses(alone.folder) == losses(run.folder) and same_state(alone.folder, run.folder)
    found = {"chain": run.folder.name, "kind": kind, "equal": equal, "blows": dict(blows), "starts": run.starts}
    print(json.dumps(found), why, flush=True)
    return {**found, "why": why, "seconds": run.seconds}


class Run:
    """One `fivefold train` in the background, which is started as often as it takes."""

    def __init__(self, folder: Path, layout: str, saves: str) -> None:
        self.folder, self.starts = folder, 0
        self.seconds: list[float] = []  # from each blow to the next step that was logged
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            sys.executable, "-m", "fivefold", "train", f"run.dir={folder.parent}", f"run.name={folder.name}",
            f"layout={layout}", f"checkpoint.async={str(saves == 'async').lower()}", f"checkpoint.every={EVERY}",
            f"train.max_steps={STEPS}", "eval.every=0", "sample.every=0", "train.global_batch_size=4",
            "train.micro_batch_size=2", "model.overrides.hidden_size=64", "model.overrides.intermediate_size=96",
            "model.overrides.head_dim=16", "data.seq_length=64", "tokenizer.name_or_path=byte",
        ]  # fmt: skip

    def go_on(self) -> None:
        """Start it if it does not run."""
        if self._process is None or self._process.poll() is not None:
            with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
                self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
            self.starts += 1

    def end(self) -> str:
        """Start it until it ends well; why it does not, or nothing."""
        struck, before = time.monotonic(), self._step()
        while True:
            self.go_on()
            assert self._process is not None
            while self._process.poll() is None and time.monotonic() - struck < PATIENCE:
                if (step := self._step()) != before:
                    struck, before = time.monotonic(), step
                time.sleep(0.02)
            if self._process.returncode == 0:
                return ""
            if time.monotonic() - struck >= PATIENCE:
                self._strike([self._process.pid, *self._below()], signal.SIGKILL)
                return f"stands at step {self._step()}, exit code {self._process.poll()}"

    def wait_for_a_moment(self, rng: random.Random) -> None:
        """Some seconds after a start, or some steps after the last one, and then a moment."""
        started = time.monotonic()
        if rng.random() < 0.25:
            self._wait(lambda: time.monotonic() - started > 6 * rng.random())
            return
        target = min(self._step() + rng.randrange(3, STEPS // BLOWS), STEPS - 1)
        self._wait(lambda: self._step() >= target)
        time.sleep(rng.random() * 0.1)

    def kill(self, rng: random.Random) -> str:
        """SIGKILL to one of its processes, or to all."""
        assert self._process is not None
        below, name = self._below(), rng.choice(KILLED)
        workers = workers_of(self._process.pid)
        whom = {
            "worker": rng.sample(workers, min(1, len(workers))), "forker": sorted(set(below) - set(workers)),
            "launcher": [self._process.pid], "all": [self._process.pid, *below],
        }[name]  # fmt: skip
        self._strike(whom, signal.SIGKILL)
        self._recover(below)
        return name

    def tell(self, rng: random.Random) -> str:
        """SIGTERM or SIGINT, one to three times."""
        assert self._process is not None
        number, times, below = rng.choice(TOLD), rng.randrange(1, 4), self._below()
        workers = workers_of(self._process.pid)
        whom = rng.choice([[self._process.pid], rng.sample(workers, min(1, len(workers))), [self._process.pid, *below]])
        for _ in range(times):
            self._strike(whom, number)
            time.sleep(rng.choice([0.0, 0.05, 5 * rng.random()]))
        self._recover(below)
        return f"{number.name} x {times}"

    def _strike(self, whom: Sequence[int], number: signal.Signals) -> None:
        for each in whom:
            with suppress(ProcessLookupError):
                os.kill(each, number)

    def _recover(self, before: Sequence[int]) -> None:
        """Wait until those that ran before are gone or go on, and start the run again where it has ended."""
        struck, step = time.monotonic(), self._step()
        while time.monotonic() - struck < PATIENCE and self._step() in (step, 0):
            if self._process and self._process.poll() is not None:
                if self._process.returncode == 0:
                    return
                self.go_on()
            time.sleep(0.02)
        self.seconds.append(time.monotonic() - struck)

    def _wait(self, condition: Callable[[], bool]) -> None:
        waited = time.monotonic()
        while not condition() and time.monotonic() - waited < PATIENCE:
            if self._process is None or self._process.poll() is not None:
                return
            time.sleep(0.01)

    def _step(self) -> int:
        return last_step(self.folder)

    def _below(self) -> list[int]:
        assert self._process is not None
        return below(self._process.pid)


def parents_now() -> dict[int, int]:
    """The parent of every process."""
    parents = {}
    for task in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(task.name)] = int((task / "stat").read_text().rpartition(")")[2].split()[1])
    return parents


def below(process: int) -> list[int]:
    """The processes that it and those below it have started."""
    found, parents = [process], parents_now()
    for each in found:
        found += [pid for pid, parent in parents.items() if parent == each]
    return found[1:]


def workers_of(launcher: int) -> list[int]:
    """The children of the launcher's child that forks them."""
    parents = parents_now()
    return sorted(pid for pid, its in parents.items() if parents.get(its) == launcher)


def last_step(run: Path) -> int:
    """The step of the last row that is whole; 0 before there is one."""
    rows = read(run / "metrics.jsonl").rows
    return int(rows[-1]["step"]) if rows else 0


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, loss) of every step."""
    return [(row["step"], row["train/loss"]) for row in read(run / "metrics.jsonl").rows]


def same_state(one: Path, other: Path) -> bool:
    """Whether two runs hold the same bits at their end."""
    a, b = (Checkpoint.open(run / "checkpoints" / step_folder(STEPS)) for run in (one, other))
    return a.kinds == b.kinds and all(
        torch.equal(a.source(kind).whole(name), b.source(kind).whole(name))
        for kind in a.kinds
        for name in a.source(kind).ordered
    )


if __name__ == "__main__":
    sys.exit(main())
