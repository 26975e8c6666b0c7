"""Is a process that stands still named, whichever it is and whatever it was doing?

    python benchmarks/reliability/frozen.py            writes benchmarks/results/frozen.json
    python benchmarks/reliability/frozen.py --quick    one layout, written nowhere

SIGSTOP to a rank, to the process that forks the ranks, or to the launcher, while a run starts, trains, validates or
saves. A rank or the forking process that stands still must end the run, by name, within the time-out and ten seconds. A
launcher that is stopped for twice the time-out, and then goes on, must come to the end that an undisturbed run has.
Exits with 1 when one is not named, or a run does not end.
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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import RESULTS, machine
from reliability.kills import last_step, parents_now, workers_of

LAYOUTS = ("shard2", "tp2", "pp2")
PROCESSES = ("rank 0", "rank 1", "forking process", "launcher")
PHASES = ("start", "step", "validation", "save")
TIMEOUT, MORE = 6.0, 10.0
STEPS, EVERY = 60, 20


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one layout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = [
            freeze(Path(folder), layout, process, phase)
            for layout in LAYOUTS[: 1 if args.quick else None]
            for process in PROCESSES
            for phase in PHASES
        ]
    result: dict[str, Any] = {"machine": machine(), "timeout": TIMEOUT, "cases": cases}
    if not args.quick:
        (RESULTS / "frozen.json").write_text(json.dumps(result, indent=1) + "\n")
    good = sum(case["good"] for case in cases)
    print(f"{good} of {len(cases)} were named in time, or went on")
    return 0 if good == len(cases) else 1


def freeze(folder: Path, layout: str, process: str, phase: str) -> dict[str, Any]:
    """One run in which one process is stopped in one phase."""
    name = f"{layout}-{process}-{phase}".replace(" ", "-")
    command = [
        sys.executable, "-m", "fivefold", "train", f"run.dir={folder}", f"run.name={name}", f"layout={layout}",
        f"train.max_steps={STEPS}", f"checkpoint.every={EVERY}", f"eval.every={EVERY}", "checkpoint.async=false",
        f"train.collective_timeout={TIMEOUT}", "train.max_restarts=0", "sample.every=0", "train.global_batch_size=4",
        "train.micro_batch_size=2", "data.seq_length=64", "tokenizer.name_or_path=byte",
    ]  # fmt: skip
    log = folder / f"{name}.log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True) as run:
        wait_for(phase, run, folder / name, random.Random(name))
        workers = workers_of(run.pid)
        forker = parents_now()[workers[0]]
        whom = {"launcher": run.pid, "forking process": forker} | {f"rank {at}": pid for at, pid in enumerate(workers)}
        os.kill(whom[process], signal.SIGSTOP)
        froze = time.monotonic()
        if process == "launcher":
            time.sleep(2 * TIMEOUT)
            os.kill(run.pid, signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            run.wait(120 if process == "launcher" else TIMEOUT + MORE)
        seconds, code = time.monotonic() - froze, run.poll()
        for pid in (run.pid, forker, *workers):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    said = [line for line in log.read_text().splitlines() if process in line and "stopped" in line][-1:]
    good = code == 0 if process == "launcher" else code not in (None, 0) and bool(said)
    found = {"layout": layout, "process": process, "phase": phase, "good": good, "code": code, "said": said}
    print(json.dumps(found), f"{seconds:.1f} s", flush=True)
    return {**found, "seconds": round(seconds, 1)}


def wait_for(phase: str, run: "subprocess.Popen[bytes]", folder: Path, rng: random.Random) -> None:
    """Until the run is in this phase."""
    for _ in turns(run):
        step = last_step(folder)
        begun = {
            "start": len(workers_of(run.pid)) == 2,
            "step": EVERY < step < 2 * EVERY,
            "validation": step == EVERY,  # its row is there, and validation comes next
            "save": step >= EVERY and any((folder / "checkpoints").glob(".tmp-*")),
        }
        if begun[phase]:
            time.sleep(rng.random() * {"start": 2.0, "step": 0.1}.get(phase, 0.0))
            return


def turns(run: "subprocess.Popen[bytes]") -> Iterator[None]:
    """While the run runs, for two minutes at most."""
    deadline = time.monotonic() + 120
    while run.poll() is None and time.monotonic() < deadline:
        yield
        time.sleep(0.002)
    raise SystemExit("the run has ended, or does not come to this phase")


if __name__ == "__main__":
    sys.exit(main())
